"""Who used a piece of memory last: what a new write, or its next owner, has to wait for."""

from __future__ import annotations

from framework.vm.array import Array
from framework.vm.stream import Mark, Stream

# Behind every address.
_NOWHERE = 1 << 64


class Uses:
    """Which streams, besides the device's first, used a storage last: one write, and for each its latest read since.

    All of it lies between the addresses `start` and `end`: the parts of a storage, such as the gradients in one piece of
    memory, are written apart. `is_foreign` says that streams of another device use it, such as pinned memory of the host:
    that device's first stream may follow them, but nobody who uses the memory here follows that one. No stride is
    negative, so an array begins at its lowest address.
    """

    __slots__ = ("end", "is_foreign", "reads", "start", "write")

    def __init__(self) -> None:
        self.write: Mark | None = None
        self.reads: dict[Stream, Mark] = {}
        self.start, self.end = _NOWHERE, 0
        self.is_foreign = False

    def cover(self, array: Array) -> None:
        """Takes in what was used of the storage."""
        start = array.ptr
        end = start + array.layout.reach_bytes
        if start < self.start:
            self.start = start
        if end > self.end:
            self.end = end

    def touch(self, array: Array) -> bool:
        """Whether the array may share elements with what was used."""
        return array.ptr < self.end and self.start < array.ptr + array.layout.reach_bytes

    def marks(self) -> list[Mark]:
        """All points that a new write, or the reuse of the memory, must come after."""
        marks = list(self.reads.values())
        return marks if self.write is None else [self.write, *marks]

    def is_joined(self) -> bool:
        """Whether the first stream, which all others follow, has waited for all of it."""
        if self.is_foreign:
            return False
        if self.write is not None:
            stream, sequence = self.write
            if sequence > stream.joined:
                return False
        return all(sequence <= stream.joined for stream, sequence in self.reads.values()) if self.reads else True

    def is_over(self) -> bool:
        """Whether the memory can be used by anyone: all is done, or the first stream, which all others follow, waits for it."""
        return self.is_joined() or all(self._is_over(mark) for mark in self.marks())

    def _is_over(self, mark: Mark) -> bool:
        stream, sequence = mark
        return (not self.is_foreign and sequence <= stream.joined) or stream.is_done(mark)
