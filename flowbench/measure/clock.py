"""The clocks of steps: the device's own events where the engine has them, else the host's clock, device synchronised."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from flowbench.engine import Event, Training

# Events that lie on another stream than the work account for next to nothing of the time that passes. A host that was held up
# for a moment after the last event is no such case.
LEAST_COVERED = 0.5
HELD_UP_MS = 20.0


def time_step(training: Training, index: int) -> float:
    """Run step `index` and return its wall time in ms, device synchronised before and after."""
    training.synchronize()
    start = time.perf_counter_ns()
    training.step(index)
    training.synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def time_issue(training: Training, index: int) -> float:
    """Run step `index` and return the ms until the call that issued it returned.

    The device is idle before: where it lags behind, its queue of launches fills up, and the host's time is spent waiting there.
    """
    training.synchronize()
    start = time.perf_counter_ns()
    training.step(index)
    issued_ms = (time.perf_counter_ns() - start) / 1e6
    training.synchronize()
    return issued_ms


def time_by_events(
    training: Training, steps: Sequence[int], issued: Callable[[int], None] = lambda index: None
) -> list[float]:
    """Run `steps` one after the other as in training, where nothing waits for a step's end; their times on the device in ms.

    But the host runs no more than one step ahead, so that a failure is found in its step. `issued` is called after each step.
    Raises RuntimeError where the events do not account for the time, or a time of theirs is not finite.
    """
    training.synchronize()
    events = [_event(training)]
    began = time.perf_counter_ns()
    for index in steps:
        if len(events) > 1:
            events[-2].synchronize()
        training.step(index)
        events.append(_event(training))
        issued(index)
    training.synchronize()
    passed_ms = (time.perf_counter_ns() - began) / 1e6
    times_ms = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    for index, time_ms in zip(steps, times_ms, strict=True):
        if not math.isfinite(time_ms):
            raise RuntimeError(f"the device's events give {time_ms} ms for step {index}: they tell no time")
    if sum(times_ms) < LEAST_COVERED * (passed_ms - HELD_UP_MS):
        raise RuntimeError(
            f"the device's events account for {sum(times_ms):.1f} of {passed_ms:.1f} ms: they do not enclose the steps' work"
        )
    return times_ms


def _event(training: Training) -> Event:
    event = training.event()
    if event is None:
        raise RuntimeError("the engine gave no event where it had given one before")
    return event
