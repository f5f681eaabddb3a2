"""What DistributedDataParallel adds to the training step of one rank, with its collectives sent and without.

    python suites/ddp_cost.py [--device cuda] [--batch-size 1 4 8 16 64] [--pairs 40]

Three models train in this process: one alone, one in a DDP whose group of one rank goes through NCCL (shared memory on a CPU)
as several ranks do, and one in a DDP as it comes, which sends nothing with one rank. They take turns, a block of steps each.
What stands in the table is the median over the turns of a block's time over that of the model alone, and the middle half.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from suites.one_rank import one_rank
from suites.one_step import Step, device_of, synchronize, training_step

ALONE, SENDING, AS_IT_COMES = "one rank", "DDP that sends", "DDP as it comes"
_WARMUP_STEPS = 5


def measure(
    flow: Any, model: str, shape: tuple[int, int, int, int], device: str, group: Any, *, pairs: int, steps: int
) -> dict[str, list[float]]:
    """For each of the three the time of a step in ms, averaged over each of its `pairs` blocks of `steps`."""
    sides: dict[str, Step] = {}
    parallel = flow.nn.parallel.DistributedDataParallel
    wraps: dict[str, Callable[[Any], Any]] = {
        ALONE: lambda module: module,
        SENDING: lambda module: parallel(module, process_group=group),
        AS_IT_COMES: parallel,
    }
    for name, wrap in wraps.items():
        _say(f"N = {shape[0]}: {name}, {_WARMUP_STEPS} steps to warm up")
        sides[name] = training_step(flow, model, shape, device, wrap)
        _block(flow, sides[name], device, _WARMUP_STEPS)
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(pairs):
        _say(f"N = {shape[0]}: turn {turn + 1} of {pairs}")
        # Not between the blocks: the nearer they lie, the more alike is the host under them.
        gc.collect()
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            _block(flow, sides[name], device, 1)
            measured[name].append(_block(flow, sides[name], device, steps))
    return measured


def _say(what: str) -> None:
    """Shows what is under way, on a line of its own where that is no terminal."""
    print(what.ljust(60), file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)


def _block(flow: Any, step: Step, device: str, steps: int) -> float:
    """The time of a step in ms, over so many and until the device is done with them."""
    synchronize(flow, device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(flow, device)
    return 1e3 * (time.perf_counter() - started) / steps


def row(batch_size: int, measured: dict[str, list[float]]) -> str:
    """A line of the table, in Markdown."""
    alone = measured[ALONE]
    cells = [str(batch_size), f"{statistics.median(alone):.3f}"]
    for name in (SENDING, AS_IT_COMES):
        costs = [100 * (other / own - 1) for own, other in zip(alone, measured[name], strict=True)]
        low, middle, high = statistics.quantiles(costs, n=4, method="inclusive")
        cells += [f"{statistics.median(measured[name]):.3f}", f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    f"| N | {ALONE}, ms | {SENDING}, ms | cost (middle half) | {AS_IT_COMES}, ms | cost (middle half) |\n"
    "|--:|--:|--:|--:|--:|--:|"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each batch size, and prints its line as soon as it is there."""
    parser = argparse.ArgumentParser(description="What DistributedDataParallel adds to one rank's step.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--model", default="resnet50", help="default: resnet50")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 8, 16, 64], help="default: 1 4 8 16 64")
    parser.add_argument("--image-size", type=int, default=224, help="height and width; default: 224")
    parser.add_argument("--pairs", type=int, default=40, help="blocks of each of the three, at least 2; default: 40")
    parser.add_argument("--steps", type=int, default=5, help="in each block; default: 5")
    asked = parser.parse_args(arguments)
    if asked.pairs < 2 or asked.steps < 1 or min(asked.batch_size) < 1 or asked.image_size < 1:
        parser.error("--pairs starts at 2, for a spread; --steps, --batch-size and --image-size at 1")
    flow = device_of(parser, asked.device)
    models = [name for name in flow.models.__all__ if name.islower()]
    if asked.model not in models:
        parser.error(f"--model is one of {', '.join(models)}; got {asked.model!r}")
    with one_rank(flow, asked.device) as group:
        print(HEAD, flush=True)
        for batch_size in asked.batch_size:
            shape = (batch_size, 3, asked.image_size, asked.image_size)
            try:
                measured = measure(flow, asked.model, shape, asked.device, group, pairs=asked.pairs, steps=asked.steps)
            except (ValueError, flow.OutOfMemoryError) as refused:
                parser.error(f"{asked.model} cannot be trained on images {list(shape)}: {refused}")
            print(row(batch_size, measured), flush=True)


if __name__ == "__main__":
    main()
