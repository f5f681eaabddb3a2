"""How fast tensors are reduced among ranks, beside PyTorch's gloo or NCCL, in turns within the same processes.

    python suites/test_all_reduce.py [--ranks 2] [--device cuda]

prints the table that reports/all-reduce.md keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SIZES_BYTES = (4_000, 1_000_000, 25_000_000, 100_000_000)
TURNS = 15
ROOT = Path(__file__).resolve().parent.parent


def measure(
    ranks: int,
    device: str,
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    turns: int = TURNS,
    run: Callable[[list[str], dict[str, str]], object] | None = None,
) -> list[dict[str, Any]]:
    """For each size: the slowest rank's median time of both, in ms, and the lowest; a wrong sum raises.

    `run` runs the command that starts the ranks with variables for their environment, and raises where it fails; None waits
    for it as long as it takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "device": device, "sizes_bytes": sizes_bytes, "turns": turns}
        launch = [sys.executable, "-m", "framework.distributed.launch", "--nproc-per-node", str(ranks)]
        (run or _run)([*launch, __file__, "--rank-job", json.dumps(job)], {"OMP_NUM_THREADS": "1"})
        return json.loads((Path(folder) / "measured.json").read_text())


def _run(command: list[str], variables: dict[str, str]) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path, **variables}, check=True)


def bus_bandwidth(nbytes: int, time_ms: float, ranks: int) -> float:
    """Bytes per second on each rank's link, as NCCL's own tests define it: 2 (n - 1) / n of the bytes, over the time."""
    return 2 * (ranks - 1) / ranks * nbytes / (1e-3 * time_ms)


def run_rank(job: dict[str, Any]) -> None:
    """One rank: both libraries reduce the same values, one call each in turn."""
    import numpy as np
    import torch
    import torch.distributed as others

    import framework as flow

    own = flow.distributed
    own.init_process_group(timeout=300)
    rank, size, device = own.get_rank(), own.get_world_size(), job["device"]
    if device == "cuda":
        torch.cuda.set_device(own.get_local_rank())
    torch.set_num_threads(1)
    place = f"file://{job['folder']}/torch"
    others.init_process_group("nccl" if device == "cuda" else "gloo", init_method=place, rank=rank, world_size=size)
    measured = []
    for nbytes in job["sizes_bytes"]:
        # Whole numbers that are still exact when summed, at every place others.
        values = (np.arange(nbytes // 4) % 1000 + rank).astype(np.float32)
        wanted = size * (np.arange(nbytes // 4) % 1000) + size * (size - 1) / 2
        mine, theirs = flow.tensor(values, device=device), torch.from_numpy(values).to(device, copy=True)
        own.all_reduce(mine)
        others.all_reduce(theirs)
        for name, sums in (("Flow", mine.to("cpu")), ("PyTorch", theirs.cpu())):
            if not np.array_equal(sums.numpy(), wanted):
                raise RuntimeError(f"{name}'s all_reduce of {nbytes} bytes on {size} ranks is not the sum")
        mine, theirs = flow.zeros(nbytes // 4, device=device), torch.zeros(nbytes // 4, device=device)
        calls: dict[str, Callable[[], Any]] = {
            "flow": lambda mine=mine: own.all_reduce(mine),
            "torch": lambda theirs=theirs: others.all_reduce(theirs),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(job["turns"] + 2):
            for name in sorted(calls, reverse=bool(turn % 2)):
                own.barrier(device=device)
                started = time.perf_counter()
                calls[name]()
                if device == "cuda":
                    flow.cuda.synchronize()
                    torch.cuda.synchronize()
                if turn >= 2:
                    times[name].append(1e3 * (time.perf_counter() - started))
        figures = {name: (statistics.median(taken), min(taken)) for name, taken in times.items()}
        everyones = own.all_gather_object(figures)
        slowest = {name: [max(one[name][i] for one in everyones) for i in range(2)] for name in calls}
        measured.append({"bytes": nbytes, **slowest})
    if rank == 0:
        (Path(job["folder"]) / "measured.json").write_text(json.dumps(measured))
    own.barrier()
    others.destroy_process_group()
    own.destroy_process_group()


def table(measured: list[dict[str, Any]], other: str) -> str:
    """The figures as Markdown; relative is the other's median time over Flow's."""
    lines = [f"| float32 | Flow, ms (lowest) | {other}, ms (lowest) | relative |", "|--:|--:|--:|--:|"]
    for row in measured:
        own, others = ("{:.2f} ({:.2f})".format(*row[name]) for name in ("flow", "torch"))
        lines.append(f"| {row['bytes'] / 1e6:g} MB | {own} | {others} | {row['torch'][0] / row['flow'][0]:.2f} |")
    return "\n".join(lines)


def test_all_reduce(capsys: pytest.CaptureFixture) -> None:
    import pytest  # not needed as a script

    for library in ("framework", "torch"):
        pytest.importorskip(library)
    measured = measure(2, "cpu", SIZES_BYTES[:3], turns=5)
    with capsys.disabled():
        print("\n" + table(measured, "gloo"))  # noqa: T201 - what one runs it for
    assert [row["bytes"] for row in measured] == list(SIZES_BYTES[:3])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The time of an all-reduce, beside PyTorch's.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rank-job", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_job:
        run_rank(asked.rank_job)
    else:
        print(table(measure(asked.ranks, asked.device), "NCCL" if asked.device == "cuda" else "gloo"))  # noqa: T201
