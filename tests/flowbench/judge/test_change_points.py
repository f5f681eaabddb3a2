"""Where a level shifts: found where it does, not where there is only noise; with series of one cell on one machine."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from flowbench.errors import FlowbenchError
from flowbench.judge.change_points import level_shifts, unavailable
from flowbench.judge.series import Series, SeriesPoint, chosen, measured_series, with_shifts
from flowbench.record.points import Point

pytest.importorskip("ruptures")


def noisy(levels: list[float], length: int, seed: int, noise: float = 0.01) -> list[float]:
    draw = np.random.default_rng(seed)
    return [level * float(np.exp(draw.normal(0, noise))) for level in levels for _ in range(length)]


def test_a_shift_is_found_where_it_is() -> None:
    found = level_shifts(noisy([100.0, 108.0, 95.0], 15, seed=1), 0.01)
    assert [index for index, _, _ in found] == [15, 30]
    assert [round(before) for _, before, _ in found] == [100, 108]
    assert found[1][2] == pytest.approx(95, rel=0.01)


def test_figures_that_repeat_shift_by_what_counts_alone() -> None:
    assert level_shifts([100.0] * 8, 0.01) == []
    assert level_shifts([100.0] * 4 + [100.5] * 4, 0.01) == []
    assert level_shifts([100.0] * 4 + [102.0] * 4, 0.01) == [(4, 100.0, 102.0)]
    assert level_shifts([100.0, 102.0, 102.0], 0.01) == []  # too few to tell
    assert level_shifts([100.0] * 6 + [150.0] + [100.0] * 6, 0.01) == []  # one odd run


@pytest.mark.parametrize(
    ("quantity", "after", "shifts"),
    [("step time", 1.009, 0), ("step time", 1.011, 1), ("peak resident", 1.0045, 0), ("peak resident", 1.0055, 1)],
)
def test_times_shift_by_a_hundredth_and_memory_by_half_of_that(quantity: str, after: float, shifts: int) -> None:
    points = []
    for index in range(12):
        level = 1.0 if index < 6 else after
        time_ms = 100.0 * (level if quantity == "step time" else 1.0)
        peaks = {"peak resident": round(10**9 * (level if quantity != "step time" else 1.0))}
        points.append(SeriesPoint("d", "r", None, False, "ok", time_ms, time_ms, time_ms, None, peaks))
    found = with_shifts(Series("toy/linear", "linear [2] toy", "box", False, tuple(points))).shifts
    assert [(shift.index, shift.quantity) for shift in found] == [(6, quantity)] * shifts


def test_noise_alone_rarely_shifts() -> None:
    alarms = sum(bool(level_shifts(noisy([100.0], 25, seed), 0.01)) for seed in range(60))
    assert alarms <= 3


def test_scaling_changes_nothing() -> None:
    values = noisy([100.0, 108.0], 12, seed=3)
    scaled = level_shifts([7.5 * value for value in values], 0.01)
    assert [index for index, _, _ in scaled] == [index for index, _, _ in level_shifts(values, 0.01)]


def test_without_ruptures_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = unavailable()
    assert reason is not None
    assert "pip install 'flowbench[history]'" in reason
    with pytest.raises(FlowbenchError, match="no change points: ruptures is not installed"):
        level_shifts([1.0] * 9, 0.01)


def point(number: int, time_ms: float | None, machine: str = "box #1", peak: int = 2**20) -> Point:
    status = "ok" if time_ms else "failed"
    peaks = {"peak resident": peak} if time_ms else {}
    times = (time_ms, time_ms, time_ms)
    return Point(
        f"run-{number}", f"2026-11-{number + 1:02}", "0" * 40, False, machine, "toy/linear", "linear [2] toy", status,
        3 if time_ms else 0, *times, None, None, None, peaks,
    )  # fmt: skip


def test_series_are_of_one_cell_on_one_machine_and_failures_are_points_without_a_time() -> None:
    points = [point(number, None if number == 2 else 10.0 if number < 6 else 12.0) for number in range(12)]
    one, other = measured_series([*points, point(20, 10.0, "box #2")])
    assert (one.machine, len(one.points), one.points[2].status) == ("box #1", 12, "failed")
    assert (other.machine, len(other.points)) == ("box #2", 1)
    (shift,) = with_shifts(one).shifts
    assert (shift.index, shift.quantity, shift.before, shift.after) == (6, "step time", 10.0, 12.0)
    assert shift.ratio == pytest.approx(1.2)


def test_memory_shifts_too() -> None:
    points = [point(number, 10.0, peak=1000 if number < 4 else 1010) for number in range(8)]
    (shift,) = with_shifts(measured_series(points)[0]).shifts
    assert (shift.index, shift.quantity, shift.before, shift.after) == (4, "peak resident", 1000, 1010)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("linear [2]", True),
        ("TOY", True),
        ("linear*", True),
        ("toy*", True),
        ("resnet", False),
        ("lin?ar", False),
        (None, True),
    ],
)
def test_cells_are_chosen_by_pattern(pattern: str | None, fits: bool) -> None:
    series = Series(
        "toy/linear", "linear [2] toy", "box", False, (SeriesPoint("d", "r", None, False, "ok", 1.0, 1.0, 1.0, None),)
    )
    assert bool(chosen([series], pattern, None)) == fits
