"""A known slowdown, put into every timed step: by it `flowbench aa` learns which changes would have been found."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from flowbench.engine import Training


def slow_down(training: Training, fraction: float, warmup_ms: Sequence[float]) -> None:
    """Make each step of `training` take longer by `fraction` of itself.

    On a CPU the host is kept busy for this fraction of what the step has just taken. On a GPU the device is, by a kernel that
    spins for the fraction of the median warm-up step (its later half); where the device waits for the host, that shows less.
    Raises ValueError where there is no warm-up step to tell how long one takes.
    """
    run_step = training.step
    if training.event() is not None:
        if not warmup_ms:
            raise ValueError("a slowdown on a GPU was asked for without warm-up, expected at least one warm-up step")
        spin_ms = fraction * statistics.median(warmup_ms[len(warmup_ms) // 2 :])

        def step(index: int) -> None:
            run_step(index)
            if not training.spin(spin_ms):
                raise RuntimeError("the engine cannot keep its device busy: --slowdown measures it on the CPU alone")

    else:

        def step(index: int) -> None:
            start = time.perf_counter_ns()
            run_step(index)
            training.synchronize()
            until = start + (time.perf_counter_ns() - start) * (1 + fraction)
            while time.perf_counter_ns() < until:
                pass

    training.step = step  # type: ignore[method-assign]
