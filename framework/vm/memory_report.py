"""What an allocator holds, in words and in figures: who asked for it, and how much of it there is."""

from __future__ import annotations

from collections import Counter

from framework.vm.allocator import CachingAllocator
from framework.vm.holders import held_by_whom, size


def summary(allocator: CachingAllocator) -> str:
    """A table of what is held: totals, then bytes and blocks by the module and operation that asked for them, and by size."""
    first = (
        f"{allocator.source.title}: allocated {size(allocator.allocated())} (peak {size(allocator.peak_allocated())}), "
        f"reserved {size(allocator.reserved())} (peak {size(allocator.peak_reserved())})"
    )
    blocks = allocator.blocks()
    by_holder = [f"{size(nbytes):>12}  {count:>6}  {who}" for who, nbytes, count in held_by_whom(blocks)]
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
