"""The clock of a step: from its start until the device has done its work."""

from __future__ import annotations

import time

from flowbench.engine import Training


def time_step(training: Training, index: int) -> float:
    """Run step `index` and return its wall time in ms, device synchronised before and after."""
    training.synchronize()
    start = time.perf_counter_ns()
    training.step(index)
    training.synchronize()
    return (time.perf_counter_ns() - start) / 1e6
