"""What it costs to let more than gradient accumulation leave the compute stream: memory and time by scheduling policy.

    python suites/test_scheduling_policies.py [--device cuda] [--batch-size 16]

prints the table that reports/scheduling-policies.md keeps. Everything runs in this process, the policies in turns, a step each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from flowbench.judge.stats import Ratio, paired_ratio
from suites.one_rank import one_rank

REPEATS = 3


@dataclass
class Row:
    """A policy: its peak of allocated memory above what is held between steps; of each turn the step's time, and the CPU's."""

    policy: str
    peak_mib: float = 0.0
    steps_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    @property
    def repeats_ms(self) -> list[float]:
        """The mean step time of each third of the turns."""
        turns = len(self.steps_ms) // REPEATS
        return [statistics.fmean(self.steps_ms[i * turns : (i + 1) * turns]) for i in range(REPEATS)]


def measure(model_name: str, shape: tuple[int, int, int, int], device: str, turns: int) -> list[Row]:
    """Trains one DistributedDataParallel model by each policy in turns, REPEATS times so many, back and forth."""
    import framework as flow
    from framework.vm.schedule import scheduled

    memory = flow.cpu if device == "cpu" else flow.cuda
    measured = [Row("single"), Row("accumulate"), Row("backward")]
    with one_rank(flow, device) as group:
        step = step_of(flow, model_name, shape, device, group)
        for turn in range(REPEATS * turns):
            for row in measured[:: -1 if turn % 2 else 1]:
                with scheduled(row.policy):
                    step(1)  # its streams, and their threads, are made
                    memory.reset_peak_memory_stats()
                    held = memory.memory_allocated()
                    started, busy = time.perf_counter(), time.process_time()
                    step(1)
                    row.cpu_ms.append(1e3 * (time.process_time() - busy))
                    row.steps_ms.append(1e3 * (time.perf_counter() - started))
                    row.peak_mib = max(row.peak_mib, (memory.max_memory_allocated() - held) / 2**20)
    return measured


def step_of(
    flow: Any, model_name: str, shape: tuple[int, int, int, int], device: str, group: Any
) -> Callable[[int], None]:
    """A function that runs a number of steps and waits for them."""
    flow.manual_seed(0)
    module = getattr(flow.models, model_name)().to(device)
    model = flow.nn.parallel.DistributedDataParallel(module, process_group=group)
    optimizer = flow.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    images = flow.randn(*shape).to(device)
    labels = flow.zeros(shape[0], dtype=flow.int64).to(device)
    criterion = flow.nn.CrossEntropyLoss()

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        if device != "cpu":
            flow.cuda.synchronize()

    return run


def table(measured: list[Row]) -> str:
    """The rows as Markdown; relative is the time of `accumulate` over the row's in the same turn, above 1 the row is faster."""
    (default,) = [row for row in measured if row.policy == "accumulate"]
    lines = [
        "| policy | mem, MiB | ms | ms | ms | relative (turns) | CPU, ms | relative (turns) |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in measured:
        times = " | ".join(f"{ms:.1f}" for ms in row.repeats_ms)
        by_clock, by_cpu = paired_ratio(default.steps_ms, row.steps_ms), paired_ratio(default.cpu_ms, row.cpu_ms)
        cpu = f"{statistics.median(row.cpu_ms):.1f} | {_spread(by_cpu)}"
        lines.append(f"| {row.policy} | {row.peak_mib:.0f} | {times} | {_spread(by_clock)} | {cpu} |")
    return "\n".join(lines)


def _spread(ratio: Ratio) -> str:
    return f"{ratio.geometric_mean:.2f} ({ratio.lowest:.2f} - {ratio.highest:.2f})"


def test_accumulate_takes_no_more_memory_than_a_single_stream(capsys: pytest.CaptureFixture) -> None:
    flow = pytest.importorskip("framework")
    # In a process of its own: a block that others left in the cache may be a little larger than what is asked of it. With one
    # thread: no pool that spins while it waits, see below.
    alone = ProcessPoolExecutor(1, get_context("spawn"), flow.set_num_threads, (1,))
    with alone:
        measured = alone.submit(measure, "resnet18", (2, 3, 64, 64), "cpu", turns=1).result()
    with capsys.disabled():
        print("\n" + table(measured))  # noqa: T201 - what one runs it for
    single, default, _ = measured
    assert default.peak_mib <= single.peak_mib


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory and time by scheduling policy.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--turns", type=int, default=3, help=f"of each policy, {REPEATS} times; default: 3")
    asked = parser.parse_args()
    # A pool of threads that waits by spinning takes the cores from whoever works, and each stream has a pool of its own: how
    # they wait would be compared, not what they do. Read when the first of them is made.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    shape = (asked.batch_size, 3, asked.image_size, asked.image_size)
    print(table(measure(asked.model, shape, asked.device, asked.turns)))  # noqa: T201
