"""The free large blocks of an allocator: cut for a request, joined with their neighbours when they come back."""

from __future__ import annotations

from bisect import bisect_left, insort

from framework.vm.block import Block, link


class FreeBlocks:
    """Blocks ready to be cut, by size, then address. `at` are all blocks of the allocator by their keys."""

    def __init__(self, at: dict[int, Block]) -> None:
        self._at = at
        self.by_size: list[tuple[int, int, Block]] = []

    def take(self, size: int) -> Block | None:
        """The smallest block of at least `size` bytes, which leaves; None where there is none."""
        index = bisect_left(self.by_size, (size, 0))
        return self.by_size.pop(index)[2] if index < len(self.by_size) else None

    def cut_off(self, block: Block, size: int) -> None:
        """Makes what a block has beyond `size` bytes a free one of its own."""
        rest = Block(block.segment, block.offset + size, block.nbytes - size)
        self._at[rest.key] = rest
        block.nbytes = size
        link(rest, block.next)
        link(block, rest)
        self._add(rest)

    def join(self, block: Block) -> None:
        """Adds a block, made one with those of its neighbours that are free."""
        block.free = True
        following, previous = block.next, block.previous
        if following is not None and following.free:
            self.remove(following)
            del self._at[following.key]
            block.nbytes += following.nbytes
            link(block, following.next)
        if previous is not None and previous.free:
            self.remove(previous)
            del self._at[block.key]
            previous.nbytes += block.nbytes
            link(previous, block.next)
            block = previous
        self._add(block)

    def remove(self, block: Block) -> None:
        """Takes out a block that was added."""
        del self.by_size[bisect_left(self.by_size, (block.nbytes, block.ptr))]

    def _add(self, block: Block) -> None:
        insort(self.by_size, (block.nbytes, block.ptr, block))
