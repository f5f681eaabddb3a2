"""The caching allocator: hands out blocks of a device's memory, keeps freed ones for the next, and counts."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real

from framework.vm import scope
from framework.vm.block import Block, Memory, Segment, Siblings, Source, link
from framework.vm.free_blocks import FreeBlocks
from framework.vm.out_of_memory import OutOfMemoryError, out_of_memory
from framework.vm.overlay import Overlays, longest_run, shortest_run
from framework.vm.uses import Uses

SMALL_BYTES = 32 * 1024
# The place, among the kept blocks by bytes asked for, of those that no request of so many bytes takes: they wait to be joined.
_APART = -1
# The share of its size by which a block laid over kept ones may be larger than it need be.
_MOST_WASTED = 1 / 8
# Up to so many sizes of kept blocks nobody looks which of them are still in use.
_FEW_SIZES = 256
_SMALL_SEGMENT_BYTES = 1024 * 1024


class CachingAllocator:
    """Memory of one device, cached.

    Small requests are rounded to size classes and cut from slabs. Large ones take the smallest free block that
    fits; what is left over stays a free block of its own, and free neighbours are joined again. But first a block
    given back is kept as it is for a request of just as many bytes, since a training loop repeats its requests.
    Of equals the lowest address is handed out: then the same requests soon get the same addresses at every step, and
    what was prepared for these can be used again. Where the source has slack, a request that finds none may share the
    memory of kept blocks that are not in use just then, and these stay kept (see `Overlays`).
    `allocated` counts the blocks in use, `reserved` what the source has given, both in bytes.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.device = source.device
        self.limit: int | None = None
        # How often a request was refused.
        self.refusals = 0
        # A finalizer or a signal handler may allocate while this thread is in the middle of `allocate`: it comes in too,
        # sees `_busy`, and touches no books.
        self._lock = threading.RLock()
        self._busy = False
        self._allocated = self._reserved = 0
        self._peak_allocated = self._peak_reserved = 0
        # As the peak, but never reset.
        self._most_allocated = 0
        # What is borrowed is counted apart, and its peak with all else: what is reserved for steps must not follow from it.
        self._borrowed = self._peak_borrowed = 0
        self._segments: set[Segment] = set()
        # All blocks by their keys: sorting compares numbers faster than anything else.
        self._at: dict[int, Block] = {}
        self._small: dict[int, Siblings] = {}
        # Large blocks kept as they are, by the bytes that were asked for.
        self._kept: dict[int, Siblings] = {_APART: []}
        self._most_sizes = _FEW_SIZES
        self._overlays = Overlays(self._at, self._kept[_APART])
        # Where a request of so many bytes looks first: a list of one of the two.
        self._ready: dict[int, Siblings] = {}
        self._free_blocks = FreeBlocks(self._at)
        # A storage can die in any thread, also inside `allocate` when the garbage collector runs there. So
        # giving back only appends here, which is atomic; the books are kept by whoever allocates next.
        self.returned: deque[tuple[Block, Uses | None]] = deque()
        self._waiting: list[tuple[Block, Uses]] = []

    def allocate(self, nbytes: int) -> Block:
        """A block of at least `nbytes`. Raises OutOfMemoryError, naming who holds the memory."""
        if self._busy:
            with self._lock:
                if self._busy:
                    return self._taken(self._take_apart(nbytes))
        # A `with` would cost as much again as what is done in it.
        self._lock.acquire()
        self._busy = True
        try:
            if self.returned or self._waiting:
                self._collect()
            ready = self._ready.get(nbytes)
            if ready:
                block = self._at[ready.pop()]
                if block.overlay is not None:
                    self._overlays.take(block)
            else:
                block = self._take(nbytes) or self._take_at_any_price(nbytes)
            # As `_taken`, which costs a call for every block.
            block.in_use = True
            block.label = scope.current
            allocated = self._allocated = self._allocated + block.nbytes
            if allocated > self._peak_allocated:
                self._peak_allocated = allocated
                self._most_allocated = max(self._most_allocated, allocated)
            return block
        finally:
            self._busy = False
            self._lock.release()

    def _taken(self, block: Block) -> Block:
        block.in_use = True
        block.label = scope.current
        self._allocated += block.nbytes
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
            self._most_allocated = max(self._most_allocated, self._allocated)
        return block

    @contextmanager
    def borrowed(self, nbytes: int) -> Iterator[int]:
        """The address of memory that goes back to the source at the end: by then, what used it must have ended.

        For what is done once, such as a search: a block would be kept, and counted on, for its like. Raises OutOfMemoryError.
        """
        size = _round_up(max(nbytes, 1), self.source.granularity)
        memory = self._borrow(size)
        try:
            yield memory.ptr
        finally:
            with self._lock:
                self._note_borrowed()
                self._borrowed -= size
                self._reserved -= size
            self.source.release(memory)

    def _borrow(self, nbytes: int) -> Memory:
        with self._tidied() as is_mine:
            memory = self._from_source(nbytes)
            if memory is None and is_mine:
                self._finish_waiting()
                self._release_unused()
                memory = self._from_source(nbytes)
            if memory is None:
                raise self._refusal(nbytes)
            self._borrowed += nbytes
            self._note_borrowed()
            return memory

    def _note_borrowed(self) -> None:
        # Also at the end of a loan, for what was allocated meanwhile.
        self._peak_borrowed = max(self._peak_borrowed, self._allocated + self._borrowed)

    def give_back(self, block: Block, uses: Uses | None) -> None:
        """Returns a block. Its memory is handed out again once every stream in `uses` is past its last use."""
        self.returned.append((block, uses))

    def allocated(self) -> int:
        """Bytes in use."""
        with self._tidied():
            return self._allocated + self._borrowed

    def reserved(self) -> int:
        """Bytes got from the source, in use or cached."""
        return self._reserved

    def peak_allocated(self) -> int:
        """The most bytes in use at once since the last reset."""
        return max(self._peak_allocated, self._peak_borrowed)

    def peak_reserved(self) -> int:
        """The most bytes reserved at once since the last reset."""
        return self._peak_reserved

    def reset_peaks(self) -> None:
        """Lets both peaks start again from what is held now."""
        with self._tidied():
            self._peak_allocated, self._peak_reserved = self._allocated, self._reserved
            self._peak_borrowed = self._allocated + self._borrowed

    def set_limit(self, nbytes: int | None) -> None:
        """Refuses to reserve more than `nbytes` in all; None lifts the limit."""
        if nbytes is not None and not (isinstance(nbytes, Real) and nbytes >= 0):
            raise ValueError(f"a memory limit is a number of bytes >= 0 or None, not {nbytes!r}")
        self.limit = nbytes

    def empty_cache(self) -> None:
        """Gives segments without a block in use back to the source."""
        with self._tidied() as is_mine:
            if is_mine:
                self._release_unused()

    def blocks(self) -> list[Block]:
        """The blocks in use, largest first."""
        with self._tidied():
            return self._blocks_in_use()

    def segments(self) -> int:
        """How many pieces of memory were got from the source, and are held."""
        return len(self._segments)

    def _blocks_in_use(self) -> list[Block]:
        tiles = [block for segment in list(self._segments) for block in segment.blocks()]
        cuts = [cut for tile in tiles if tile.overlay is not None for cut in tile.overlay.cuts]
        used = [block for block in (*tiles, *cuts) if block.in_use]
        return sorted(used, key=lambda b: (-b.nbytes, b.ptr))

    @contextmanager
    def _tidied(self) -> Iterator[bool]:
        """Holds the books, all blocks given back taken into them; gives False, and leaves them, in the middle of a change."""
        with self._lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                self._collect()
                yield True
            finally:
                self._busy = False

    # ---- taking

    def _take_apart(self, nbytes: int) -> Block:
        """A block from a segment of its own, whatever state the books are in. Raises OutOfMemoryError."""
        block = self._whole_segment(_round_up(max(nbytes, 1), self.source.granularity))
        if block is None:
            raise self._refusal(nbytes)
        block.free = False
        block.siblings = self._kept[_APART]
        return block

    def _take(self, nbytes: int, *, frugal: bool = False) -> Block | None:
        """A block, None where neither the cache nor the source has one. `frugal` asks for no more than is needed."""
        if nbytes <= SMALL_BYTES:
            block = self._take_small(nbytes)
            if block is not None or not frugal:
                return block
        return self._take_large(nbytes, frugal)

    def _take_at_any_price(self, nbytes: int) -> Block:
        """A block, after waiting for streams and giving up the cache. Raises OutOfMemoryError."""
        block = None
        if self._waiting:
            self._finish_waiting()
            block = self._take(nbytes)
        if block is None:
            self._release_unused()
            # A whole segment or slab is more than was asked for; near the limit the request alone may fit.
            block = self._take(nbytes, frugal=True)
        if block is None:
            raise self._refusal(nbytes)
        return block

    def _refusal(self, nbytes: int) -> OutOfMemoryError:
        self.refusals += 1
        return OutOfMemoryError(
            out_of_memory(
                self.source,
                nbytes,
                allocated=self._allocated + self._borrowed,
                reserved=self._reserved,
                borrowed=self._borrowed,
                limit=self.limit,
                holders=self._blocks_in_use(),
            )
        )

    def _take_small(self, nbytes: int) -> Block | None:
        size = _size_class(nbytes)
        free = self._small.get(size)
        if not free:
            free = self._ready[nbytes] = self._small.setdefault(size, [])
            segment = self._reserve(_SMALL_SEGMENT_BYTES)
            if segment is None:
                return None
            previous = None
            for offset in range(0, _SMALL_SEGMENT_BYTES - size + 1, size):
                block = self._block(segment, offset, size, free)
                link(previous, block)
                segment.first = segment.first or block
                free.append(block.key)
                previous = block
            free.reverse()
        return self._at[free.pop()]

    def _take_large(self, nbytes: int, frugal: bool) -> Block | None:
        size = _round_up(nbytes, self.source.granularity)
        block = self._free_blocks.take(size)
        if block is None and self.source.slack:
            # Joining would take from every kept block its address, and so from the steps of a loop to come.
            block = self._overlaid(size) or self._grown(size, frugal)
        if block is None:
            self._join_kept()
            wanted = size if frugal else max(size, self.source.segment_bytes)
            block = self._free_blocks.take(size) or self._whole_segment(wanted)
        if block is None:
            return None
        if block.overlay is None:
            block.free = False
            if block.nbytes - size > SMALL_BYTES:
                self._free_blocks.cut_off(block, size)
        if len(self._kept) > self._most_sizes:
            self._forget_sizes()
        block.siblings = self._kept.setdefault(nbytes, [])
        if nbytes > SMALL_BYTES:
            self._ready[nbytes] = block.siblings
        return block

    def _forget_sizes(self) -> None:
        """Drops the lists of sizes that no block is of: where sizes never come again, there would be ever more."""
        used = {id(block.siblings) for block in list(self._at.values())}
        for nbytes in [size for size, kept in self._kept.items() if size != _APART and id(kept) not in used]:
            del self._kept[nbytes]
            if nbytes > SMALL_BYTES:
                del self._ready[nbytes]
        self._most_sizes = 2 * len(self._kept) + _FEW_SIZES

    def _overlaid(self, size: int) -> Block | None:
        """A block that shares its memory with kept ones, cut from one or laid over several; None where none has room."""
        if not self._overlays.pays:
            return None
        block = self._overlays.to_cut(self._kept.values(), size)
        if block is not None:
            return self._overlays.cut(block, size, SMALL_BYTES)
        tiles = shortest_run(list(self._segments), size)
        if tiles is None or sum(tile.nbytes for tile in tiles) > size * (1 + _MOST_WASTED):
            return None
        for tile in tiles:
            if tile.free:
                self._free_blocks.remove(tile)
                tile.free, tile.siblings = False, self._kept[_APART]
                insort(tile.siblings, tile.key)
        return self._overlays.span(tiles)

    def _grown(self, size: int, frugal: bool) -> Block | None:
        """A new segment as one block, where the slack allows it or joining what is kept would give no such block."""
        little = max(size, self.source.segment_bytes // 2)
        if self._reserved + little <= self._most_allocated * (1 + self.source.slack):
            return self._whole_segment(little)
        if longest_run(list(self._segments)) >= size:
            return None
        return self._whole_segment(size if frugal else max(size, self.source.segment_bytes))

    def _whole_segment(self, nbytes: int) -> Block | None:
        """A new segment as one block, None where there is none to be had."""
        segment = self._reserve(nbytes)
        if segment is None:
            return None
        segment.first = self._block(segment, 0, nbytes)
        return segment.first

    def _block(self, segment: Segment, offset: int, nbytes: int, siblings: Siblings | None = None) -> Block:
        block = Block(segment, offset, nbytes, siblings)
        self._at[block.key] = block
        return block

    def _reserve(self, nbytes: int) -> Segment | None:
        """A new segment, None where the limit or the source refuses."""
        memory = self._from_source(nbytes)
        if memory is None:
            return None
        segment = Segment(memory, nbytes)
        self._segments.add(segment)
        return segment

    def _from_source(self, nbytes: int) -> Memory | None:
        """New memory, counted as reserved; None where the limit or the source refuses."""
        if self.limit is not None and self._reserved + nbytes > self.limit:
            return None
        try:
            memory = self.source.reserve(nbytes)
        except MemoryError:
            return None
        self._reserved += nbytes
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return memory

    # ---- giving back

    def _collect(self) -> None:
        returned = self.returned
        while returned:
            block, uses = returned.popleft()
            if uses is None or uses.is_over():
                # As `_free`, which costs a call for every block.
                self._allocated -= block.nbytes
                block.in_use = False
                insort(block.siblings, block.key)
                if block.overlay is not None:
                    block.overlay.give_back(block)
            else:
                self._waiting.append((block, uses))
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for block, uses in waiting:
                if uses.is_over():
                    self._free(block)
                else:
                    self._waiting.append((block, uses))

    def _finish_waiting(self) -> None:
        """Lets every block that was given back become free. What still runs may have to allocate, so it gets the lock."""
        marks = [mark for _, uses in self._waiting for mark in uses.marks()]
        self._busy = False
        self._lock.release()
        try:
            for mark in marks:
                mark.stream.block(mark)
        finally:
            self._lock.acquire()
            self._busy = True
        self._collect()

    def _free(self, block: Block) -> None:
        self._allocated -= block.nbytes
        block.in_use = False
        insort(block.siblings, block.key)
        if block.overlay is not None:
            block.overlay.give_back(block)

    def _join_kept(self) -> None:
        """Makes the large blocks that were kept free ones, to be cut anew."""
        self._overlays.end()
        for kept in self._kept.values():
            for key in kept:
                self._free_blocks.join(self._at[key])
            kept.clear()

    def _release_unused(self) -> None:
        self._join_kept()
        for segment in [s for s in list(self._segments) if all(b.is_unused for b in s.blocks())]:
            first: Block = segment.first  # type: ignore[assignment]
            if first.is_small:
                # The same list stays in use: the blocks of other segments know it.
                first.siblings[:] = [key for key in first.siblings if self._at[key].segment is not segment]
            else:
                self._free_blocks.remove(first)
            for block in segment.blocks():
                del self._at[block.key]
            self._segments.remove(segment)
            self._reserved -= segment.nbytes
            self.source.release(segment.memory)


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _size_class(nbytes: int) -> int:
    """The next multiple of 64 up to 512 bytes, above that the next quarter of a power of two."""
    if nbytes <= 512:
        return (nbytes + 63) & ~63 or 64
    return _round_up(nbytes, 1 << ((nbytes - 1).bit_length() - 3))
