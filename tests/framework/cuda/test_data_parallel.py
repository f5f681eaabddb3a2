"""DistributedDataParallel on GPUs, a rank for each; and what streams beside the compute stream may not do to memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import framework as flow
from framework.kernels.table import kernel
from framework.vm import Instruction, Stream, cuda, machine, runtime
from framework.vm.array import Array
from tests.framework.distributed.ranks import finish, run, start
from tests.framework.nn.test_data_parallel import NETWORK

pytestmark = pytest.mark.gpu

ON_GPU = (
    NETWORK
    + """
flow.cuda.set_device(rank % flow.cuda.device_count())
host_data = data
def data(*where, **how):
    return tuple(part.to("cuda") for part in host_data(*where, **how))
"""
)


def world_size() -> int:
    return min(flow.cuda.device_count(), 4)


def test_ranks_train_as_one_and_stay_the_same_to_the_last_bit() -> None:
    """Over 100 steps with different data on each rank; the means of the losses are those of one rank with all the data."""
    said = run(
        ON_GPU
        + """
alone, model = net().to("cuda"), nn.SyncBatchNorm.convert_sync_batchnorm(net(seed=rank)).to("cuda")
own = rank % flow.cuda.device_count()
model = DDP(model, device_ids=[own], output_device=own, bucket_cap_mb=0.001)
optimizers = [flow.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, model)]
n = 8 // size
for step in range(100):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = loss_of(model, data(rank, n, step))
    loss.backward()
    if step < 10:
        expected = loss_of(alone, data(0, n * size, step))
        expected.backward()
        mean = flow.tensor([loss.item()], dtype=flow.float64, device="cuda")
        dist.all_reduce(mean, "avg")
        assert abs(mean.item() - expected.item()) < 1e-5, (step, mean.item(), expected.item())
    for optimizer in optimizers:
        optimizer.step()
    same(whole(model))
print("well")
dist.destroy_process_group()
""",
        world_size(),
    )
    assert all(text.endswith("well\n") for text in said)


def test_a_rank_that_is_killed_in_backward_is_named_by_the_others() -> None:
    if world_size() < 2:
        pytest.skip("one GPU: there is no other rank to name it")
    ended = finish(
        start(
            ON_GPU
            + """
import signal
model = DDP(net().to("cuda"))
if rank == size - 1:
    model.module.conv2.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
for step in range(1000):
    loss_of(model, data(rank, 1, step)).backward()
    flow.cuda.synchronize()
""",
            world_size(),
        ),
        timeout_s=90,
    )
    assert ended[-1].status == -9
    for survivor in ended[:-1]:
        assert survivor.status == 1
        assert f"rank {world_size() - 1}" in survivor.text


@pytest.fixture
def side() -> Iterator[Stream]:
    """A stream beside the compute stream."""
    kernels = runtime(flow.device("cuda"))
    stream = kernels.open_stream("side")
    yield stream
    kernels.close_stream(stream)


def _slow_copy() -> Any:
    import cupy

    source = (
        'extern "C" __global__ void slow_copy(float* out, const float* in, int n) {'
        " long long start = clock64(); while (clock64() - start < 100000000LL) {}"
        " for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i]; }"
    )
    compiled = cupy.RawKernel(source, "slow_copy")

    @kernel(outputs=1)
    def slow_copy(out: Array, source: Array) -> None:
        with cupy.cuda.ExternalStream(cuda.stream_pointer(out.storage.device)):
            compiled((1,), (256,), (cupy.uint64(out.ptr), cupy.uint64(source.ptr), cupy.int32(source.size)))

    return slow_copy


@pytest.mark.parametrize("waits", [True, False])
def test_a_gradient_dropped_while_it_is_read_elsewhere(side: Stream, monkeypatch: Any, waits: bool) -> None:
    """Its memory is asked for again at once, and written. With the wait switched off the slow reader sees that."""
    if not waits:
        monkeypatch.setattr("framework.vm.uses.Uses.is_over", lambda self: True)
    kernels = runtime(flow.device("cuda"))
    size = 1024 * 1024
    reduced, gradient = (kernels.full((size,), value, flow.float32) for value in (0, 3))
    flow.cuda.synchronize()
    machine.issue(Instruction(_slow_copy(), (reduced, gradient), {}), side)
    address = gradient.ptr
    del gradient
    later = kernels.full((size,), -1, flow.float32)
    assert (later.ptr == address) is not waits
    assert set(kernels.to_host(reduced).tolist()) == {3.0 if waits else -1.0}


def test_parts_of_one_memory_are_written_by_two_streams_at_once(side: Stream) -> None:
    """As gradients in a bucket: what writes one of them does not wait for whoever writes another, what reads both does."""
    kernels = runtime(flow.device("cuda"))
    size = 1024 * 1024
    source, whole = kernels.full((size,), 3, flow.float32), kernels.full((2 * size,), 0, flow.float32)
    slow, quick = whole.view((size,), (1,), 0), whole.view((size,), (1,), size)
    flow.cuda.synchronize()
    machine.issue(Instruction(_slow_copy(), (slow, source), {}), side)
    kernels.fill(quick, value=2)
    kernels.compute.synchronize()
    assert not side.is_done(side.mark())
    assert set(kernels.to_host(quick).tolist()) == {2.0}
    assert set(kernels.to_host(slow).tolist()) == {3.0}
    assert side.is_done(side.mark())
