"""Memory in words: who holds it, and what to do when it does not suffice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from framework.vm import scope

if TYPE_CHECKING:
    from framework.vm.memory import Block, CachingAllocator, Source

_MOST_HOLDERS = 5


def out_of_memory(
    source: Source,
    asked: int,
    *,
    allocated: int,
    reserved: int,
    limit: int | None,
    holders: Sequence[Block],
) -> str:
    """The text of an out-of-memory error; all figures in bytes."""
    held = ", ".join(f"{size(nbytes)} by {who}" for who, nbytes, _ in _by_holder(holders)[:_MOST_HOLDERS])
    left = source.available()
    return (
        f"out of memory on {source.title}: asked for {size(asked)}, "
        + (f"limit {size(limit)}, " if limit is not None else "")
        + (f"{size(left)} left on the device, " if left is not None else "")
        + f"held {size(allocated)} ({size(reserved)} reserved, {size(reserved - allocated)} of it free but in pieces)"
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


def summary(allocator: CachingAllocator) -> str:
    """A table of what is held: totals, then bytes and blocks by the module and operation that asked for them, and by size."""
    first = (
        f"{allocator.source.title}: allocated {size(allocator.allocated())} (peak {size(allocator.peak_allocated())}), "
        f"reserved {size(allocator.reserved())} (peak {size(allocator.peak_reserved())})"
    )
    blocks = allocator.blocks()
    by_holder = [f"{size(nbytes):>12}  {count:>6}  {who}" for who, nbytes, count in _by_holder(blocks)]
    by_size = [
        f"{size(nbytes * count):>12}  {count:>6}  of {size(nbytes)}"
        for nbytes, count in sorted(Counter(block.nbytes for block in blocks).items(), reverse=True)
    ]
    head = f"{'bytes':>12}  {'blocks':>6}"
    return "\n".join([first, f"{head}  by module and operation", *by_holder, f"{head}  by size", *by_size])


def stats(allocator: CachingAllocator) -> dict[str, int]:
    """What the allocator counts, under PyTorch's names."""
    return {
        "allocated_bytes.all.current": allocator.allocated(),
        "allocated_bytes.all.peak": allocator.peak_allocated(),
        "reserved_bytes.all.current": allocator.reserved(),
        "reserved_bytes.all.peak": allocator.peak_reserved(),
        "allocation.all.current": len(allocator.blocks()),
        "segment.all.current": allocator.segments(),
        "num_ooms": allocator.refusals,
    }


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
