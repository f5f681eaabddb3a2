"""Other people's launchers, where they are installed: torchrun, and mpirun with the mpi backend."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.framework.distributed.ranks import PRELUDE, environment, finish

MPIRUN = shutil.which("mpirun")
with_mpi = pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpirun and mpi4py"
)


def launched(tmp_path: Path, command: list[str], code: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(PRELUDE + dedent(code))
    # Open MPI refuses to run as root, as in a container, unless it is told twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        [*command, str(script)], env=environment(**root), capture_output=True, text=True, check=False, timeout=300
    )


def mpirun(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    # Waiting ranks give way to those that have something to do, where there are more ranks than cores.
    several = ["--oversubscribe"] if "Open MPI" in subprocess.getoutput(f"{MPIRUN} --version") else []
    return launched(tmp_path, [str(MPIRUN), *several, "-n", "2", sys.executable], code)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torchrun comes with torch")
def test_torchrun(tmp_path: Path) -> None:
    code = """
        dist.init_process_group(timeout=60)
        x = flow.tensor([1.0 + dist.get_local_rank()])
        dist.all_reduce(x)
        dist.destroy_process_group()
        # In one piece: torchrun's ranks do not buffer, and they write to the same pipe.
        print(f"sum {x.item()} {os.environ['MASTER_PORT'] != ''}\\n", end="")
    """
    answer = launched(
        tmp_path, [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], code
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "sum 3.0 True\n" * 2


SUM = """
    dist.init_process_group(timeout=60)
    x = flow.tensor([1.0 + dist.get_local_rank()])
    dist.all_reduce(x)
    dist.destroy_process_group()
    print(f"sum {x.item()}\\n", end="")
"""


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_mpirun_without_mpi(tmp_path: Path) -> None:
    """Its variables alone bring the ranks together; they communicate through shared memory."""
    answer = mpirun(tmp_path, SUM)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("sum 3.0") == 2


def test_the_variables_of_srun() -> None:
    """Two processes with what srun sets for a step of two tasks on this machine."""
    step = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    ended = finish(
        [
            subprocess.Popen(
                [sys.executable, "-c", PRELUDE + dedent(SUM)],
                env=environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
    )
    assert [(one.status, one.text) for one in ended] == [(0, "sum 3.0\n")] * 2


@with_mpi
def test_mpi_gives_what_numpy_gives(tmp_path: Path) -> None:
    answer = mpirun(
        tmp_path,
        """
        dist.init_process_group("mpi", timeout=60)
        assert dist.get_backend() == "mpi"
        rank, size = dist.get_rank(), dist.get_world_size()
        values = [np.random.default_rng(r).integers(0, 9, 100_001) for r in range(size)]
        for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8):
            for op, wanted in (("sum", sum(values)), ("min", np.minimum(*values)), ("max", np.maximum(*values))):
                x = flow.tensor(values[rank].astype(dtype))
                dist.all_reduce(x, op)
                assert np.array_equal(x.numpy(), wanted), (dtype, op)
        flags = flow.tensor([rank == 0, False])
        dist.all_reduce(flags)
        assert flags.numpy().tolist() == [True, False]
        half = flow.tensor(np.array([1.0, 2**-8]) if rank else np.array([2.0, 1.0]), dtype=flow.bfloat16)
        dist.all_reduce(half, "avg")
        assert flow.tensor(half, dtype=flow.float32).numpy().tolist() == [1.5, 0.5]
        empty = flow.zeros(0)
        dist.all_reduce(empty)
        b = flow.tensor(values[rank].astype(np.float32).reshape(-1, 1))
        dist.broadcast(b, 1)
        assert np.array_equal(b.numpy().ravel(), values[1])
        parts = [flow.zeros(3) for _ in range(size)]
        dist.all_gather(parts, flow.full((3,), float(rank)))
        assert [part.numpy()[2] for part in parts] == list(range(size))
        piece = flow.zeros(2)
        dist.reduce_scatter(piece, flow.arange(2 * size, dtype=flow.float32), "avg")
        assert piece.numpy().tolist() == [2 * rank, 2 * rank + 1]
        if rank == 0:
            dist.send(flow.arange(200_000), 1)
        else:
            came = flow.tensor(np.zeros(200_000, np.int64))
            dist.recv(came, 0)
            assert came.numpy()[-1] == 199_999
        turned = dist.new_group([1, 0])
        work = dist.broadcast(b, 0, group=turned, async_op=True)
        work.wait()
        assert np.array_equal(b.numpy().ravel(), values[1])
        dist.barrier()
        dist.destroy_process_group()
        print("well")
        """,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("well") == 2  # two lines may run into one


@with_mpi
def test_the_store_answers_while_its_rank_starts_mpi(tmp_path: Path) -> None:
    """Starting MPI waits for all ranks, and one of them still needs the store, which is a thread of the first."""
    answer = mpirun(
        tmp_path,
        """
        from framework.distributed.groups import Group

        come_together = Group._come_together
        def later(group, device):
            come_together(group, device)
            if group.world.rank == 1:
                time.sleep(1)
                group.world.store.set("late", b"")
        Group._come_together = later
        dist.init_process_group("mpi", timeout=60)
        dist.barrier()
        print("well")
        """,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.count("well") == 2  # two lines may run into one


@with_mpi
def test_mpi_names_different_calls_and_who_does_not_come(tmp_path: Path) -> None:
    answer = mpirun(
        tmp_path,
        """
        dist.init_process_group(timeout=60, backend="mpi")
        rank = dist.get_rank()
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        two.world.timeout_s = 2.0
        dist.barrier(one)
        dist.barrier(two)
        try:
            dist.all_reduce(flow.zeros(3 + rank), group=one)
        except dist.CollectiveError as error:
            print(error)
        if rank == 0:
            try:
                dist.all_reduce(flow.zeros(3), group=two)
            except dist.CollectiveTimeoutError as error:
                print(error)
            raise SystemExit(0)
        time.sleep(5)
        """,
    )
    assert "rank 0 calls all_reduce(float32[3], sum); rank 1 calls all_reduce(float32[4], sum)" in answer.stdout
    assert (
        "all_reduce(float32[3], sum), number 2 of group 2/mpi/cpu: rank 0 came, rank 1 did not within 2 s"
        in answer.stdout
    )


@with_mpi
def test_a_rank_that_fails_ends_all_under_mpirun(tmp_path: Path) -> None:
    answer = mpirun(
        tmp_path,
        """
        dist.init_process_group(timeout=300, backend="mpi")
        if dist.get_rank() == 1:
            raise ValueError("my message")
        dist.barrier()
        """,
    )
    assert answer.returncode != 0
    assert "ValueError: my message" in answer.stderr


@with_mpi
def test_mpi_without_mpirun_names_the_way_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "framework.distributed.launch", "--nproc-per-node", "2"]
    answer = launched(tmp_path, command, 'dist.init_process_group("mpi", timeout=20)')
    assert answer.returncode == 1
    assert "start the ranks by `mpirun -n 2 python script.py`" in answer.stderr
