"""Dependences: what an instruction must wait for, kept per storage as its last write and the reads since."""

from __future__ import annotations

from framework.vm.array import Array
from framework.vm.instruction import Instruction
from framework.vm.stream import Mark, Stream


class Uses:
    """Who used a storage last: one write, and for each stream its latest read since."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Mark | None = None
        self.reads: dict[Stream, Mark] = {}

    def marks(self) -> list[Mark]:
        """All points that a new write, or the reuse of the memory, must come after."""
        marks = list(self.reads.values())
        return marks if self.write is None else [self.write, *marks]


def wait(instruction: Instruction, stream: Stream) -> None:
    """Makes `stream` wait for what `instruction` depends on.

    A write waits for the last write and all reads since, a read for the last write. Work of the same stream
    needs no wait: it runs in order.
    """
    for array in instruction.reads:
        uses = array.storage.uses
        if uses is not None and uses.write is not None:
            stream.wait(uses.write)
    for array in instruction.writes:
        uses = array.storage.uses
        if uses is not None:
            for mark in uses.marks():
                stream.wait(mark)


def note(instruction: Instruction, mark: Mark) -> None:
    """Records that `instruction`, issued at `mark`, used its operands."""
    for array in instruction.reads:
        _uses(array).reads[mark.stream] = mark
    for array in instruction.writes:
        uses = _uses(array)
        uses.write = mark
        uses.reads.clear()


def _uses(array: Array) -> Uses:
    storage = array.storage
    if storage.uses is None:
        storage.uses = Uses()
    return storage.uses
