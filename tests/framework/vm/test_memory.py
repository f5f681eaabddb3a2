"""The caching allocator: what it counts, how it cuts, joins and reuses, and what it does when memory runs out."""

from __future__ import annotations

import gc
import threading

import pytest

import framework as flow
from framework.vm import CachingAllocator, OutOfMemoryError, Storage
from framework.vm.allocator import SMALL_BYTES
from framework.vm.block import Block
from framework.vm.uses import Uses
from tests.framework.vm.fakes import FakeMemory, FakeSource, FakeStream

KIB, MIB = 1024, 1024 * 1024


def allocator(**settings: int) -> CachingAllocator:
    return CachingAllocator(FakeSource(**settings))


def give_back(memory: CachingAllocator, *blocks: Block) -> None:
    for block in blocks:
        memory.give_back(block, None)


def used_by(*streams: FakeStream) -> Uses:
    """Last written by the first stream and read by the others, each at its latest instruction."""
    uses = Uses()
    uses.write = streams[0].mark()
    for stream in streams[1:]:
        uses.reads[stream] = stream.mark()
    return uses


# ---- counting


def test_allocated_reserved_and_their_peaks() -> None:
    memory = allocator()
    assert (memory.allocated(), memory.reserved(), memory.peak_allocated(), memory.peak_reserved()) == (0, 0, 0, 0)
    a, b = memory.allocate(400 * KIB), memory.allocate(200 * KIB)
    assert (memory.allocated(), memory.reserved()) == (600 * KIB, MIB)
    give_back(memory, a)
    assert (memory.allocated(), memory.peak_allocated()) == (200 * KIB, 600 * KIB)
    memory.reset_peaks()
    assert (memory.peak_allocated(), memory.peak_reserved()) == (200 * KIB, MIB)
    c = memory.allocate(3 * MIB)
    assert memory.peak_allocated() == 200 * KIB + 3 * MIB
    assert memory.reserved() == memory.peak_reserved() == 4 * MIB
    give_back(memory, b, c)
    memory.empty_cache()
    assert (memory.allocated(), memory.reserved(), memory.peak_reserved()) == (0, 0, 4 * MIB)
    memory.reset_peaks()
    assert (memory.peak_allocated(), memory.peak_reserved()) == (0, 0)


def test_a_peak_is_not_raised_by_memory_given_back_before() -> None:
    memory = allocator()
    for _ in range(5):
        give_back(memory, memory.allocate(100 * KIB))
    assert memory.peak_allocated() == 100 * KIB


def test_blocks_are_rounded_up_a_little() -> None:
    memory = allocator()
    for asked, given in (
        (0, 64),
        (1, 64),
        (64, 64),
        (65, 128),
        (512, 512),
        (513, 640),
        (1024, 1024),
        (1025, 1280),
        (SMALL_BYTES, SMALL_BYTES),
    ):
        assert memory.allocate(asked).nbytes == given, asked
    assert memory.allocate(SMALL_BYTES + 1).nbytes == 36 * KIB
    for asked in range(1, SMALL_BYTES, 97):
        size = memory.allocate(asked).nbytes
        assert asked <= size
        assert size <= max(64, asked * 1.25 + 64)


def test_blocks_of_all_sizes_are_aligned() -> None:
    memory = allocator()
    assert all(memory.allocate(n).ptr % 64 == 0 for n in (1, 65, 600, 5000, 40_000, MIB))


# ---- reuse


def test_a_freed_block_is_handed_out_again() -> None:
    memory = allocator()
    for nbytes in (100, 5000, 100 * KIB, 5 * MIB):
        first = memory.allocate(nbytes)
        address = first.ptr
        give_back(memory, first)
        assert memory.allocate(nbytes).ptr == address
    assert len(memory.source.asked) == 4


def test_a_large_block_is_cut_and_what_is_left_serves_the_next() -> None:
    memory = allocator()
    a, b, c = (memory.allocate(256 * KIB) for _ in range(3))
    assert memory.source.asked == [MIB]
    assert [b.ptr - a.ptr, c.ptr - a.ptr] == [256 * KIB, 512 * KIB]


