"""What a training step costs the host: how many instructions it has, and what each kind of them takes.

    python suites/host_cost.py [--device cuda] [--model resnet50] [--batch-size 1] [--steps 30]

The host's time is the time until a step is issued, on a device that has nothing else to do. For the kinds each instruction is
observed, which takes longer, since nothing is issued the quick way then: they say where the time goes, not how much it is. On
a CPU the host does the work itself, and all of it is in these times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from suites.one_step import Step, device_of, synchronize, training_step

# Until launches go in groups and plans have learned what they launch.
_WARMUP_STEPS = 20


class Cost(NamedTuple):
    """Of each step the time until it was issued, and the same observed; of each kernel the times of its instructions."""

    steps_ms: list[float]
    observed_ms: list[float]
    kinds_us: dict[str, list[float]]


def measure(flow: Any, step: Step, device: str, steps: int) -> Cost:
    """Issues `steps` steps as ever, then as many observed."""
    from framework.vm import machine

    kinds_us: dict[str, list[float]] = {}
    behind = flow.cuda.Event() if device == "cuda" else None

    def observe(instruction: Any, run: Callable[[], None]) -> None:
        begun = time.perf_counter()
        run()
        kinds_us.setdefault(instruction.kernel.__name__, []).append(1e6 * (time.perf_counter() - begun))

    def issued_ms() -> float:
        synchronize(flow, device)
        begun = time.perf_counter()
        step()
        if behind is not None:
            behind.record()  # what still waits for others of its group goes to the device
        return 1e3 * (time.perf_counter() - begun)

    for _ in range(_WARMUP_STEPS):
        step()
    steps_ms = [issued_ms() for _ in range(steps)]
    with machine.observed(observe):
        step()
        kinds_us.clear()
        observed_ms = [issued_ms() for _ in range(steps)]
    synchronize(flow, device)
    return Cost(steps_ms, observed_ms, kinds_us)


def text(cost: Cost) -> str:
    """The figures, in Markdown: the whole first, then the kinds, those with the most time first."""
    steps = len(cost.observed_ms)
    instructions = sum(map(len, cost.kinds_us.values())) / steps
    middle, lowest = statistics.median(cost.steps_ms), min(cost.steps_ms)
    lines = [
        (
            f"{instructions:g} instructions in a step, which the host issues in {middle:.2f} ms (lowest {lowest:.2f}):"
            f" {1e3 * middle / instructions:.1f} us for each (lowest {1e3 * lowest / instructions:.1f})"
        ),
        "",
        "| kind, observed | in a step | us each (lowest) | ms in a step |",
        "|---|--:|--:|--:|",
    ]
    for name, taken in sorted(cost.kinds_us.items(), key=lambda kind: -sum(kind[1])):
        each = f"{statistics.median(taken):.1f} ({min(taken):.1f})"
        lines.append(f"| {name} | {len(taken) / steps:g} | {each} | {sum(taken) / steps / 1e3:.3f} |")
    within_ms = sum(map(sum, cost.kinds_us.values())) / steps / 1e3
    lines.append(f"| between instructions | | | {statistics.fmean(cost.observed_ms) - within_ms:.3f} |")
    lines += ["", f"A step whose instructions are observed takes longer: {statistics.fmean(cost.observed_ms):.2f} ms."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures one batch size, and prints its table."""
    parser = argparse.ArgumentParser(description="What a training step costs the host, by kind of instruction.")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="default: cuda")
    parser.add_argument("--model", default="resnet50", help="default: resnet50")
    parser.add_argument("--batch-size", type=int, default=1, help="default: 1, where the host sets the pace")
    parser.add_argument("--image-size", type=int, default=224, help="height and width; default: 224")
    parser.add_argument("--steps", type=int, default=30, help="as ever, and as many observed; default: 30")
    asked = parser.parse_args(arguments)
    if min(asked.steps, asked.batch_size, asked.image_size) < 1:
        parser.error("--steps, --batch-size and --image-size start at 1")
    flow = device_of(parser, asked.device)
    shape = (asked.batch_size, 3, asked.image_size, asked.image_size)
    try:
        cost = measure(flow, training_step(flow, asked.model, shape, asked.device), asked.device, asked.steps)
    except (ValueError, flow.OutOfMemoryError) as refused:
        parser.error(f"{asked.model} cannot be trained on images {list(shape)}: {refused}")
    print(f"{asked.model} {list(shape)} on {asked.device}: {text(cost)}")


if __name__ == "__main__":
    main()
