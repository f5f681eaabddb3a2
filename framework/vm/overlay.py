"""Memory that is one block at some times of a step and several at others: what lets both keep their addresses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from framework.vm.block import Block, Segment, Siblings, link

# So many more may be made than are used again: enough for the first step of a large model, and soon spent where shapes
# change at every step, so that nothing comes again and looking for memory to share is time lost.
_CREDIT = 512


class Overlay:
    """A block and its cuts, which tile it: either the whole is handed out or cuts of it are, never both at once.

    A block is among its siblings exactly while it can be handed out.
    """

    __slots__ = ("cuts", "cuts_in_use", "whole")

    def __init__(self, whole: Block) -> None:
        self.whole = whole
        self.cuts: list[Block] = []
        self.cuts_in_use = 0
        whole.overlay = self

    def take(self, block: Block) -> None:
        """Keeps what shares memory with `block`, which has just left its siblings, from being handed out."""
        if block is self.whole:
            for cut in self.cuts:
                withdraw(cut)
            return
        if self.cuts_in_use == 0:
            withdraw(self.whole)
        self.cuts_in_use += 1

    def give_back(self, block: Block) -> None:
        """Lets what shares memory with `block`, which is back among its siblings, be handed out if nothing else does."""
        if block is self.whole:
            for cut in self.cuts:
                insort(cut.siblings, cut.key)
            return
        self.cuts_in_use -= 1
        if self.cuts_in_use == 0:
            insort(self.whole.siblings, self.whole.key)


class Overlays:
    """The overlays of one allocator.

    A backward has gradients where its forward had an activation, and the next forward has the activation again. With one
    block for each that would take the memory of both; with blocks joined and cut anew at each step, addresses would
    change. `at` are the allocator's blocks by their keys; `apart` are the kept blocks that no request asks for.
    """

    def __init__(self, at: dict[int, Block], apart: Siblings) -> None:
        self._at = at
        self._apart = apart
        self._all: list[Overlay] = []
        self._credit = _CREDIT

    @property
    def pays(self) -> bool:
        """Whether those made so far are used again so often that more are worth their price."""
        return self._credit > 0

    def take(self, block: Block) -> None:
        """Hands out a block that shares its memory, and has just left its siblings."""
        if self._credit < _CREDIT:
            self._credit += 1
        block.overlay.take(block)  # type: ignore[union-attr]

    def to_cut(self, kept: Iterable[Siblings], size: int) -> Block | None:
        """The smallest of these blocks that has room for `size` bytes and can be cut."""
        fitting = [
            (block.nbytes, block.ptr, key)
            for siblings in kept
            for key in siblings
            if (block := self._at[key]).nbytes >= size and (block.overlay is None or self._is_rest(block))
        ]
        return self._at[min(fitting)[2]] if fitting else None

    def cut(self, block: Block, size: int, least_rest: int) -> Block:
        """The first `size` bytes of a block that `to_cut` found, in use; a rest up to `least_rest` bytes goes with them."""
        withdraw(block)
        overlay = block.overlay
        if overlay is None:
            overlay = self._over(block)
            overlay.cuts_in_use = 1
            block = self._cut(overlay, block.offset, block.nbytes)
        else:
            overlay.take(block)
        if block.nbytes - size > least_rest:
            rest = self._cut(overlay, block.offset + size, block.nbytes - size)
            block.nbytes = size
            insort(self._apart, rest.key)
            self._credit -= 1
        return block

    def span(self, tiles: list[Block]) -> Block:
        """One block over neighbours that could all be handed out, in use; they become its cuts."""
        first, last = tiles[0], tiles[-1]
        whole = Block(first.segment, first.offset, sum(tile.nbytes for tile in tiles))
        whole.free = False
        overlay = self._over(whole)
        if first.previous is None:
            whole.segment.first = whole
        link(first.previous, whole)
        link(whole, last.next)
        for tile in tiles:
            withdraw(tile)
            del self._at[tile.key]
            tile.previous = tile.next = None
            self._add(overlay, tile)
        self._at[whole.key] = whole
        return whole

    def end(self) -> None:
        """Lets each be its whole alone again, or its cuts alone where one is in use."""
        for overlay in self._all:
            whole, cuts = overlay.whole, overlay.cuts
            whole.overlay = None
            for cut in cuts:
                if not (cut.in_use or whole.in_use):
                    withdraw(cut)
                del self._at[cut.key]
            if overlay.cuts_in_use:
                del self._at[whole.key]
                self._put_in_place(whole, sorted(cuts, key=lambda cut: cut.ptr))
        self._all.clear()

    def _put_in_place(self, whole: Block, tiles: list[Block]) -> None:
        previous, following = whole.previous, whole.next
        if previous is None:
            whole.segment.first = tiles[0]
        for tile in tiles:
            tile.overlay, tile.key = None, -tile.ptr
            self._at[tile.key] = tile
            if not tile.in_use:
                insort(tile.siblings, tile.key)
            link(previous, tile)
            previous = tile
        link(previous, following)

    def _over(self, whole: Block) -> Overlay:
        self._credit -= 1
        overlay = Overlay(whole)
        self._all.append(overlay)
        return overlay

    def _cut(self, overlay: Overlay, offset: int, nbytes: int) -> Block:
        cut = Block(overlay.whole.segment, offset, nbytes)
        cut.free, cut.siblings = False, self._apart
        self._add(overlay, cut)
        return cut

    def _add(self, overlay: Overlay, cut: Block) -> None:
        # The first cut lies where the whole does, which has that address for its key. Addresses are even.
        cut.key = -cut.ptr - 1
        cut.overlay = overlay
        overlay.cuts.append(cut)
        self._at[cut.key] = cut

    def _is_rest(self, block: Block) -> bool:
        """Whether it is what was left over by the last cut."""
        return block.siblings is self._apart and block.overlay is not None and block is not block.overlay.whole


def withdraw(block: Block) -> None:
    """Takes a block out of the middle of its siblings."""
    del block.siblings[bisect_left(block.siblings, block.key)]


def shortest_run(segments: Iterable[Segment], size: int) -> list[Block] | None:
    """Of the runs of neighbours that nothing uses and that share no memory, the shortest of at least `size` bytes."""
    found: tuple[int, int, list[Block]] | None = None
    for segment in segments:
        tiles = list(segment.blocks())
        first, total = 0, 0
        for last, tile in enumerate(tiles):
            if tile.is_small or tile.in_use or tile.overlay is not None:
                first, total = last + 1, 0
                continue
            total += tile.nbytes
            while total - tiles[first].nbytes >= size:
                total -= tiles[first].nbytes
                first += 1
            if total >= size and (found is None or (total, tiles[first].ptr) < found[:2]):
                found = total, tiles[first].ptr, tiles[first : last + 1]
    return found[2] if found else None


def longest_run(segments: Iterable[Segment]) -> int:
    """How many bytes the largest block would have if all that nothing uses were joined."""
    longest = 0
    for segment in segments:
        together = 0
        for block in _blocks_apart(segment):
            together = 0 if block.is_small or block.in_use else together + block.nbytes
            longest = max(longest, together)
    return longest


def _blocks_apart(segment: Segment) -> Iterator[Block]:
    """A segment's blocks by address; of an overlay the cuts where one is in use, otherwise the whole."""
    for tile in segment.blocks():
        if tile.overlay is not None and tile.overlay.cuts_in_use:
            yield from sorted(tile.overlay.cuts, key=lambda cut: cut.ptr)
        else:
            yield tile
