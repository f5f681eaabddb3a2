"""Ranks on GPUs: NCCL with as many ranks as there are GPUs, shared memory with more, against NumPy; and what goes wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

import framework as flow
from tests.framework.distributed.ranks import PRELUDE, environment, finish, run, start

pytestmark = pytest.mark.gpu

GPUS = max(1, flow.cuda.device_count())
several = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, there is {GPUS}")

COLLECTIVES = """
dist.init_process_group(BACKEND, timeout=60)
rank, size = dist.get_rank(), dist.get_world_size()
everyone = range(size)
assert dist.get_backend("cuda") == (BACKEND or "nccl")
assert flow.cuda.current_device().index == rank % flow.cuda.device_count()

def values(rank, count, dtype=np.float32):
    return np.random.default_rng(1000 * rank + count).integers(-100, 100, count).astype(dtype)

def there(array, dtype=None):
    return flow.tensor(array, dtype=dtype, device="cuda")

def back(tensor):
    return np.asarray(tensor.tolist())

# Whole numbers, so that every order of additions gives the same.
for count in (1, 7, 100_003):
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        for op, reduce in (("sum", np.sum), ("min", np.min), ("max", np.max), ("avg", np.mean)):
            if op == "avg" and dtype not in (np.float32, np.float64):
                continue
            tensor = there(values(rank, count, dtype))
            dist.all_reduce(tensor, op)
            wanted = reduce([values(r, count, dtype) for r in everyone], axis=0)
            assert np.allclose(back(tensor), wanted, rtol=1e-6), (count, dtype, op)
tensor = there(values(rank, 50) % 4, flow.bfloat16)
dist.all_reduce(tensor)
assert np.array_equal(back(tensor), sum(values(r, 50) % 4 for r in everyone))
flags = there(np.array([rank == 0, False, True]))
dist.all_reduce(flags)
assert back(flags).tolist() == [True, False, True]

base = there(values(rank, 24).reshape(4, 6))
turned = base.transpose(0, 1)
dist.all_reduce(turned)
assert np.array_equal(back(turned), sum(values(r, 24).reshape(4, 6) for r in everyone).T)

tensor = there(values(rank, 5000))
dist.broadcast(tensor, size - 1)
assert np.array_equal(back(tensor), values(size - 1, 5000))
gathered = [flow.zeros(500, device="cuda") for _ in everyone]
dist.all_gather(gathered, there(values(rank, 500)))
assert all(np.array_equal(back(gathered[r]), values(r, 500)) for r in everyone)
piece = flow.zeros(300, device="cuda")
dist.reduce_scatter(piece, there(values(rank, 300 * size)))
assert np.array_equal(back(piece), sum(values(r, 300 * size) for r in everyone)[300 * rank : 300 * (rank + 1)])

# Behind each other without waiting: what comes later sees what came before.
tensor = flow.ones(1_000_000, device="cuda")
works = []
for _ in range(3):
    works.append(dist.all_reduce(tensor, async_op=True))
for work in works:
    work.wait(60)
    assert work.is_completed()
assert back(tensor[:3]).tolist() == [float(size**3)] * 3

if size > 1:
    if rank == 0:
        dist.send(there(values(0, 70_000)), 1)
    elif rank == 1:
        came = flow.zeros(70_000, device="cuda")
        dist.recv(came, 0)
        assert np.array_equal(back(came), values(0, 70_000))
    pair = dist.new_group([1, 0])
    if rank < 2:
        one = flow.full((3,), float(rank), device="cuda")
        dist.broadcast(one, 1, group=pair)
        assert back(one).tolist() == [1, 1, 1]

leaf = flow.ones(2, device="cuda", requires_grad=True)
total = dist.functional.all_reduce(leaf * (rank + 1.0))
total.sum().backward()
assert back(leaf.grad).tolist() == [size * (rank + 1.0)] * 2
dist.barrier(device="cuda")

