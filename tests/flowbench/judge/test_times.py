"""Verdicts on times: each verdict, and the properties that hold for any pairs."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flowbench.judge.inference import mean_of
from flowbench.judge.times import Evidence, is_precise, judge_times, pair_log_ratio, percent, typical_log
from flowbench.judge.verdict import Verdict

MIRRORED = {Verdict.SLOWER: Verdict.FASTER, Verdict.FASTER: Verdict.SLOWER}
TIMES = st.lists(st.floats(min_value=0.01, max_value=1e4), min_size=1, max_size=8)
RATIOS = st.lists(st.floats(min_value=-0.2, max_value=0.2), min_size=2, max_size=10)
NOISE = (0.004, -0.003, 0.001, -0.004, 0.003, -0.001)


def evidence(change: float, again: float | None = None, margin: float = 0.01, noise: float = 1.0) -> Evidence:
    """Six pairs of a change in logarithms, and six more of another where there is one."""
    confirming = () if again is None else tuple(again + noise * one for one in NOISE)
    return Evidence(tuple(change + noise * one for one in NOISE), confirming, margin)


@pytest.mark.parametrize(
    ("cell", "verdict", "said"),
    [
        (evidence(0.05, 0.05), Verdict.SLOWER, "6 new pairs confirm it"),
        (evidence(-0.05, -0.05), Verdict.FASTER, "6 new pairs confirm it"),
        (evidence(0.05), Verdict.UNCLEAR, "no new pairs were measured"),
        (evidence(0.05, 0.0), Verdict.UNCLEAR, "do not confirm it"),
        (evidence(0.05, -0.05), Verdict.UNCLEAR, "do not confirm it"),
        (evidence(0.05, 0.008), Verdict.UNCLEAR, "do not confirm it"),  # for certain above 0, and within the margin
        (evidence(0.05, 0.05, margin=0.06), Verdict.SAME, "within ±6 %"),
        (evidence(0.0), Verdict.SAME, "within ±1 %"),
        (evidence(0.0, noise=10), Verdict.UNCLEAR, "neither lies within"),
        (Evidence((0.05,), (), 0.01), Verdict.UNCLEAR, "one pair"),
        (Evidence((0.05, 0.051, 0.049, 0.05), (0.05, 0.05), 0.01), Verdict.UNCLEAR, "sign-flip"),
    ],
)
def test_each_verdict(cell: Evidence, verdict: Verdict, said: str) -> None:
    (judgement,) = judge_times([cell])
    assert judgement.verdict is verdict
    assert said in judgement.reason


@pytest.mark.parametrize(("errors", "confirmed"), [(2.1, True), (1.9, False)])
def test_new_pairs_confirm_one_sided(errors: float, confirmed: bool) -> None:
    # t of 5 degrees of freedom: 2.015 leaves 5 % on one side, 2.571 on both.
    error = mean_of([10 * one for one in NOISE]).standard_error
    again = tuple(errors * error + 10 * one for one in NOISE)
    for sign, verdict in ((1, Verdict.SLOWER), (-1, Verdict.FASTER)):
        sampling = tuple(sign * (0.05 + one) for one in NOISE)
        (judgement,) = judge_times([Evidence(sampling, tuple(sign * one for one in again), 0.01)])
        assert judgement.confirmed is confirmed
        assert judgement.verdict is (verdict if confirmed else Verdict.UNCLEAR)


def test_among_many_cells_one_may_look_slower_by_chance() -> None:
    cell = evidence(0.0142, 0.0142)
    assert judge_times([cell])[0].verdict is Verdict.SLOWER
    many = judge_times([cell, *[evidence(0.0)] * 9])
    assert many[0].verdict is Verdict.UNCLEAR
    assert "Holm" in many[0].reason
    assert judge_times([evidence(0.05, 0.05)] * 9 + [evidence(0.0)])[0].verdict is Verdict.SLOWER


def test_sampling_ends_on_precision_alone() -> None:
    assert is_precise([0.0, 0.001] * 3, 0.01)
    assert is_precise([0.5, 0.501] * 3, 0.01)
    assert not is_precise([0.0, 0.001] * 2, 0.01)  # too few, however alike
    assert not is_precise([0.0, 0.03] * 3, 0.01)


def test_the_faster_half_of_the_steps_counts() -> None:
    assert typical_log([1.0, 1.0, 100.0, 50.0]) == 0
    assert typical_log([2.0]) == pytest.approx(math.log(2))
    assert pair_log_ratio([1.0, 1.0, 9.0], [1.1, 1.1, 1.1]) == pytest.approx(math.log(1.1))
    for bad in ([], [1.0, math.nan], [1.0, 0.0]):
        with pytest.raises(ValueError, match=r"positive finite|at least one"):
            typical_log(bad)


@given(TIMES, TIMES, st.floats(min_value=1e-2, max_value=1e2))
def test_scaling_both_sides_changes_nothing(base: list[float], head: list[float], factor: float) -> None:
    scaled = pair_log_ratio([factor * time for time in base], [factor * time for time in head])
    assert scaled == pytest.approx(pair_log_ratio(base, head), abs=1e-9)


@given(RATIOS, RATIOS)
def test_swapping_sides_mirrors_the_verdict(sampling: list[float], confirming: list[float]) -> None:
    (one,) = judge_times([Evidence(tuple(sampling), tuple(confirming), 0.01)])
    (two,) = judge_times([Evidence(tuple(-r for r in sampling), tuple(-r for r in confirming), 0.01)])
    assert two.verdict is MIRRORED.get(one.verdict, one.verdict)
    assert two.mean.mean == -one.mean.mean
    assert (two.p, two.sign_flip_p, two.confirmed) == (one.p, one.sign_flip_p, one.confirmed)


@given(RATIOS, st.integers(min_value=2, max_value=4))
def test_more_identical_pairs_never_widen_the_interval(ratios: list[float], times: int) -> None:
    assert mean_of(ratios * times).half_width <= mean_of(ratios).half_width * (1 + 1e-9) + 1e-15


@given(RATIOS, st.integers(min_value=1, max_value=5))
def test_pairs_at_the_mean_never_widen_the_interval(ratios: list[float], more: int) -> None:
    mean = mean_of(ratios)
    assume(mean.half_width > 1e-9)
    assert mean_of([*ratios, *[mean.mean] * more]).half_width <= mean.half_width * (1 + 1e-9)


def test_percentages_have_the_digits_that_matter() -> None:
    fractions = (0.00354, 0.01, 0.0213, 0.099, 0.104, 1.3, 12.34)
    assert list(map(percent, fractions)) == ["0.35 %", "1 %", "2.1 %", "9.9 %", "10 %", "130 %", "1234 %"]
