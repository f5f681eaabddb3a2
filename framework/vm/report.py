"""Memory in words: who holds it, and what to do when it does not suffice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from framework.device import Device
from framework.vm import scope

if TYPE_CHECKING:
    from framework.vm.memory import Block, CachingAllocator

_MOST_HOLDERS = 5


def out_of_memory(
    device: Device,
    asked: int,
    *,
    allocated: int,
    reserved: int,
    limit: int | None,
    holders: Iterable[Block],
) -> str:
    """The text of an out-of-memory error; all figures in bytes."""
    held = ", ".join(f"{size(nbytes)} by {who}" for who, nbytes, _ in _by_holder(holders)[:_MOST_HOLDERS])
    return (
        f"out of memory on {device}: asked for {size(asked)}, "
        + (f"limit {size(limit)}, " if limit is not None else "")
        + f"held {size(allocated)} ({size(reserved)} reserved, {size(reserved - allocated)} of it free but in pieces)"
        + (f"; most is held by: {held}" if held else "")
        + ". Use a smaller batch, drop tensors, or compute without gradients under no_grad()"
        + (f"; or raise the limit with flow.{device.type}.set_memory_limit()." if limit is not None else ".")
    )


def summary(allocator: CachingAllocator) -> str:
    """A table of what is held: totals, then bytes and blocks by the module and operation that asked for them."""
    first = (
        f"{allocator.device}: allocated {size(allocator.allocated())} (peak {size(allocator.peak_allocated())}), "
        f"reserved {size(allocator.reserved())} (peak {size(allocator.peak_reserved())})"
    )
    rows = [f"{size(nbytes):>12}  {count:>6}  {who}" for who, nbytes, count in _by_holder(allocator.blocks())]
    return "\n".join([first, *rows])


def size(nbytes: int) -> str:
    """`nbytes` as people write it: 512 B, 1.5 KiB, 24.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"


def _by_holder(blocks: Iterable[Block]) -> list[tuple[str, int, int]]:
    """(who, bytes, blocks), most bytes first."""
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for block in blocks:
        entry = held[scope.path(block.label) or "code outside any operation"]
        entry[0] += block.nbytes
        entry[1] += 1
    return sorted(((who, n, count) for who, (n, count) in held.items()), key=lambda row: (-row[1], row[0]))
