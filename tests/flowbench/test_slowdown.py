"""A known slowdown: on a CPU the host is busy for its share of each step, on a GPU the device for that of a warm-up step."""

from __future__ import annotations

from typing import cast

import pytest

from flowbench.engine import Event, Training
from flowbench.measure import slowdown
from flowbench.measure.slowdown import slow_down


class Clock:
    """In place of the module `time`: each look at it takes a microsecond, a step as long as it says."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(slowdown, "time", clock := Clock())
    return clock


class OnHost(Training):
    """Half of a step's time passes before it returns, half until it is synchronised."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.half_ms, self.steps = clock, 5.0, []

    def step(self, index: int) -> None:
        self.steps.append(index)
        self.clock.now_ns += round(self.half_ms * 1e6)

    def synchronize(self) -> None:
        self.clock.now_ns += round(self.half_ms * 1e6)

    def loss(self) -> float:
        return 0.0


class OnDevice(OnHost):
    """A training with events, which notes how long the device was asked to spin behind each step."""

    can_spin = True

    def event(self) -> Event:
        return cast(Event, object())

    def spin(self, milliseconds: float) -> bool:
        self.steps.append(milliseconds)
        return self.can_spin


@pytest.mark.parametrize("fraction", [0.02, 0.5])
def test_the_host_is_busy_for_a_share_of_what_this_step_has_taken(clock: Clock, fraction: float) -> None:
    training = OnHost(clock)
    slow_down(training, fraction, ())
    for index, half_ms in enumerate((5.0, 20.0)):
        training.half_ms, began_ns = half_ms, clock.now_ns
        training.step(index)
        assert (clock.now_ns - began_ns) / 1e6 == pytest.approx(2 * half_ms * (1 + fraction), abs=0.02)
    assert training.steps == [0, 1]


def test_the_device_spins_behind_each_step_for_a_share_of_the_later_warm_up(clock: Clock) -> None:
    training = OnDevice(clock)
    slow_down(training, 0.02, (900.0, 500.0, 100.0, 104.0, 102.0))
    began_ns = clock.now_ns
    training.step(7)
    training.step(8)
    assert training.steps == [7, pytest.approx(2.04), 8, pytest.approx(2.04)]
    assert (clock.now_ns - began_ns) / 1e6 == 2 * training.half_ms, "the host waits for nothing"


def test_what_cannot_be_slowed_down_is_said(clock: Clock) -> None:
    with pytest.raises(ValueError, match="without warm-up, expected at least one warm-up step"):
        slow_down(OnDevice(clock), 0.02, ())
    training = OnDevice(clock)
    training.can_spin = False
    slow_down(training, 0.02, (100.0,))
    with pytest.raises(RuntimeError, match="cannot keep its device busy"):
        training.step(0)
