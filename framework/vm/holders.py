"""Who holds memory, and how much: blocks by the module and operation that asked for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from framework.vm import scope
from framework.vm.block import Block


def held_by_whom(blocks: Iterable[Block]) -> list[tuple[str, int, int]]:
    """(who, bytes, blocks), most bytes first."""
    held: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for block in blocks:
        entry = held[scope.path(block.label) or "code outside any operation"]
        entry[0] += block.nbytes
        entry[1] += 1
    return sorted(((who, n, count) for who, (n, count) in held.items()), key=lambda row: (-row[1], row[0]))


def size(nbytes: int) -> str:
    """`nbytes` as people write it: 512 B, 1.5 KiB, 24.0 MiB."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.1f} {units[0]}"
