"""The clocks of steps, on a device that is simulated step by step: what they measure, and what they refuse."""

from __future__ import annotations

import pytest

from flowbench.engine import Training
from flowbench.measure import clock


class Device:
    """A device with a queue and a host with a clock, both in ms of their own: nothing here takes real time."""

    def __init__(self, host_ms: float, device_ms: float) -> None:
        self.host_ms, self.device_ms = host_ms, device_ms
        self.now_ms = 100.0
        self.done_ms = 0.0
        self.most_ahead = 0
        self.steps: list[float] = []

    def perf_counter_ns(self) -> int:
        return round(self.now_ms * 1e6)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_ms = device, max(device.done_ms, device.now_ms)

    def synchronize(self) -> None:
        self.device.now_ms = max(self.device.now_ms, self.at_ms)

    def elapsed_time(self, end: Event, /) -> float:
        return end.at_ms - self.at_ms


class Simulated(Training):
    device = "cuda:0"

    def __init__(self, device: Device) -> None:
        self.simulated = device

    def step(self, index: int) -> None:
        device = self.simulated
        device.most_ahead = max(device.most_ahead, sum(done > device.now_ms for done in device.steps))
        begun_ms = max(device.done_ms, device.now_ms)
        device.now_ms += device.host_ms
        device.done_ms = max(begun_ms + device.device_ms, device.now_ms)
        device.steps.append(device.done_ms)

    def loss(self) -> float:
        return 1.0

    def synchronize(self) -> None:
        self.simulated.now_ms = max(self.simulated.now_ms, self.simulated.done_ms)

    def event(self) -> Event:
        return Event(self.simulated)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch):
    def make(host_ms: float, device_ms: float) -> Simulated:
        device = Device(host_ms, device_ms)
        monkeypatch.setattr(clock, "time", device)
        return Simulated(device)

    return make


def test_the_host_is_timed_until_the_step_is_issued_and_the_device_until_it_is_done(simulate) -> None:
    training = simulate(host_ms=3, device_ms=8)
    assert clock.time_by_events(training, range(5)) == pytest.approx([8] * 5)
    assert [clock.time_issue(training, index) for index in range(3)] == pytest.approx([3] * 3)


def test_a_device_that_waits_for_the_host_takes_as_long_as_the_host(simulate) -> None:
    assert clock.time_by_events(simulate(host_ms=10, device_ms=8), range(5)) == pytest.approx([10] * 5)


def test_the_host_runs_one_step_ahead_and_no_more(simulate) -> None:
    training = simulate(host_ms=1, device_ms=50)
    clock.time_by_events(training, range(10))
    assert training.simulated.most_ahead == 1


def test_what_is_between_the_steps_is_told_which_step_was_issued(simulate) -> None:
    issued: list[int] = []
    clock.time_by_events(simulate(host_ms=1, device_ms=2), range(3, 7), issued.append)
    assert issued == [3, 4, 5, 6]


def test_events_that_do_not_enclose_the_work_are_refused(simulate) -> None:
    training = simulate(host_ms=1, device_ms=50)
    training.event = lambda: type("Elsewhere", (Event,), {"elapsed_time": lambda *_: 0.01})(training.simulated)
    with pytest.raises(RuntimeError, match=r"account for 0\.1 of 500\.0 ms: they do not enclose the steps' work"):
        clock.time_by_events(training, range(10))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_events_that_tell_no_time_are_refused_with_the_step(wrong: float, simulate) -> None:
    training = simulate(host_ms=1, device_ms=50)
    times = iter([50.0, wrong, 50.0])
    training.event = lambda: type("Odd", (Event,), {"elapsed_time": lambda *_: next(times)})(training.simulated)
    with pytest.raises(RuntimeError, match=rf"the device's events give {wrong} ms for step 8: they tell no time"):
        clock.time_by_events(training, range(7, 10))


def test_a_host_that_is_held_up_after_a_short_step_is_no_fault_of_the_events(simulate) -> None:
    training = simulate(host_ms=0.1, device_ms=0.2)
    late = training.synchronize

    def synchronize() -> None:
        late()
        training.simulated.now_ms += 15

    training.synchronize = synchronize
    assert clock.time_by_events(training, [0]) == pytest.approx([0.2])


def test_without_events_a_step_is_timed_by_the_host_with_the_device_synchronised(simulate) -> None:
    assert clock.time_step(simulate(host_ms=1, device_ms=50), 0) == pytest.approx(50)
