"""The error of a device whose memory does not suffice: who holds it, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from framework.vm.block import Block, Source
from framework.vm.holders import held_by_whom, size

_MOST_HOLDERS = 5


class OutOfMemoryError(MemoryError):
    """A device could not give the memory asked for. What was allocated before stays usable."""


def out_of_memory(
    source: Source,
    asked: int,
    *,
    allocated: int,
    reserved: int,
    borrowed: int,
    limit: int | None,
    holders: Sequence[Block],
) -> str:
    """The text of an out-of-memory error; all figures in bytes."""
    held = ", ".join(f"{size(nbytes)} by {who}" for who, nbytes, _ in held_by_whom(holders)[:_MOST_HOLDERS])
    left = source.available()
    return (
        f"out of memory on {source.title}: asked for {size(asked)}, "
        + (f"limit {size(limit)}, " if limit is not None else "")
        + (f"{size(left)} left on the device, " if left is not None else "")
        + f"held {size(allocated)} ({size(reserved)} reserved, {size(reserved - allocated)} of it free but in pieces)"
        + (f", of which {size(borrowed)} only while an algorithm is searched for" if borrowed else "")
        + (f"; most is held by: {held}" if held else "")
        + _what_could_be_freed(holders)
        + ". Use a smaller batch, drop tensors, or compute without gradients under no_grad()"
        + (f"; or raise the limit with flow.{source.device.type}.set_memory_limit()." if limit is not None else ".")
    )


def _what_could_be_freed(holders: Sequence[Block]) -> str:
    """How much of what is held a program can do without, and how it lets go of it."""
    names = [(block.nbytes, block.label[1]) for block in holders if block.label is not None]
    gradients = sum(nbytes for nbytes, name in names if name == "backward")
    results = sum(nbytes for nbytes, name in names if name not in ("backward", "SGD.step"))
    ways = [
        (gradients, "gradients by zero_grad()"),
        (results, "results, and what backward needs of them, by dropping the loss"),
    ]
    words = [f"{size(nbytes)} of {what}" for nbytes, what in ways if nbytes]
    return f"; could be freed: {', '.join(words)}" if words else ""
