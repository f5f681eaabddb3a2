"""Inference: known values, and what may not change a result."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowbench.judge import inference
from flowbench.judge.stats import t_probability, t_quantile

VALUES = st.lists(st.floats(min_value=-1, max_value=1), min_size=2, max_size=9)


def test_known_intervals() -> None:
    mean = inference.mean_of([0.01, 0.03, 0.02])
    assert (mean.mean, mean.count) == (pytest.approx(0.02), 3)
    assert mean.half_width == pytest.approx(4.302652730 * 0.01 / math.sqrt(3))
    assert inference.mean_of([0.5]).half_width == math.inf
    welch = inference.difference_of([0.0, 0.02], [0.10, 0.10, 0.13])
    error = math.sqrt(0.0002 / 2 + 0.0003 / 3)
    assert welch.mean == pytest.approx(0.10)
    assert welch.half_width == pytest.approx(t_quantile(0.95, 2) * error)  # Welch's 2.66 degrees, rounded down
    unlike = inference.difference_of([0.0, 0.1, 0.2, 0.3], [0.5, 0.501, 0.502])
    assert unlike.degrees == 3, "nearly all of the error is the first sample's"
    assert inference.difference_of([0.5, 0.501, 0.502], [0.0, 0.1, 0.2, 0.3]).degrees == 3
    assert inference.difference_of([0.5] * 3, [0.6] * 4).degrees == 5


@pytest.mark.parametrize(("confidence", "degrees"), [(0.95, 1), (0.95, 9), (0.5, 4), (0.999, 30)])
def test_the_probability_is_the_inverse_of_the_quantile(confidence: float, degrees: int) -> None:
    assert t_probability(t_quantile(confidence, degrees), degrees) == pytest.approx(confidence)


@given(VALUES, VALUES)
def test_p_is_small_where_the_interval_lies_beyond(values: list[float], others: list[float]) -> None:
    for mean in (inference.mean_of(values), inference.difference_of(values, others)):
        p = inference.beyond(mean, 0.01)
        wholly = mean.low > 0.01 or mean.high < -0.01
        if abs(p - 0.05) > 1e-9:
            assert (p < 0.05) == wholly
    assert inference.beyond(inference.mean_of([5.0]), 0.01) == 1


@given(VALUES)
def test_the_sign_flip_test_counts_all_flips(values: list[float]) -> None:
    total = abs(math.fsum(values))
    flips = [
        abs(math.fsum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    slack = 1e-12 * math.fsum(map(abs, values))
    least, most = (sum(flip >= total - k * slack for flip in flips) / len(flips) for k in (0, 2))
    assert least <= inference.sign_flip_p(values) <= most
    assert inference.sign_flip_p([-value for value in values]) == inference.sign_flip_p(values)


def test_the_sign_flip_test_of_many_pairs() -> None:
    assert inference.sign_flip_p([1.0] * 6) == 2 / 64
    assert inference.sign_flip_p([1.0, 1.1] * 30) == 2 / 2**30
    assert inference.sign_flip_p([1.0, -1.0] * 30) == 1


def test_holm() -> None:
    assert inference.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert inference.holm([]) == []
    assert inference.holm([0.9, 0.8]) == [1, 1]


def test_binomial_intervals() -> None:
    assert inference.binomial_interval(0, 60) == (0, pytest.approx(0.05962949))
    assert inference.binomial_interval(1, 60) == (pytest.approx(0.00042187, rel=1e-3), pytest.approx(0.08940, rel=1e-3))
    assert inference.binomial_interval(5, 5)[1] == 1
    with pytest.raises(ValueError, match="at least one trial"):
        inference.binomial_interval(0, 0)
