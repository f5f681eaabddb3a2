"""CUDA devices in use: transfers, memory, streams, events, errors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import framework as flow
from framework.vm import Instruction, machine, runtime, scratch
from framework.vm.cuda import CudaStream

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [flow.float32, flow.float64, flow.int32, flow.int64, flow.uint8, flow.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 3, 5, 7), (2, 8, 1, 1), (3, 0, 2, 2)])
def test_values_survive_the_way_there_and_back(dtype, shape):
    values = np.random.default_rng(1).integers(0, 2, shape).astype(dtype.numpy)
    there = flow.tensor(values, device="cuda")
    assert there.dtype is dtype
    assert np.array_equal(there.to("cpu").numpy(), values)
    assert np.array_equal(np.asarray(there.tolist(), dtype.numpy).reshape(shape), values)


def test_cuda_and_cpu_are_ways_there_and_back():
    layer, x = flow.nn.Linear(3, 2).cuda(0), flow.ones(1, 3).cuda()
    y = layer(x)
    assert str(y.device) == "cuda:0"
    layer.cpu()
    np.testing.assert_allclose(y.detach().cpu().numpy(), layer(x.cpu()).detach().numpy(), rtol=1e-5)


def test_more_than_the_staging_memory_holds():
    values = np.random.default_rng(2).standard_normal(9_000_001).astype(np.float32)
    there = flow.tensor(values, device="cuda")
    values_then = values.copy()
    values[:] = 0  # the source is free once tensor() has returned
    assert np.array_equal(there.to("cpu").numpy(), values_then)


def test_views_come_back_in_order():
    values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    there = flow.tensor(values, device="cuda")
    assert there.stride() == (60, 1, 15, 3)  # images lie NHWC
    assert np.array_equal(there.permute(3, 1, 0, 2).to("cpu").numpy(), values.transpose(3, 1, 0, 2))
    assert np.array_equal(there.reshape(6, 20)[1::2, 3:].to("cpu").numpy(), values.reshape(6, 20)[1::2, 3:])


def test_bfloat16_rounds_to_nearest():
    values = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -0.0, np.inf, np.nan], np.float32)
    there = flow.tensor(values, dtype=flow.bfloat16, device="cuda")
    assert there.tolist()[:3] == [1, 1, 1 + 2**-6]
    assert np.array_equal(there.tolist(), there.to("cpu").tolist(), equal_nan=True)
    assert np.array_equal(there.to(flow.float32).tolist(), there.tolist(), equal_nan=True)


def test_numpy_cannot_view_device_memory():
    with pytest.raises(RuntimeError, match=r"copy it with \.to\('cpu'\) first"):
        flow.zeros(3, device="cuda").numpy()


def test_devices_are_not_mixed():
    with pytest.raises(ValueError, match=r"move them to one with \.to\(\)"):
        flow.zeros(3, device="cuda") + flow.zeros(3)


def test_there_is_no_such_device():
    with pytest.raises(flow.cuda.CudaUnavailableError, match="there is no cuda:99"):
        flow.zeros(3, device="cuda:99")


@pytest.mark.usefixtures("no_garbage")
def test_memory_is_counted_and_given_back():
    flow.zeros(1, device="cuda")
    flow.cuda.empty_cache()
    before, reserved = flow.cuda.memory_allocated(), flow.cuda.memory_reserved()
    flow.cuda.reset_peak_memory_stats()
    a = flow.zeros(64, 1024, 1024, device="cuda")
    assert flow.cuda.memory_allocated() - before == 256 * 2**20
    assert "fill" in flow.cuda.memory_summary() or "code outside" in flow.cuda.memory_summary()
    del a
    assert flow.cuda.memory_allocated() == before
    assert flow.cuda.max_memory_allocated() - before == 256 * 2**20
    flow.cuda.empty_cache()
    assert flow.cuda.memory_reserved() <= max(reserved, before + 64 * 2**20)


def test_out_of_memory_says_who_holds_it_and_tensors_stay_usable():
    a = flow.ones(1024, 1024, device="cuda")
    total = flow.cuda.mem_get_info()[1]
    with pytest.raises(flow.OutOfMemoryError, match="asked for"):
        flow.empty(total, device="cuda")
    assert float(a.sum()) == 1024 * 1024
    flow.cuda.set_memory_limit(flow.cuda.memory_reserved() + 2**20)
    try:
        with pytest.raises(flow.OutOfMemoryError, match=r"limit .* held .* flow\.cuda\.set_memory_limit"):
            flow.empty(2**30, device="cuda")
    finally:
        flow.cuda.set_memory_limit(None)
    assert float(flow.empty(2**20, device="cuda").fill_(2).sum()) == 2**21


def test_events_measure_time():
    start, stop = flow.cuda.Event(enable_timing=True), flow.cuda.Event(enable_timing=True)
    a = flow.zeros(64 * 2**20, device="cuda")
    start.record()
    for _ in range(10):
        a.fill_(1)
    stop.record()
    stop.synchronize()
    assert stop.query()
    assert 0.1 < start.elapsed_time(stop) < 1000


def test_a_second_stream_waits_for_what_it_reads_and_memory_for_it():
    device = flow.device("cuda")
    kernels = runtime(device)
    side = machine.add_stream(CudaStream(device, "side"))
    try:
        for round_ in range(20):
            a = kernels.full((8 * 2**20,), round_, flow.float32)
            b = kernels.empty((8 * 2**20,), flow.float32)
            machine.issue(Instruction(kernels.table.kernels["copy"], (b, a), {}), side)
            del a
            # May not take a's memory before the copy has read it.
            c = kernels.full((8 * 2**20,), -1, flow.float32)
            total = kernels.empty((), flow.float32)
            kernels.sum(total, b, axes=(0,), keepdims=False)
            assert kernels.to_host(total).item() == round_ * 8 * 2**20
            del b, c
    finally:
        machine.remove_stream(side)


def test_waiting_for_each_instruction_changes_no_result():
    with flow.cuda.launch_blocking():
        assert float(flow.ones(10, device="cuda").sum()) == 10


@pytest.mark.usefixtures("no_garbage")
def test_scratch_memory_is_counted():
    before = flow.cuda.memory_allocated()
    room = scratch(flow.device("cuda"), 2**20)
    assert flow.cuda.memory_allocated() - before == 2**20
    del room


def test_pinned_memory_is_read_beside_the_host_and_not_handed_out_before():
    values = np.random.default_rng(4).standard_normal((16, 3, 256, 256)).astype(np.float32)
    flow.zeros(1, device="cuda")
    busy = flow.zeros(512 * 2**20, device="cuda")
    # So that the device has memory for it: asking the driver for some can take as long as the work below.
    flow.tensor(values).pin_memory().to("cuda", non_blocking=True)
    for round_ in range(5):
        source = flow.tensor(values + round_).pin_memory()
        for _ in range(100):
            busy.fill_(round_)  # the copy has to wait behind tens of milliseconds of this
        there = source.to("cuda", non_blocking=True)
        assert not flow.cuda.current_stream().query(), "to() has waited for the device"
        del source
        again = flow.tensor(np.full_like(values, -1)).pin_memory()  # may not take the memory that is still to be read
        assert there.stride() == (3 * 256 * 256, 1, 3 * 256, 3)
        assert np.array_equal(there.to("cpu").numpy(), values + round_)
        assert again.is_pinned()


def test_a_write_to_pinned_memory_waits_for_the_copy():
    busy = flow.zeros(512 * 2**20, device="cuda")
    source = flow.ones(2**20).pin_memory()
    for _ in range(20):
        busy.fill_(1)
    there = source.to("cuda", non_blocking=True)
    source.fill_(2)
    assert float(there.sum()) == 2**20


def test_a_stream_of_ones_own():
    side = flow.cuda.Stream()
    x = flow.ones(8 * 2**20, device="cuda")
    start, end = flow.cuda.Event(enable_timing=True), flow.cuda.Event(enable_timing=True)
    for round_ in range(20):
        with flow.cuda.stream(side):
            assert flow.cuda.current_stream() == side
            start.record()
            y = x * round_
            z = y + y
            end.record()
        del y
        w = flow.full((8 * 2**20,), -1.0, device="cuda")
        assert float(z.sum()) == 2 * round_ * 8 * 2**20
        assert float(w.sum()) == -8 * 2**20
    assert 0 < start.elapsed_time(end) < 1000
    side.synchronize()
    assert side.query()
    weight = flow.ones(64, 64, device="cuda", requires_grad=True)
    with flow.cuda.stream(side):
        (x[: 64 * 64].reshape(64, 64) @ weight).sum().backward()
    assert weight.grad.tolist() == [[64.0] * 64] * 64
    del side


def test_a_device_says_what_it_is():
    properties = flow.cuda.get_device_properties()
    assert flow.cuda.get_device_name() == properties.name
    assert properties.total_memory >= flow.cuda.mem_get_info()[0] > 0
    assert flow.cuda.get_device_capability() == (properties.major, properties.minor)
    stats = flow.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == flow.cuda.memory_allocated()
    assert stats["reserved_bytes.all.peak"] == flow.cuda.max_memory_reserved()


def test_waiting_for_each_instruction_names_the_one_with_a_bad_target():
    logits = flow.randn(4, 10, device="cuda", requires_grad=True)
    target = flow.tensor([1, 2, 12, 3], device="cuda")
    with (
        flow.cuda.launch_blocking(),
        pytest.raises(ValueError, match=r"^cross_entropy\(.*in cross_entropy: .*got 12"),
    ):
        flow.nn.functional.cross_entropy(logits, target)


FAULT = """
import numpy as np
import framework as flow
from framework.vm import Array, Instruction, machine, runtime
kernels = runtime(flow.device("cuda"))
a = kernels.full((1024,), 1, flow.float32)
class Elsewhere(Array):
    __slots__ = ()
bad = Elsewhere(a.storage, a.shape, a.stride, a.dtype)
bad.ptr = 64  # no memory of the process
with flow.cuda.launch_blocking():
    kernels.add(a, a, 1.0)
    try:
        machine.issue(Instruction(kernels.table.kernels["copy"], (a, bad), {}))
    except flow.cuda.CudaError as error:
        print(error)
"""


def test_a_fault_of_memory_access_names_its_instruction():
    answer = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, check=False)
    assert answer.stdout.startswith("copy(float32[1024], float32[1024]) failed on the device: "), (
        answer.stdout + answer.stderr
    )
    assert "llegal" in answer.stdout
