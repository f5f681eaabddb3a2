"""What it costs to let more than gradient accumulation leave the compute stream: memory and time by scheduling policy.

    python suites/test_scheduling_policies.py [--device cuda] [--batch-size 16]

prints the table that reports/scheduling-policies.md keeps. Everything runs in this process, the rows in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

REPEATS = 3


@dataclass
class Row:
    """A policy: its peak of allocated memory above what is held between steps, and the mean step time of each repeat."""

    policy: str
    peak_mib: float = 0.0
    repeats_ms: list[float] = field(default_factory=list)


def measure(model_name: str, shape: tuple[int, int, int, int], device: str, steps: int) -> list[Row]:
    """Trains one DistributedDataParallel model by each policy in turns, a few steps at a time, REPEATS times."""
    import framework as flow
    from framework.vm.schedule import scheduled

    memory = flow.cpu if device == "cpu" else flow.cuda
    measured = [Row("single"), Row("accumulate"), Row("backward")]
    with one_rank(flow):
        step = step_of(flow, model_name, shape, device)
        for _ in range(REPEATS):
            for row in measured:
                with scheduled(row.policy):
                    step(1)
                    memory.reset_peak_memory_stats()
                    held = memory.memory_allocated()
                    started = time.perf_counter()
                    step(steps)
                    row.repeats_ms.append(1e3 * (time.perf_counter() - started) / steps)
                    row.peak_mib = max(row.peak_mib, (memory.max_memory_allocated() - held) / 2**20)
    return measured


def step_of(flow: Any, model_name: str, shape: tuple[int, int, int, int], device: str) -> Callable[[int], None]:
    """A function that runs a number of steps and waits for them."""
    flow.manual_seed(0)
    model = flow.nn.parallel.DistributedDataParallel(getattr(flow.models, model_name)().to(device))
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


@contextlib.contextmanager
def one_rank(flow: Any) -> Iterator[None]:
    """A process group of this process alone: with it gradients go through the communication stream as with others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    flow.distributed.init_process_group()
    try:
        yield
    finally:
        flow.distributed.destroy_process_group()


def table(measured: list[Row]) -> str:
    """The rows as Markdown; relative is the median time of `accumulate` over the row's, above 1 it is faster than that."""
    (default,) = [row for row in measured if row.policy == "accumulate"]
    lines = ["| policy | mem, MiB | ms | ms | ms | relative |", "|---|---|---|---|---|---|"]
    for row in measured:
        times = " | ".join(f"{ms:.1f}" for ms in row.repeats_ms)
        relative = statistics.median(default.repeats_ms) / statistics.median(row.repeats_ms)
        lines.append(f"| {row.policy} | {row.peak_mib:.0f} | {times} | {relative:.2f} |")
    return "\n".join(lines)


def test_accumulate_takes_no_more_memory_than_a_single_stream(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("framework")
    measured = measure("resnet18", (2, 3, 64, 64), "cpu", steps=2)
    with capsys.disabled():
        print("\n" + table(measured))  # noqa: T201 - what one runs it for
    single, default, _ = measured
    assert default.peak_mib <= single.peak_mib


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Memory and time by scheduling policy.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    print(table(measure(asked.model, (asked.batch_size, 3, 224, 224), asked.device, asked.steps)))  # noqa: T201
