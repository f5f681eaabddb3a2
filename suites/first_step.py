"""How long a process takes to its first training step: with nothing kept from earlier ones, and with all of it.

    python suites/first_step.py [--device cuda] [--model resnet50] [--batch-size 32] [--repeats 2]

Each is a process of its own. A first one finds empty caches on disk: it compiles the kernels and times the convolutions.
Those behind it find what it kept. The step's time goes from weights and a batch on the device until the step is done, the other
from the start of the process, which imports Flow, draws the weights and opens the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script

from suites.one_step import device_of, synchronize, training_step  # noqa: E402

HEAD = "| caches | first step, s | from the process's start, s | second step, s |\n|---|--:|--:|--:|"


def run_child(started_s: float, asked: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Trains for two steps, and writes the three times; `started_s` is when the process was started, by the monotonic clock."""
    flow = device_of(parser, asked.device)
    shape = (asked.batch_size, 3, asked.image_size, asked.image_size)
    try:
        step = training_step(flow, asked.model, shape, asked.device)
        synchronize(flow, asked.device)
        times_s = [time.monotonic()]
        for _ in range(2):
            step()
            synchronize(flow, asked.device)
            times_s.append(time.monotonic())
    except (ValueError, flow.OutOfMemoryError) as refused:
        parser.error(f"{asked.model} cannot be trained on images {list(shape)}: {refused}")
    began, first, second = times_s
    print(json.dumps([first - began, first - started_s, second - first]))


def row(caches: str, times_s: Sequence[float]) -> str:
    """A line of the table, in Markdown."""
    return f"| {caches} | {' | '.join(f'{taken:.2f}' for taken in times_s)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the processes one by one, and prints each one's line as soon as it is there; 2 where one of them fails."""
    parser = argparse.ArgumentParser(description="How long a process takes to its first training step.")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="default: cuda")
    parser.add_argument("--model", default="resnet50", help="default: resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="default: 32")
    parser.add_argument("--image-size", type=int, default=224, help="height and width; default: 224")
    parser.add_argument("--repeats", type=int, default=2, help="processes that find kept caches; default: 2")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    asked = parser.parse_args(given)
    if min(asked.repeats, asked.batch_size, asked.image_size) < 1:
        parser.error("--repeats, --batch-size and --image-size start at 1")
    if asked.started is not None:
        run_child(asked.started, asked, parser)
        return 0
    from flowbench.measure.processes import child_environment  # not in what a child takes to start

    with tempfile.TemporaryDirectory() as folder:
        # The driver keeps what it translates in a place of its own.
        empty = {"XDG_CACHE_HOME": f"{folder}/own", "CUDA_CACHE_PATH": f"{folder}/drivers"}
        for number in range(1 + asked.repeats):
            command = [sys.executable, __file__, *given, "--started", str(time.monotonic())]
            child = subprocess.run(
                command, env=child_environment() | empty, stdout=subprocess.PIPE, text=True, check=False
            )
            if child.returncode != 0:  # it has said why
                return 2
            if number == 0:
                print(HEAD)
            print(row("kept" if number else "empty", json.loads(child.stdout)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