import pynvml
pynvml.nvmlInit()
for index in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    pids = [process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    assert os.getpid() not in pids or index == rank % flow.cuda.device_count(), f"rank {rank} holds memory on GPU {index}"
dist.barrier(device="cuda")
dist.destroy_process_group()
print("well")
"""


def test_nccl_gives_what_numpy_gives() -> None:
    pytest.importorskip("pynvml", reason="who holds memory on which GPU is asked of NVML")
    assert run("BACKEND = None\n" + COLLECTIVES, GPUS) == ["well\n"] * GPUS


def test_a_group_of_one_rank_that_was_given_nccl_goes_through_it() -> None:
    said = run(
        """
        from framework.distributed.nccl import NcclGroup
        from framework.vm import machine

        dist.init_process_group(timeout=60)
        group, cuda = dist.new_group([0], backend="nccl"), flow.device("cuda:0")
        given = flow.arange(6, dtype=flow.float32).reshape(2, 3).to("cuda")
        for op in ("sum", "avg", "min", "max"):
            dist.all_reduce(given, op, group)
        dist.broadcast(given, 0, group)
        out = flow.zeros(2, 3, device="cuda")
        dist.all_gather([out], given, group)
        assert out.tolist() == [[0, 1, 2], [3, 4, 5]]
        dist.reduce_scatter(out, given * 2.0, "sum", group)
        assert out.tolist() == [[0, 2, 4], [6, 8, 10]]
        dist.barrier(group, device="cuda")
        assert isinstance(group.on(cuda), NcclGroup) and not isinstance(dist.new_group([0]).on(cuda), NcclGroup)

        # The same steps, alone, through NCCL, and by a group that sends nothing.
        results = []
        parallel = flow.nn.parallel.DistributedDataParallel
        for wrap in (lambda model: model, lambda model: parallel(model, process_group=group), parallel):
            flow.manual_seed(3)
            model = wrap(flow.nn.Sequential(flow.nn.Conv2d(3, 8, 3), flow.nn.BatchNorm2d(8), flow.nn.ReLU()).to("cuda"))
            optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                optimizer.zero_grad()
                y = model(flow.randn(2, 3, 9, 9).to("cuda"))
                (y * y).sum().backward()
                optimizer.step()
            results.append([p.tolist() for p in model.parameters()])
            assert machine.is_plain
        assert results[0] == results[1] == results[2], results

        # One that leaves all as it is counts as done when what was issued before it is.
        work = dist.all_reduce(given, async_op=True)
        work.wait(60)
        assert work.is_completed()
        dist.destroy_process_group()
        print("well")
        """,
        1,
    )
    assert said == ["well\n"]


def test_ranks_that_share_a_gpu_go_through_the_host() -> None:
    pytest.importorskip("pynvml", reason="who holds memory on which GPU is asked of NVML")
    assert run("BACKEND = 'shm'\n" + COLLECTIVES, GPUS + 1) == ["well\n"] * (GPUS + 1)


def test_nccl_with_more_ranks_than_gpus_names_the_way_out() -> None:
    for one in finish(start("dist.init_process_group('nccl', timeout=30)", GPUS + 1)):
        assert one.status == 1
        assert 'take backend="shm"' in one.text


def test_ranks_that_are_ended_leave_no_memory(tmp_path: Path) -> None:
    """One is killed while each holds a GiB, and the launcher ends the other."""
    script = tmp_path / "script.py"
    script.write_text(
        PRELUDE
        + dedent("""
            dist.init_process_group(timeout=60)
            held = flow.zeros(256 * 2**20, device="cuda")
            print(flow.cuda.memory_allocated(), flush=True)
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
            time.sleep(300)
        """)
    )

    def free_bytes() -> list[int]:
        return [flow.cuda.mem_get_info(index)[0] for index in range(GPUS)]

    before = free_bytes()
    launch = [sys.executable, "-m", "framework.distributed.launch", "--no-prefix", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(launch, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    assert [int(line) >= 2**30 for line in ended.stdout.split()] == [True, True]
    until = time.monotonic() + 10
    while time.monotonic() < until:
        # A context alone takes some hundred MiB.
        if all(now > then - 64 * 2**20 for now, then in zip(free_bytes(), before, strict=True)):
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"free before {before}, ten seconds after {free_bytes()}")


@several
def test_a_killed_rank_ends_the_others_waiting() -> None:
    ended = finish(
        start(
            """
            dist.init_process_group(timeout=300)
            tensor = flow.ones(1_000_000, device="cuda")
            dist.all_reduce(tensor)
            tensor.tolist()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), 9)
            try:
                while True:
                    dist.all_reduce(tensor, async_op=True).wait(100)
            except dist.CollectiveError as error:
                print("told:", error)
            """,
            GPUS,
        )
    )
    assert ended[1].status == -signal.SIGKILL
    for rank, one in enumerate(ended):
        if rank != 1:
            assert one.status == 0, one.text
            assert "told: " in one.text
            assert "all_reduce(float32[1000000], sum)" in one.text


@several
def test_a_late_rank_and_a_different_call_are_named() -> None:
    ended = finish(
        start(
            """
            dist.init_process_group(timeout=4)
            rank = dist.get_rank()
            everyone = list(range(dist.get_world_size()))
            first, second = dist.new_group(everyone), dist.new_group(everyone)
            for group in (first, second):
                dist.barrier(group, device="cuda")
            def told(call):
                try:
                    call().wait(60)
                except dist.CollectiveError as error:
                    print("told:", error)
            # NCCL itself makes something of this; what the ranks called is compared a little later.
            told(lambda: dist.all_reduce(flow.ones(4 if rank else 3, device="cuda"), group=first, async_op=True))
            time.sleep(4)
            told(lambda: dist.barrier(first, async_op=True, device="cuda"))
            if rank == 1:
                time.sleep(8)
            else:
                told(lambda: dist.all_reduce(flow.ones(5, device="cuda"), group=second, async_op=True))
            """,
            GPUS,
        )
    )
    for rank, one in enumerate(ended):
        told = [line for line in one.text.splitlines() if line.startswith("told:")]
        assert "rank 0 calls all_reduce(float32[3], sum)" in told[0], one.text
        assert "rank 1 calls all_reduce(float32[4], sum)" in told[0], one.text
        if rank != 1:
            assert "rank 1 did not within 4 s" in told[1], one.text
