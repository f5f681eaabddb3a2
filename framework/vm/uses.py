"""Who used a piece of memory last: what a new write, or its next owner, has to wait for."""

from __future__ import annotations

from framework.vm.stream import Mark, Stream


class Uses:
    """Which streams, besides the device's first, used a storage last: one write, and for each its latest read since."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Mark | None = None
        self.reads: dict[Stream, Mark] = {}

    def marks(self) -> list[Mark]:
        """All points that a new write, or the reuse of the memory, must come after."""
        marks = list(self.reads.values())
        return marks if self.write is None else [self.write, *marks]

    def is_joined(self) -> bool:
        """Whether the first stream, which all others follow, has waited for all of it."""
        return all(mark.sequence <= mark.stream.joined for mark in self.marks())

    def is_over(self) -> bool:
        """Whether the memory can be used by anyone: all is done, or the first stream, which all others follow, waits for it."""
        return all(mark.sequence <= mark.stream.joined or mark.stream.is_done(mark) for mark in self.marks())
