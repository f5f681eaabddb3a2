"""Dependences: what an instruction must wait for, kept per storage as its last write and the reads since.

What a device's first stream does is not noted: whoever else uses memory of the device waits for that stream's newest point,
which costs next to nothing, and the many instructions of the first stream cost nothing more than with one stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from framework.vm.array import Array
from framework.vm.stream import Mark, Stream
from framework.vm.uses import Uses


def wait(reads: Sequence[Array], writes: Sequence[Array], stream: Stream) -> None:
    """Makes `stream` wait for what an instruction of these operands depends on, apart from the device's first stream.

    A write waits for the last write and all reads since, a read for the last write. Work of the same stream
    needs no wait: it runs in order.
    """
    for array in reads:
        wait_to_read(array, stream)
    for array in writes:
        uses = array.storage.uses
        if uses is not None:
            if uses.write is not None:
                stream.wait(uses.write)
            for mark in uses.reads.values():
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
        note_write(array, mark)


def note_write(array: Array, mark: Mark) -> None:
    """Records that the instruction at `mark` writes `array`, behind all other use of its memory."""
    uses = _uses(array)
    uses.write = mark
    if uses.reads:
        uses.reads.clear()


def hold(array: Array, stream: Stream) -> None:
    """Records that what was just issued to `stream`, which may be a first one, reads an array of another device.

    The memory is handed out again only when that is done.
    """
    stream.sequence += 1
    uses = _uses(array)
    uses.is_foreign = True
    uses.reads[stream] = stream.mark()


def _uses(array: Array) -> Uses:
    storage = array.storage
    uses = storage.uses
    if uses is None or uses.is_joined():
        # Whoever comes from now on is behind all that was noted before.
        uses = storage.uses = Uses()
    uses.cover(array)
    return uses
