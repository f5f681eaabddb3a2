"""Pinned memory and asynchronous copies from it, on devices that run only when they are waited for."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.kernels import kernel
from framework.vm import HostStream, Instruction, machine, pinned, runtime
from framework.vm import cuda as vm_cuda
from framework.vm.schedule import scheduled

pytest_plugins = ["tests.framework.cuda.fake_api"]


def _pinned(values: list[float]) -> flow.Tensor:
    return flow.tensor(values).pin_memory()


def test_a_pinned_tensor_is_a_tensor_of_the_cpu(fake_cuda) -> None:
    values = flow.tensor(np.arange(24, dtype=np.float32).reshape(2, 3, 4)).permute(2, 0, 1)
    there = values.pin_memory()
    assert there.is_pinned()
    assert not values.is_pinned()
    assert there[1:].is_pinned()
    assert (there.device, there.shape) == (values.device, values.shape)
    assert there.pin_memory() is there
    assert np.array_equal(there.numpy(), values.numpy())
    assert (there + there).tolist() == (values + values).tolist()
    assert not (there + there).is_pinned()


@pytest.mark.parametrize("dtype", [flow.float32, flow.int64, flow.bfloat16, flow.bool_])
def test_every_type_can_be_pinned(fake_cuda, dtype) -> None:
    values = flow.tensor([1, 0, 1], dtype=dtype)
    assert values.pin_memory().tolist() == values.tolist()
    assert values.pin_memory().to("cuda", non_blocking=True).tolist() == values.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 3, 0, 1)])
def test_values_arrive_when_the_device_comes_to_it(fake_cuda, shape) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    source = flow.tensor(values).pin_memory()
    there = source.to("cuda", non_blocking=True)
    under_way = [entry for queue in fake_cuda.streams.values() for entry in queue if callable(entry)]
    assert len(under_way) == (1 if values.size else 0)
    assert np.array_equal(there.to("cpu").numpy(), values)


def test_memory_is_not_handed_out_again_before_it_was_read(fake_cuda) -> None:
    source = _pinned([1.0, 2.0, 3.0])
    address = source.array.ptr
    there = source.to("cuda", non_blocking=True)
    del source
    others = [_pinned([9.0, 9.0, 9.0]) for _ in range(3)]
    assert address not in [other.array.ptr for other in others]
    assert there.tolist() == [1, 2, 3]  # waits for the device
    assert _pinned([7.0, 7.0, 7.0]).array.ptr == address


def test_a_write_waits_until_the_values_were_read(fake_cuda) -> None:
    source = _pinned([1.0, 2.0])
    first = source.to("cuda", non_blocking=True)
    source.mul_(10)
    second = source.to("cuda", non_blocking=True)
    source.numpy()[:] = 0
    assert (first.tolist(), second.tolist()) == ([1, 2], [10, 20])


def test_whatever_writes_waits_until_the_values_were_read(fake_cuda) -> None:
    """Also what is no operation in place: an optimizer, backward, and a module that counts."""
    weight = flow.nn.Parameter(_pinned([1.0, 2.0]))
    weight.grad = _pinned([3.0, 4.0])
    norm = flow.nn.BatchNorm2d(2)
    norm.running_mean = _pinned([5.0, 6.0])
    before = [tensor.detach().to("cuda", non_blocking=True) for tensor in (weight, weight.grad, norm.running_mean)]
    norm(flow.ones(2, 2, 1, 2)).sum().backward()
    (weight * 2).sum().backward()
    flow.optim.SGD([weight], lr=1.0).step()
    assert machine.is_plain
    assert [tensor.tolist() for tensor in before] == [[1, 2], [3, 4], [5, 6]]
    assert (weight.tolist(), weight.grad.tolist(), norm.running_mean.tolist()) != ([1, 2], [3, 4], [5, 6])


def test_memory_is_held_where_all_stays_on_the_first_stream(fake_cuda) -> None:
    source = _pinned([1.0, 2.0])
    with flow.cuda.stream(flow.cuda.Stream()), scheduled("single"):
        assert flow.cuda.current_stream() == flow.cuda.default_stream()
        there = source.to("cuda", non_blocking=True)
        source.numpy()[:] = 0
    assert there.tolist() == [1, 2]


def test_what_is_not_pinned_is_read_at_once(fake_cuda) -> None:
    values = flow.tensor([1.0, 2.0])
    there = values.to("cuda", non_blocking=True)
    values.fill_(0)
    assert there.tolist() == [1, 2]
    gapped = _pinned([1.0, 2.0, 3.0, 4.0])[::2]
    there = gapped.to("cuda", non_blocking=True)
    gapped.numpy()[:] = 0
    assert there.tolist() == [1, 3]


def test_only_the_current_device_gets_a_context(fake_cuda) -> None:
    flow.cuda.set_device(1)
    source = _pinned([1.0, 2.0])
    there = source.to("cuda", non_blocking=True)
    assert there.device == flow.device("cuda:1")
    assert there.tolist() == [1, 2]

    def elsewhere() -> None:
        # A loader's thread, in which nothing was chosen yet.
        assert _pinned([3.0] * 1_000_000).to("cuda", non_blocking=True).tolist()[:1] == [3]

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    del source, there
    pinned.allocator().empty_cache()
    flow.cuda.empty_cache()
    assert fake_cuda.contexts == {1}


def test_freeing_chooses_the_device_too(fake_cuda) -> None:
    flow.cuda.set_device(1)
    _pinned([1.0])
    thread = threading.Thread(target=pinned.allocator().empty_cache)
    thread.start()
    thread.join()
    assert pinned.allocator().reserved() == 0
    assert fake_cuda.contexts == {1}


def test_a_gradient_finds_its_way_back(fake_cuda) -> None:
    x = flow.tensor([1.0, 2.0], requires_grad=True)
    there = x.to("cuda")
    there.backward(flow.tensor([3.0, 4.0], device="cuda"))
    assert x.grad.tolist() == [3, 4]
    assert x.grad.device is x.device


def test_tensors_of_a_device_are_not_pinned(fake_cuda) -> None:
    with pytest.raises(RuntimeError, match=r"pin_memory\(\) is for tensors on the CPU; this one is on cuda:0"):
        flow.tensor([1.0]).to("cuda").pin_memory()


def test_the_system_may_refuse(fake_cuda, monkeypatch) -> None:
    def refuse(nbytes: int, flags: int) -> int:
        raise fake_cuda.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory")

    monkeypatch.setattr(fake_cuda, "hostAlloc", refuse)
    with pytest.raises(flow.OutOfMemoryError, match="out of memory on the host's pinned memory: asked for 4 B"):
        _pinned([1.0])


def test_where_no_device_is_nothing_can_be_pinned(fake_cuda) -> None:
    fake_cuda.count = 0
    with pytest.raises(flow.cuda.CudaUnavailableError, match="no CUDA device can be used"):
        _pinned([1.0])


# ---- streams


def test_work_within_a_stream_goes_there_and_comes_after_what_it_reads(fake_cuda) -> None:
    side = flow.cuda.Stream()
    assert flow.cuda.current_stream() == flow.cuda.default_stream() != side
    source = _pinned([1.0, 2.0])
    with flow.cuda.stream(side):
        assert flow.cuda.current_stream() == side
        there = source.to("cuda", non_blocking=True)
        queue = fake_cuda.streams[side.cuda_stream]
        assert any(callable(entry) for entry in queue)
        assert not side.query()
    assert flow.cuda.current_stream() == flow.cuda.default_stream()
    assert there.tolist() == [1, 2]  # the default stream waits for the side one
    assert side.query()


def test_memory_read_by_a_stream_that_others_wait_for_is_not_handed_out_before_it_was_read(fake_cuda) -> None:
    """The default stream has waited for the side one, but the host, which would write the memory, has not."""
    side, source = flow.cuda.Stream(), _pinned([1.0, 2.0])
    address = source.array.ptr
    with flow.cuda.stream(side):
        there = source.to("cuda", non_blocking=True)
    machine.settle(there.array)
    assert machine.is_plain
    del source
    assert address not in [other.array.ptr for other in [_pinned([9.0, 9.0]) for _ in range(3)]]
    assert there.tolist() == [1, 2]
    side.synchronize()
    assert _pinned([7.0, 7.0]).array.ptr == address


def test_what_writes_memory_of_the_host_waits_for_whoever_reads_it_there(fake_cuda) -> None:
    side, source = flow.cuda.Stream(), _pinned([1.0, 2.0])
    with flow.cuda.stream(side):
        there = source.to("cuda", non_blocking=True)
        source.fill_(5.0)
    assert there.tolist() == [1, 2]


@kernel(outputs=1)
def _copy_elements(out: Any, a: Any) -> None:
    for place in range(a.size):
        target, source = (array.ptr + 4 * place * array.stride[0] for array in (out, a))
        vm_cuda.copy(target, source, 4, vm_cuda.TO_DEVICE, vm_cuda.stream_pointer(out.storage.device))


def test_values_with_gaps_are_taken_behind_the_copy_that_lays_them_side_by_side(fake_cuda) -> None:
    values = flow.tensor([1.0, 2.0, 3.0, 4.0]).to("cuda")
    there = runtime(values.device)
    there.copy = machine.issuing(_copy_elements, values.device)
    with flow.cuda.stream(flow.cuda.Stream()):
        assert values[::2].tolist() == [1, 3]


@pytest.mark.parametrize("step", [1, 2])
def test_pinned_memory_is_read_when_streams_of_the_host_have_written_it(fake_cuda, step: int) -> None:
    source, may_write = _pinned([1.0, 2.0, 3.0, 4.0]), threading.Event()

    @kernel(outputs=1)
    def write(out: Any) -> None:
        may_write.wait()
        out.ndarray[:] = 7

    stream = machine.add_stream(HostStream(source.device, "beside"))
    machine.issue(Instruction(write, (source.array,), {}), stream)
    timer = threading.Timer(0.05, may_write.set)
    timer.start()
    try:
        assert source[::step].to("cuda", non_blocking=True).tolist() == [7] * (4 // step)
    finally:
        may_write.set()
        machine.remove_stream(stream)
        timer.join()


def test_a_stream_is_its_threads_own(fake_cuda) -> None:
    side, seen = flow.cuda.Stream(), []
    with flow.cuda.stream(side):
        thread = threading.Thread(target=lambda: seen.append(flow.cuda.current_stream()))
        thread.start()
        thread.join()
    assert seen == [flow.cuda.default_stream()]


def test_blocks_nest(fake_cuda) -> None:
    one, two = flow.cuda.Stream(), flow.cuda.Stream()
    with flow.cuda.stream(one):
        with flow.cuda.stream(two), flow.cuda.stream(None):
            assert flow.cuda.current_stream() == two
        assert flow.cuda.current_stream() == one
    assert machine.is_plain


def test_a_stream_ends_with_its_object(fake_cuda) -> None:
    side = flow.cuda.Stream()
    pointer = side.cuda_stream
    there = None
    with flow.cuda.stream(side):
        there = _pinned([5.0]).to("cuda", non_blocking=True)
    before = len(machine.streams)
    del side
    assert len(machine.streams) == before - 1
    assert pointer not in fake_cuda.streams
    assert there.tolist() == [5]


def test_a_stream_lives_as_long_as_whoever_was_told_that_it_is_the_current_one(fake_cuda) -> None:
    with flow.cuda.stream(flow.cuda.Stream()):
        current = flow.cuda.current_stream()
        there = _pinned([5.0]).to("cuda", non_blocking=True)
    assert not current.query()
    event = current.record_event()
    flow.cuda.current_stream().wait_stream(current)
    assert there.tolist() == [5]
    assert event.query()
    before = len(machine.streams)
    del current
    assert len(machine.streams) == before - 1


def test_events_and_waits(fake_cuda) -> None:
    one, two = flow.cuda.Stream(), flow.cuda.Stream()
    with flow.cuda.stream(one):
        _pinned([1.0]).to("cuda", non_blocking=True)
    event = one.record_event()
    assert not event.query()
    two.wait_event(event)
    two.synchronize()
    assert event.query()
    start, end = flow.cuda.Event(enable_timing=True), flow.cuda.Event(enable_timing=True)
    start.record(one)
    end.record(one)
    two.wait_stream(one)
    two.synchronize()
    assert end.query()
    assert start.elapsed_time(end) == 1.5
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        event.elapsed_time(end)


# ---- devices and memory


def test_devices_say_what_they_are(fake_cuda) -> None:
    assert flow.cuda.is_available()
    assert flow.cuda.device_count() == 2
    assert flow.cuda.get_device_name(1) == "Fake H200"
    assert flow.cuda.get_device_capability() == (9, 0)
    properties = flow.cuda.get_device_properties("cuda:1")
    assert (properties.total_memory, properties.multi_processor_count) == (1 << 37, 132)
    assert fake_cuda.contexts == set()
    with pytest.raises(flow.cuda.CudaUnavailableError, match="there is no cuda:2"):
        flow.cuda.get_device_name(2)
    flow.cuda.set_device(1)
    assert flow.cuda.current_device() == flow.device("cuda:1")


def test_memory_by_size_and_holder_and_in_numbers(fake_cuda) -> None:
    assert flow.cuda.memory_stats() == {}
    a, b = (flow.empty(1 << 20, device="cuda") for _ in range(2))
    stats = flow.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == 8 << 20 == flow.cuda.memory_allocated()
    assert stats["allocation.all.current"] == 2
    assert stats["segment.all.current"] == 1
    assert stats["reserved_bytes.all.peak"] == flow.cuda.max_memory_reserved() == 32 << 20
    rows = [row.split() for row in flow.cuda.memory_summary().splitlines()]
    assert rows[0][:4] == ["cuda:0:", "allocated", "8.0", "MiB"]
    assert ["8.0", "MiB", "2", "of", "4.0", "MiB"] in rows
    assert ["8.0", "MiB", "2", "code", "outside", "any", "operation"] in rows
    assert a.shape == b.shape


def test_peaks_begin_anew_and_the_cache_goes_back(fake_cuda) -> None:
    held = flow.empty(1 << 20, device="cuda")
    other = flow.empty(1 << 24, device="cuda")
    del other
    cuda = flow.cuda
    assert (cuda.memory_allocated(), cuda.max_memory_allocated()) == (4 << 20, 68 << 20)
    cuda.reset_peak_memory_stats()
    assert cuda.max_memory_allocated() == 4 << 20
    assert cuda.max_memory_reserved() == cuda.memory_reserved() > 64 << 20
    cuda.empty_cache()
    assert cuda.memory_reserved() < 64 << 20
    assert sum(len(memory) for memory in fake_cuda.memory.values()) == cuda.memory_reserved()
    assert cuda.memory_allocated("cuda:1") == cuda.max_memory_reserved(1) == 0
    del held
    cuda.empty_cache()
    assert cuda.memory_reserved() == 0


def test_a_refusal_says_what_is_left_and_what_could_be_freed(fake_cuda) -> None:
    held = flow.empty(1 << 20, device="cuda")
    flow.cuda.set_memory_limit(40 << 20)
    with pytest.raises(flow.OutOfMemoryError) as refused:
        flow.empty(1 << 24, device="cuda")
    text = str(refused.value)
    assert text.startswith("out of memory on cuda:0: asked for 64.0 MiB, limit 40.0 MiB, 3.0 GiB left on the device, ")
    assert "held 4.0 MiB" in text
    assert "raise the limit with flow.cuda.set_memory_limit()" in text
    assert "\n" not in text
    assert flow.cuda.memory_stats()["num_ooms"] == 1
    assert held.fill_ is not None