def test_a_rest_too_small_to_be_of_use_is_not_cut_off() -> None:
    memory = allocator()
    block = memory.allocate(MIB - SMALL_BYTES)
    assert block.nbytes == MIB
    assert memory.allocated() == MIB


def test_free_neighbours_are_joined_on_both_sides() -> None:
    memory = allocator()
    blocks = [memory.allocate(256 * KIB) for _ in range(4)]
    give_back(memory, blocks[0])
    give_back(memory, blocks[2])
    assert memory.allocated() == 512 * KIB
    give_back(memory, blocks[1])  # between two free ones
    assert memory.allocate(768 * KIB).ptr == blocks[0].ptr
    assert memory.source.asked == [MIB]
    give_back(memory, blocks[3])
    assert memory.allocated() == 768 * KIB


def test_segments_are_not_joined_with_each_other() -> None:
    memory = allocator()
    blocks = [memory.allocate(MIB) for _ in range(2)]
    give_back(memory, *blocks)
    memory.allocate(2 * MIB)
    assert memory.source.asked == [MIB, MIB, 2 * MIB]


def test_the_smallest_block_that_fits_is_taken() -> None:
    memory = allocator(segment_bytes=1320 * KIB)  # all is taken, so that what is given back is all there is
    sizes = (600 * KIB, 200 * KIB, 400 * KIB)
    blocks, walls = [], []
    for size in sizes:
        blocks.append(memory.allocate(size))
        walls.append(memory.allocate(40 * KIB))  # so that free blocks are no neighbours
    give_back(memory, *blocks)
    assert memory.allocate(180 * KIB).ptr == blocks[1].ptr
    assert memory.allocate(390 * KIB).ptr == blocks[2].ptr
    assert memory.allocate(410 * KIB).ptr == blocks[0].ptr


def test_fragments_do_not_serve_a_larger_request() -> None:
    memory = allocator(capacity=MIB)
    blocks = [memory.allocate(128 * KIB) for _ in range(8)]
    give_back(memory, *blocks[::2])
    with pytest.raises(
        OutOfMemoryError, match=r"asked for 129\.0 KiB.*held 512\.0 KiB \(1\.0 MiB reserved, 512\.0 KiB of it free"
    ):
        memory.allocate(129 * KIB)
    assert memory.allocate(128 * KIB).nbytes == 128 * KIB


