"""Who used a piece of memory last: what a new write, or its next owner, has to wait for."""

from __future__ import annotations

from framework.vm.array import Array
from framework.vm.stream import Mark, Stream

# Behind every address.
_NOWHERE = 1 << 64


class Uses:
    """Which streams, besides the device's first, used a storage last: one write, and for each its latest read since.

    All of it lies between the addresses `start` and `end`: the parts of a storage, such as the gradients in one piece of
    memory, are written apart.
    """

    __slots__ = ("end", "reads", "start", "write")

    def __init__(self) -> None:
        self.write: Mark | None = None
        self.reads: dict[Stream, Mark] = {}
        self.start, self.end = _NOWHERE, 0

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
        if self.write is not None:
            stream, sequence = self.write
            if sequence > stream.joined:
                return False
        return all(sequence <= stream.joined for stream, sequence in self.reads.values()) if self.reads else True

    def is_over(self) -> bool:
        """Whether the memory can be used by anyone: all is done, or the first stream, which all others follow, waits for it."""
        return all(mark.sequence <= mark.stream.joined or mark.stream.is_done(mark) for mark in self.marks())
