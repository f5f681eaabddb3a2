"""Dependences: what an instruction must wait for, kept per storage as its last write and the reads since.

What a device's first stream does is not noted: whoever else uses memory of the device waits for that stream's newest point,
which costs next to nothing, and the many instructions of the first stream cost nothing more than with one stream.
"""

from __future__ import annotations

from framework.vm.array import Array
from framework.vm.stream import Mark, Stream
from framework.vm.uses import Uses


def wait(reads: list[Array], writes: list[Array], stream: Stream) -> None:
    """Makes `stream` wait for what an instruction of these operands depends on, apart from the device's first stream.

    A write waits for the last write and all reads since, a read for the last write. Work of the same stream
    needs no wait: it runs in order.
    """
    for array in reads:
        wait_to_read(array, stream)
    for array in writes:
        uses = array.storage.uses
        if uses is not None:
            for mark in uses.marks():
                stream.wait(mark)


def wait_to_read(array: Array, stream: Stream) -> None:
    """Makes `stream` wait for the last write of `array`."""
    uses = array.storage.uses
    if uses is not None and uses.write is not None:
        stream.wait(uses.write)


def note(reads: list[Array], writes: list[Array], mark: Mark) -> None:
    """Records that the instruction issued at `mark` used its operands."""
    for array in reads:
        _uses(array).reads[mark.stream] = mark
    for array in writes:
        uses = _uses(array)
        uses.write = mark
        uses.reads.clear()


def note_scratch(array: Array, mark: Mark) -> None:
    """Records that the instruction at `mark` uses `array`, memory that it was given while it was issued."""
    _uses(array).write = mark


def hold(array: Array, stream: Stream) -> None:
    """Records that what was just issued to `stream`, which may be a first one, reads an array of another device.

    The memory is handed out again only when that is done.
    """
    stream.sequence += 1
    _uses(array).reads[stream] = stream.mark()


def _uses(array: Array) -> Uses:
    storage = array.storage
    if storage.uses is None:
        storage.uses = Uses()
    return storage.uses