def test_small_blocks_come_from_slabs_of_their_size() -> None:
    memory = allocator()
    first = [memory.allocate(64) for _ in range(MIB // 64)]
    assert memory.source.asked == [MIB]
    assert len({block.ptr for block in first}) == MIB // 64
    memory.allocate(64)
    memory.allocate(128)
    assert memory.source.asked == [MIB] * 3


def test_empty_cache_gives_back_what_nothing_uses_and_no_more() -> None:
    memory = allocator()
    small, other_small = memory.allocate(64), memory.allocate(128)
    large, in_use = memory.allocate(2 * MIB), memory.allocate(100 * KIB)
    give_back(memory, small, large)
    memory.empty_cache()
    assert memory.reserved() == memory.source.given == 2 * MIB  # the slab of 128 and the segment of 100 KiB
    assert memory.allocate(64).nbytes == 64
    give_back(memory, other_small, in_use)
    assert memory.allocate(128).ptr == other_small.ptr


def test_a_slab_with_one_block_in_use_stays_whole() -> None:
    memory = allocator()
    blocks = [memory.allocate(16 * KIB) for _ in range(64 + 3)]  # two slabs
    give_back(memory, *blocks[:64], *blocks[65:])
    memory.empty_cache()
    assert memory.reserved() == MIB
    again = [memory.allocate(16 * KIB) for _ in range(63)]
    assert memory.reserved() == MIB
    assert blocks[64].ptr not in {block.ptr for block in again}


# ---- running out


def test_a_limit_refuses_and_leaves_what_was_there() -> None:
    memory = allocator()
    memory.set_limit(2 * MIB)
    block = memory.allocate(1900 * KIB)
    with pytest.raises(OutOfMemoryError, match=r"limit 2\.0 MiB.*raise the limit with flow\.cpu\.set_memory_limit\(\)"):
        memory.allocate(200 * KIB)
    assert memory.allocated() == block.nbytes
    memory.set_limit(None)
    memory.allocate(200 * KIB)
    with pytest.raises(ValueError, match="a memory limit is a number of bytes >= 0 or None, not -1"):
        memory.set_limit(-1)


def test_what_is_borrowed_is_counted_while_it_is_out_and_leaves_no_trace() -> None:
    memory = allocator()
    block = memory.allocate(400 * KIB)
    with memory.borrowed(5 * MIB - 1) as address:
        assert memory.source.out[address].nbytes == 5 * MIB  # type: ignore[attr-defined] # a FakeSource
        assert (memory.allocated(), memory.reserved()) == (block.nbytes + 5 * MIB, 6 * MIB)
        assert memory.allocate(100 * KIB).ptr not in range(address, address + 5 * MIB)
    assert (memory.allocated(), memory.reserved(), memory.source.given) == (500 * KIB, MIB, MIB)  # type: ignore[attr-defined]
    assert (memory.peak_allocated(), memory.peak_reserved()) == (500 * KIB + 5 * MIB, 6 * MIB)
    with memory.borrowed(0) as address:
        assert memory.source.out[address].nbytes == 4096  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError), memory.borrowed(MIB):
        raise RuntimeError("a search that failed")
    assert (memory.allocated(), memory.reserved(), memory.segments()) == (500 * KIB, MIB, 1)


def test_the_cache_is_given_up_before_a_loan_is_refused() -> None:
    memory = allocator(capacity=4 * MIB)
    give_back(memory, memory.allocate(3 * MIB))
    lent = r"held 4\.0 MiB \(4\.0 MiB reserved, .*\), of which 4\.0 MiB only while an algorithm is searched for"
    with memory.borrowed(4 * MIB), pytest.raises(OutOfMemoryError, match=lent), memory.borrowed(4096):
        raise AssertionError("there was nothing left")
    memory.set_limit(MIB)
    with pytest.raises(OutOfMemoryError, match=r"limit 1\.0 MiB, .*in pieces\)\. Use"), memory.borrowed(2 * MIB):
        raise AssertionError("it is more than the limit")
    assert (memory.allocated(), memory.reserved(), memory.source.given) == (0, 0, 0)  # type: ignore[attr-defined]


def test_a_loan_waits_for_what_streams_still_use_before_it_is_refused() -> None:
    memory, stream = allocator(capacity=4 * MIB), FakeStream()
    stream.sequence = 1
    memory.give_back(memory.allocate(3 * MIB), used_by(stream))
    with memory.borrowed(4 * MIB):
        assert stream.synchronized == 1
    assert (memory.allocated(), memory.reserved()) == (0, 0)


def test_near_the_limit_no_more_is_reserved_than_was_asked_for() -> None:
    memory = allocator()
    memory.set_limit(300 * KIB)
    assert memory.allocate(200 * KIB).nbytes == 200 * KIB
    assert memory.reserved() == 200 * KIB


def test_near_the_limit_a_small_request_takes_no_slab() -> None:
    memory = allocator(capacity=MIB + 600 * KIB)
    memory.allocate(MIB - 100 * KIB)
    small = memory.allocate(64)
    assert memory.reserved() == MIB  # from what was left of the large segment
    other = [memory.allocate(100) for _ in range(16)]
    assert len({block.ptr for block in (small, *other)}) == 17
    give_back(memory, small, *other)
    assert memory.allocate(100 * KIB).nbytes == 100 * KIB
    assert memory.reserved() == MIB


def test_the_cache_is_given_up_before_a_request_is_refused() -> None:
    memory = allocator(capacity=2 * MIB)
    give_back(memory, memory.allocate(MIB), memory.allocate(64))
    assert memory.reserved() == 2 * MIB
    assert memory.allocate(2 * MIB).nbytes == 2 * MIB


def test_a_refusal_is_no_leak() -> None:
    memory = allocator(capacity=4 * MIB)
    held = memory.allocate(3 * MIB)
    for _ in range(10):
        with pytest.raises(OutOfMemoryError):
            memory.allocate(2 * MIB)
    assert memory.allocated() == 3 * MIB
    give_back(memory, held)
    memory.allocate(4 * MIB)


@pytest.mark.usefixtures("no_garbage")
def test_the_refusal_says_who_holds_the_memory() -> None:
    model = flow.nn.Sequential(flow.nn.Conv2d(3, 16, 3, bias=False), flow.nn.Conv2d(16, 16, 1), flow.nn.ReLU())
    images = flow.zeros(8, 3, 66, 66)
    result = model(images.requires_grad_())
    flow.cpu.empty_cache()
    held = flow.cpu.memory_allocated()
    flow.cpu.set_memory_limit(flow.cpu.memory_reserved())
    try:
        with pytest.raises(flow.OutOfMemoryError) as refused:
            flow.zeros(1 << 24)
    finally:
        flow.cpu.set_memory_limit(None)
    text = str(refused.value)
    assert text.startswith("out of memory on cpu: asked for 64.0 MiB, limit ")
    assert "2.0 MiB by 0: conv2d" in text
    assert "2.0 MiB by 2: relu" in text
    assert "by code outside any operation" in text
    assert isinstance(refused.value, MemoryError)
    # What was there is still there, and usable.
    assert flow.cpu.memory_allocated() == held
    result.sum().backward()
    assert images.grad.shape == images.shape


@pytest.mark.usefixtures("no_garbage")
def test_running_out_in_the_middle_of_training_can_be_recovered_from() -> None:
    model = flow.nn.Sequential(
        flow.nn.Conv2d(3, 8, 3), flow.nn.BatchNorm2d(8), flow.nn.AdaptiveAvgPool2d(1), flow.nn.Flatten()
    )
    optimizer = flow.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(batch: int) -> None:
        model(flow.ones(batch, 3, 32, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(2)
    held = flow.cpu.memory_allocated()
    flow.cpu.empty_cache()
    flow.cpu.set_memory_limit(flow.cpu.memory_reserved() + 2 * MIB)
    try:
        with pytest.raises(flow.OutOfMemoryError, match=r"by \d|by code"):
            step(64)
        optimizer.zero_grad()
        gc.collect()
        assert flow.cpu.memory_allocated() == held
        step(2)
    finally:
        flow.cpu.set_memory_limit(None)
    assert flow.cpu.memory_allocated() == held


def test_more_than_any_machine_has_is_refused_not_crashed_on() -> None:
    for elements in (10**15, 10**18, 10**30):
        with pytest.raises(flow.OutOfMemoryError, match="out of memory on cpu: asked for"):
            flow.empty(elements)


# ---- streams that are not done


def test_a_block_still_in_use_on_a_stream_is_not_handed_out() -> None:
    memory, stream = allocator(), FakeStream()
    stream.sequence = 1
    block = memory.allocate(MIB)
    memory.give_back(block, used_by(stream))
    assert memory.allocate(MIB).ptr != block.ptr
    assert memory.allocated() == 2 * MIB  # it is not free yet
    stream.finish()
    assert memory.allocated() == MIB
    assert memory.allocate(MIB).ptr == block.ptr


def test_every_stream_that_used_a_block_must_be_done() -> None:
    memory = allocator()
    writer, reader = FakeStream("writer"), FakeStream("reader")
    writer.sequence = reader.sequence = 4
    block = memory.allocate(64)
    memory.give_back(block, used_by(writer, reader))
    writer.finish()
    assert memory.allocate(64).ptr != block.ptr
    reader.finish(3)
    assert memory.allocate(64).ptr != block.ptr
    reader.finish()
    assert memory.allocate(64).ptr == block.ptr


def test_later_work_of_the_stream_does_not_hold_a_block() -> None:
    memory, stream = allocator(), FakeStream()
    stream.sequence = 2
    block = memory.allocate(MIB)
    memory.give_back(block, used_by(stream))
    stream.sequence = 9
    stream.finish(2)
    assert memory.allocate(MIB).ptr == block.ptr


def test_before_a_refusal_streams_are_waited_for() -> None:
    memory, stream = allocator(capacity=MIB), FakeStream()
    stream.sequence = 1
    block = memory.allocate(MIB)
    memory.give_back(block, used_by(stream))
    assert memory.allocate(MIB).nbytes == MIB
    assert stream.synchronized == 1


@pytest.mark.parametrize("nbytes", [512 * KIB, 16 * KIB])
def test_what_a_stream_releases_serves_although_its_segment_cannot_be_given_back(nbytes: int) -> None:
    memory, stream = allocator(capacity=MIB), FakeStream()
    stream.sequence = 1
    blocks = [memory.allocate(nbytes) for _ in range(MIB // nbytes)]
    memory.give_back(blocks[1], used_by(stream))
    assert memory.allocate(nbytes).ptr == blocks[1].ptr


def test_empty_cache_leaves_what_a_stream_still_uses() -> None:
    memory, stream = allocator(), FakeStream()
    stream.sequence = 1
    memory.give_back(memory.allocate(MIB), used_by(stream))
    memory.empty_cache()
    assert memory.reserved() == MIB
    stream.finish()
    memory.empty_cache()
    assert memory.reserved() == 0


# ---- whoever frees, wherever


def test_the_garbage_collector_may_free_inside_an_allocation() -> None:
    """Cycles with storages in them are collected while allocations run: nothing deadlocks, and the books agree."""

    class Cycle:
        def __init__(self, storage: Storage) -> None:
            self.storage = storage
            self.me = self

    memory = allocator()
    gc.collect()
    thresholds = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for size in (64, 600, 40 * KIB) * 100:
            Cycle(Storage(memory, size))
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert memory.allocated() == 0
    assert memory.blocks() == []


def test_threads_share_one_allocator() -> None:
    memory = allocator()
    faults: list[str] = []
    held: dict[int, tuple[int, int]] = {}
    lock = threading.Lock()

    def work(seed: int) -> None:
        mine: list[Storage] = []
        for i in range(400):
            size = (seed * 7919 + i * 104_729) % (100 * KIB)
            storage = Storage(memory, size)
            with lock:
                span = (storage.ptr, storage.ptr + size)
                if any(start < span[1] and span[0] < end for start, end in held.values()):
                    faults.append(f"{span} overlaps")
                held[id(storage)] = span
            mine.append(storage)
            if len(mine) > 5:
                oldest = mine.pop(i % 3)
                with lock:
                    del held[id(oldest)]
                del oldest
        with lock:
            for storage in mine:
                del held[id(storage)]
        mine.clear()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert memory.allocated() == 0


def test_freed_in_another_thread() -> None:
    memory = allocator()
    box = [Storage(memory, MIB)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert memory.allocated() == 0


def test_serials_grow_and_never_repeat_across_threads() -> None:
    memory = allocator()
    serials: list[list[int]] = [[] for _ in range(4)]

    def work(mine: list[int]) -> None:
        for _ in range(500):
            mine.append(Storage(memory, 1).serial)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in serials]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({serial for mine in serials for serial in mine}) == 2000
    assert all(mine == sorted(mine) for mine in serials)
    assert Storage.next_serial() > max(map(max, serials))


# ---- words


def test_the_summary_lists_who_holds_what() -> None:
    x = flow.ones(1 << 20)
    with_name = flow.nn.Sequential(flow.nn.ReLU())
    y = with_name(x)
    first, *rows = flow.cpu.memory_summary().splitlines()
    assert first.startswith("cpu: allocated ")
    assert "(peak " in first
    assert any(row.split() == ["4.0", "MiB", "1", "0:", "relu"] for row in rows)
    assert y.shape == x.shape


def test_what_backward_holds_is_named_after_the_forward() -> None:
    model = flow.nn.Sequential(flow.nn.Sequential(flow.nn.Conv2d(1, 4, 1, bias=False)))
    x = flow.ones(1, 1, 512, 512, requires_grad=True)
    model(x).sum().backward()
    assert any("0.0.conv2d: backward" in row for row in flow.cpu.memory_summary().splitlines())


@pytest.mark.usefixtures("no_garbage")
def test_the_functions_of_flow_cpu_read_one_allocator() -> None:
    flow.cpu.empty_cache()
    flow.cpu.reset_peak_memory_stats()
    before = flow.cpu.memory_allocated()
    assert flow.cpu.max_memory_allocated() == before
    x = flow.empty(1 << 20)
    assert flow.cpu.memory_allocated() == before + (4 << 20)
    del x
    assert flow.cpu.memory_allocated() == before
    assert flow.cpu.max_memory_allocated() == before + (4 << 20)
    assert flow.cpu.memory_reserved() >= flow.cpu.memory_allocated()
    assert flow.cpu.max_memory_reserved() >= flow.cpu.memory_reserved()
    flow.cpu.reset_peak_memory_stats()
    assert flow.cpu.max_memory_allocated() == before
    reserved = flow.cpu.memory_reserved()
    flow.cpu.empty_cache()
    assert flow.cpu.memory_reserved() <= reserved


def test_the_steps_of_a_loop_get_the_same_addresses() -> None:
    memory = allocator(segment_bytes=MIB)
    kept: list[Block] = []
    seen = []
    for _ in range(10):
        step = [memory.allocate(size) for size in (300 * KIB, 100, 300 * KIB, 100, 70 * KIB, 300 * KIB)]
        seen.append([block.ptr for block in step])
        # Another order at each step, and some outlive it.
        give_back(memory, *kept, *reversed(step[2:]))
        kept = step[:2]
    assert seen[8:] == seen[6:8]


def with_slack(slack: float = 0.5, segment_bytes: int = 64 * KIB) -> CachingAllocator:
    source = FakeSource(segment_bytes=segment_bytes)
    source.slack = slack
    return CachingAllocator(source)


@pytest.mark.parametrize(("slack", "keeps"), [(0.0, False), (0.5, True)])
def test_a_cut_leaves_the_block_to_who_asks_for_all_of_it_where_there_is_slack(slack: float, keeps: bool) -> None:
    memory = with_slack(slack)
    blocks = [memory.allocate(512 * KIB) for _ in range(4)]
    first = [block.ptr for block in blocks]
    give_back(memory, *blocks)
    del blocks
    halves = [memory.allocate(200 * KIB) for _ in range(4)]
    assert memory.reserved() == 4 * 512 * KIB
    assert len({block.ptr for block in halves}) == 4
    give_back(memory, *halves)
    again = [memory.allocate(512 * KIB) for _ in range(4)]
    assert ([block.ptr for block in again] == first) is keeps
    give_back(memory, *again)
    if keeps:
        assert [memory.allocate(200 * KIB).ptr for _ in range(4)] == [block.ptr for block in halves]


def test_while_a_cut_is_in_use_the_whole_is_not_handed_out_and_the_rest_is() -> None:
    memory = with_slack(slack=5.0)
    whole = memory.allocate(512 * KIB)
    give_back(memory, whole)
    cut = memory.allocate(200 * KIB)
    assert cut.ptr == whole.ptr
    other = memory.allocate(512 * KIB)
    assert other.ptr != whole.ptr
    rest = memory.allocate(300 * KIB)
    assert rest.ptr == cut.ptr + cut.nbytes
    assert memory.allocated() == cut.nbytes + rest.nbytes + other.nbytes
    assert {block.ptr for block in memory.blocks()} == {cut.ptr, rest.ptr, other.ptr}
    give_back(memory, cut)
    assert memory.allocate(512 * KIB).ptr not in (whole.ptr, other.ptr)
    give_back(memory, rest)
    assert memory.allocate(512 * KIB).ptr == whole.ptr


def test_a_block_is_laid_over_neighbours_that_stay_for_the_next_step() -> None:
    memory = with_slack(segment_bytes=MIB)
    seen = []
    for _ in range(4):
        parts = [memory.allocate(256 * KIB) for _ in range(4)]
        give_back(memory, *parts)
        whole = memory.allocate(1000 * KIB)
        assert memory.reserved() == MIB
        seen.append(([part.ptr for part in parts], whole.ptr, whole.nbytes))
        give_back(memory, whole)
    assert seen == [([parts[0].ptr + place * 256 * KIB for place in range(4)], parts[0].ptr, MIB)] * 4


def test_a_block_is_laid_over_no_more_neighbours_than_it_needs() -> None:
    memory = with_slack(slack=5.0, segment_bytes=640 * KIB)
    first, *others = [memory.allocate(size * KIB) for size in (128, 256, 256)]
    give_back(memory, first, *others)
    whole = memory.allocate(512 * KIB)
    assert (whole.ptr, whole.nbytes, memory.reserved()) == (others[0].ptr, 512 * KIB, 640 * KIB)
    assert memory.allocate(128 * KIB).ptr == first.ptr


@pytest.mark.parametrize(("times", "shared"), [(1, 3), (3, 20)])
def test_memory_is_shared_on_while_what_is_shared_recurs(
    times: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.vm.overlay._CREDIT", 6)  # a block and a rest, cut off for the first time: two each
    memory = with_slack(slack=100.0)
    kept = [memory.allocate(512 * KIB) for _ in range(20)]
    give_back(memory, *kept)
    segments = memory.segments()
    for kib in range(300, 340, 2):
        for _ in range(times):
            give_back(memory, memory.allocate(kib * KIB))
    grown = memory.segments() - segments
    assert 20 - grown == shared


def test_a_block_is_not_laid_over_much_more_than_it_needs() -> None:
    memory = with_slack(segment_bytes=MIB)
    give_back(memory, *[memory.allocate(512 * KIB) for _ in range(2)])
    assert memory.allocate(600 * KIB).nbytes < 700 * KIB


@pytest.mark.parametrize("used", ["cut", "whole", "nothing"])
def test_what_shares_memory_is_given_back_when_the_cache_is_emptied(used: str) -> None:
    memory = with_slack()
    whole = memory.allocate(512 * KIB)
    give_back(memory, whole)
    cut = memory.allocate(200 * KIB)
    give_back(memory, cut)
    held = [memory.allocate({"cut": 200, "whole": 512}[used] * KIB)] if used != "nothing" else []
    memory.empty_cache()
    assert memory.reserved() == (512 * KIB if held else 0)
    assert memory.blocks() == held
    give_back(memory, *held)
    memory.empty_cache()
    assert (memory.reserved(), memory.allocated(), memory.segments()) == (0, 0, 0)


@pytest.mark.parametrize(
    ("slack", "apart", "joins"),
    [
        (5.0, False, 0),  # the slack allows a new segment
        (0.1, False, 1),
        (0.1, True, 0),  # what could be joined is too short, with all that is free in other segments
    ],
)
def test_kept_blocks_are_joined_where_that_helps_alone(
    slack: float, apart: bool, joins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = with_slack(slack, segment_bytes=MIB)
    whole = memory.allocate(MIB)
    give_back(memory, whole, memory.allocate(64))
    part = memory.allocate(700 * KIB)
    first, between, second = memory.allocate(450 * KIB), memory.allocate(64 * KIB), memory.allocate(450 * KIB)
    give_back(memory, first, second)
    if not apart:
        give_back(memory, between)
    seen, join, reserved = [], memory._join_kept, memory.reserved()
    monkeypatch.setattr(memory, "_join_kept", lambda: (seen.append(1), join()))
    wanted = memory.allocate(720 * KIB)
    assert len(seen) == joins
    assert (wanted.ptr == first.ptr, memory.reserved() == reserved) == (bool(joins), bool(joins))
    assert part.ptr == whole.ptr


def test_a_block_is_laid_over_the_shortest_run() -> None:
    memory = with_slack(slack=0.01, segment_bytes=320 * KIB)
    longer = [memory.allocate(132 * KIB) for _ in range(2)]
    shorter = [memory.allocate(128 * KIB) for _ in range(2)]
    give_back(memory, *longer, *shorter)
    assert memory.allocate(250 * KIB).ptr == shorter[0].ptr


def test_sizes_that_never_come_again_are_forgotten() -> None:
    memory = with_slack()
    for nbytes in range(40_000, 60_000, 10):
        give_back(memory, memory.allocate(nbytes))
    assert len(memory._kept) < 1000
    assert len(memory._ready) < 1000


# ---- from inside


class _Reentrant(FakeSource):
    """A source during whose work a finalizer or a signal handler runs."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        super().__init__(capacity)
        self.interrupt = lambda: None

    def reserve(self, nbytes: int) -> FakeMemory:
        interrupt, self.interrupt = self.interrupt, lambda: None
        interrupt()
        return super().reserve(nbytes)


@pytest.mark.parametrize("inner", [100, 100 * KIB, 5 * MIB])
@pytest.mark.parametrize("outer", [100, 100 * KIB, 5 * MIB])
def test_a_finalizer_may_allocate_inside_an_allocation(outer: int, inner: int) -> None:
    source = _Reentrant()
    memory = CachingAllocator(source)
    made = []
    source.interrupt = lambda: made.append((memory.allocate(inner), memory.allocated(), memory.blocks()))
    outside = memory.allocate(outer)
    ((inside, allocated, blocks),) = made
    assert (blocks, allocated) == ([inside], inside.nbytes)
    assert inside.ptr >= outside.ptr + outside.nbytes or outside.ptr >= inside.ptr + inside.nbytes
    assert memory.allocated() == inside.nbytes + outside.nbytes
    give_back(memory, inside, outside)
    memory.empty_cache()
    assert (memory.allocated(), memory.reserved(), source.given) == (0, 0, 0)


def test_what_was_allocated_inside_serves_again() -> None:
    source = _Reentrant()
    memory = CachingAllocator(source)
    made = []
    source.interrupt = lambda: made.append(memory.allocate(5 * MIB))
    memory.allocate(MIB)
    reserved = memory.reserved()
    give_back(memory, *made)
    assert memory.allocate(5 * MIB).ptr == made[0].ptr
    assert memory.reserved() == reserved


def test_inside_an_allocation_memory_may_run_out() -> None:
    source = _Reentrant(capacity=2 * MIB)
    memory = CachingAllocator(source)
    refused = []

    def ask() -> None:
        with pytest.raises(OutOfMemoryError, match=r"asked for 64\.0 MiB"):
            memory.allocate(64 * MIB)
        memory.empty_cache()
        refused.append(True)

    source.interrupt = ask
    memory.allocate(MIB)
    assert refused == [True]


def test_a_loan_does_not_change_what_is_reserved_for_what_comes() -> None:
    def reserved(*, borrows: bool) -> tuple[int, int]:
        memory = with_slack(slack=0.1)
        for turn in range(3):
            held = []
            for size in (700, 300, 500, 900, 400):
                if borrows and turn == 0:
                    with memory.borrowed(20 * MIB):
                        pass
                held.append(memory.allocate(size * KIB))
                if len(held) > 2:
                    give_back(memory, held.pop(0))
            give_back(memory, *held)
        return memory.reserved(), memory._most_allocated

    assert reserved(borrows=True) == reserved(borrows=False)
