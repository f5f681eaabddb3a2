"""Whatever is asked of the allocator and given back, in any order: blocks never overlap and the sums agree."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from framework.vm import CachingAllocator, OutOfMemoryError
from framework.vm.block import Block
from framework.vm.uses import Uses
from tests.framework.vm.fakes import FakeSource, FakeStream

CAPACITY = 8 << 20
SIZES = st.one_of(
    st.integers(0, 3000), st.integers(30_000, 40_000), st.integers(0, 3 << 20), st.sampled_from([1 << 20, 4096])
)

RECURRING = st.sampled_from([size * 100_000 for size in (1, 2, 3, 5, 8)])


class AllocatorMachine(RuleBasedStateMachine):
    """Allocations and returns, some of them still used by streams, near a capacity that makes refusals common."""

    slack = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.source = FakeSource(capacity=CAPACITY)
        self.source.slack = self.slack
        self.memory = CachingAllocator(self.source)
        self.streams = [FakeStream("one"), FakeStream("two")]
        self.held: list[Block] = []
        # Given back, but still in use by streams up to these instructions.
        self.pending: list[tuple[Block, Uses]] = []
        self.peak = 0

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        try:
            block = self.memory.allocate(nbytes)
        except OutOfMemoryError:
            # Before it refused it waited for the streams, so that nothing is pending.
            self.pending = [(b, u) for b, u in self.pending if not self.is_done(u)]
            assert not self.pending
            assert self.source.given + nbytes > CAPACITY - (2 << 20) or nbytes > CAPACITY // 4
            return
        assert block.nbytes >= nbytes
        assert block.ptr % 64 == 0
        self.held.append(block)
        self.forget_done()
        self.peak = max(self.peak, self.in_use())

    @rule(which=st.integers(0, 10**6))
    def give_back(self, which: int) -> None:
        if self.held:
            self.memory.give_back(self.held.pop(which % len(self.held)), None)

    @rule(which=st.integers(0, 10**6), both=st.booleans())
    def give_back_while_streams_use_it(self, which: int, both: bool) -> None:
        if not self.held:
            return
        block = self.held.pop(which % len(self.held))
        uses = Uses()
        for stream in self.streams[: 1 + both]:
            stream.sequence += 1
            uses.reads[stream] = stream.mark()
        self.memory.give_back(block, uses)
        self.pending.append((block, uses))

    @rule(index=st.integers(0, 1), steps=st.integers(1, 5))
    def a_stream_goes_on(self, index: int, steps: int) -> None:
        stream = self.streams[index]
        stream.finish(min(stream.sequence, stream.done + steps))

    @rule()
    def empty_cache(self) -> None:
        self.memory.empty_cache()
        self.forget_done()
        used = {id(b.segment) for b in self.held} | {id(b.segment) for b, _ in self.pending}
        assert len(self.memory._segments) == len(used), "a segment that nothing uses was kept"

    @rule()
    def reset_peaks(self) -> None:
        self.memory.reset_peaks()
        self.forget_done()
        self.peak = self.in_use()

    @invariant()
    def the_sums_agree(self) -> None:
        self.memory.allocated()  # keeps the books
        self.forget_done()
        assert self.memory.allocated() == self.in_use()
        assert self.memory.reserved() == self.source.given
        assert self.memory.peak_allocated() == self.peak
        assert self.memory.peak_reserved() >= self.memory.reserved()
        assert sorted(b.ptr for b in self.memory.blocks()) == sorted(b.ptr for b in self.all_held())

    @invariant()
    def nothing_overlaps(self) -> None:
        spans = sorted((b.ptr, b.ptr + b.nbytes) for b in self.all_held())
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        for block in self.all_held():
            memory = block.segment.memory
            assert memory.ptr in self.source.out, "a block in memory that was given back"
            assert memory.ptr <= block.ptr
            assert block.ptr + block.nbytes <= memory.ptr + memory.nbytes

    @invariant()
    def every_segment_is_tiled(self) -> None:
        free_large = []
        for segment in self.memory._segments:
            at, block, previous = 0, segment.first, None
            while block is not None:
                assert block.offset == at
                assert block.previous is previous
                if not block.is_small:
                    assert not (previous is not None and previous.free and block.free), (
                        "free neighbours were not joined"
                    )
                    free_large += [(block.nbytes, block.ptr, block)] if block.free else []
                at, previous, block = at + block.nbytes, block, block.next
            assert segment.nbytes - at < (32 << 10)
        assert sorted(free_large, key=lambda entry: entry[:2]) == self.memory._free_blocks.by_size

    @invariant()
    def siblings_are_what_can_be_handed_out(self) -> None:
        lists = {id(alike): alike for alike in (*self.memory._kept.values(), *self.memory._small.values())}
        inside = sorted((key, id(alike)) for alike in lists.values() for key in alike)
        assert all(list(alike) == sorted(alike) for alike in lists.values())
        expected = []
        for key, block in self.memory._at.items():
            assert block.key == key
            overlay = block.overlay
            shared = overlay is not None and (
                overlay.cuts_in_use > 0 if block is overlay.whole else overlay.whole.in_use
            )
            if not (block.in_use or block.free or shared):
                expected.append((key, id(block.siblings)))
        assert inside == sorted(expected)

    @invariant()
    def cuts_tile_their_whole(self) -> None:
        for overlay in self.memory._overlays._all:
            at = overlay.whole.ptr
            for cut in sorted(overlay.cuts, key=lambda cut: cut.ptr):
                assert cut.ptr == at
                at += cut.nbytes
            assert at == overlay.whole.ptr + overlay.whole.nbytes
            assert overlay.cuts_in_use == sum(cut.in_use for cut in overlay.cuts)
            assert not (overlay.whole.in_use and overlay.cuts_in_use)

    def all_held(self) -> list[Block]:
        return self.held + [block for block, _ in self.pending]

    def in_use(self) -> int:
        return sum(block.nbytes for block in self.all_held())

    def is_done(self, uses: Uses) -> bool:
        return all(mark.sequence <= mark.stream.done for mark in uses.marks())  # type: ignore[attr-defined]

    def forget_done(self) -> None:
        self.pending = [(block, uses) for block, uses in self.pending if not self.is_done(uses)]


class AllocatorWithSlackMachine(AllocatorMachine):
    """The same where blocks keep their addresses, and share memory."""

    slack = 0.3

    @rule(sizes=st.lists(RECURRING, min_size=1, max_size=4))
    def a_phase(self, sizes: list[int]) -> None:
        """As forward and backward do: some memory of sizes that come again, and all of it given back."""
        first = len(self.held)
        for nbytes in sizes:
            self.allocate(nbytes)
        while len(self.held) > first:
            self.memory.give_back(self.held.pop(), None)

    @rule(nbytes=RECURRING)
    def allocate_what_recurs(self, nbytes: int) -> None:
        self.allocate(nbytes)


TestAllocatorWithSlack = AllocatorWithSlackMachine.TestCase
TestAllocatorWithSlack.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
