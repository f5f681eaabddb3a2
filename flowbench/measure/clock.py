"""The clocks of steps: the device's own events where the engine has them, else the host's clock, device synchronised."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flowbench.engine import Event, Training

# Events that lie on another stream than the work account for next to nothing of the time that passes.
LEAST_COVERED = 0.8


@dataclass(frozen=True)
class EventTimes:
    """Times in ms of consecutive steps: between events on the device, and until the call that issued the step returned."""

    steps_ms: list[float]
    host_ms: list[float]


def time_step(training: Training, index: int) -> float:
    """Run step `index` and return its wall time in ms, device synchronised before and after."""
    training.synchronize()
    start = time.perf_counter_ns()
    training.step(index)
    training.synchronize()
    return (time.perf_counter_ns() - start) / 1e6


def time_by_events(
    training: Training, first: int, count: int, issued: Callable[[int], None] = lambda index: None
) -> EventTimes:
    """Run `count` steps from `first` on, one after the other as in training: nothing waits for a step to be done.

    But the host runs no more than one step ahead: with more, its own time would be spent waiting in a full queue of
    launches. `issued` is called after each step. Raises RuntimeError where the events do not account for the time.
    """
    training.synchronize()
    events = [_event(training)]
    host_ms = []
    began = time.perf_counter_ns()
    for index in range(first, first + count):
        if len(events) > 1:
            events[-2].synchronize()
        start = time.perf_counter_ns()
        training.step(index)
        host_ms.append((time.perf_counter_ns() - start) / 1e6)
        events.append(_event(training))
        issued(index)
    training.synchronize()
    passed_ms = (time.perf_counter_ns() - began) / 1e6
    steps_ms = [events[index].elapsed_time(events[index + 1]) for index in range(count)]
    if sum(steps_ms) < LEAST_COVERED * passed_ms:
        raise RuntimeError(
            f"the device's events account for {sum(steps_ms):.1f} of {passed_ms:.1f} ms: they do not enclose the steps' work"
        )
    return EventTimes(steps_ms, host_ms)


def _event(training: Training) -> Event:
    event = training.event()
    if event is None:
        raise RuntimeError("the engine gave no event where it had given one before")
    return event
