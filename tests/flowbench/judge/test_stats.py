"""Statistics of pairs: known values, what is refused, and what may not change a result."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowbench.judge import stats

TIMES = st.floats(min_value=1e-3, max_value=1e6)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12)


def ratio_of(pairs: list[tuple[float, float]]) -> stats.Ratio:
    return stats.paired_ratio([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def test_a_known_ratio() -> None:
    ratio = ratio_of([(20.0, 10.0), (30.0, 10.0)])
    assert ratio.pairs == 2
    assert ratio.geometric_mean == pytest.approx(math.sqrt(6))
    assert (ratio.lowest, ratio.highest) == (pytest.approx(2), pytest.approx(3))
    half = 12.7062047 * (math.log(3) - math.log(2)) / math.sqrt(2) / math.sqrt(2)
    assert ratio.interval == (
        pytest.approx(math.sqrt(6) * math.exp(-half)),
        pytest.approx(math.sqrt(6) * math.exp(half)),
    )


def test_one_pair_has_no_interval() -> None:
    assert ratio_of([(20.0, 10.0)]).interval is None


def test_an_interval_says_something_where_its_ends_are_within_a_factor_of_two() -> None:
    assert [stats.is_telling(*ends) for ends in ((1.5, 3.0), (1.5, 3.01), (0.5, 1.0), (0.5, 1.01))] == [True, False] * 2


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [(0.95, 1, 12.706204736), (0.95, 2, 4.302652730), (0.95, 5, 2.570581836), (0.99, 9, 3.249835544), (0.9, 30, 1.697260887),
     (0.95, 101, 1.983731003)],
)  # fmt: skip
def test_t_quantiles(confidence: float, degrees: int, expected: float) -> None:
    assert stats.t_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_times_that_are_none_are_refused(bad: float) -> None:
    for call in (
        lambda: stats.paired_ratio([1.0, bad], [1.0, 1.0]),
        lambda: stats.paired_ratio([1.0, 1.0], [bad, 1.0]),
        lambda: stats.process_median([1.0, bad, 2.0]),
        lambda: stats.geometric_mean([1.0, bad]),
    ):
        with pytest.raises(ValueError, match="positive finite"):
            call()


def test_sides_that_do_not_match_are_refused() -> None:
    for reference, subject in (([1.0], []), ([], []), ([1.0, 2.0], [1.0])):
        with pytest.raises(ValueError, match="matched pairs"):
            stats.paired_ratio(reference, subject)
    with pytest.raises(ValueError, match="at least one"):
        stats.process_median([])
    with pytest.raises(ValueError, match="at least one"):
        stats.geometric_mean([])


@given(PAIRS, st.floats(min_value=1e-2, max_value=1e2))
def test_scaling_both_sides_changes_nothing(pairs: list[tuple[float, float]], factor: float) -> None:
    ratio, scaled = ratio_of(pairs), ratio_of([(factor * reference, factor * subject) for reference, subject in pairs])
    assert scaled.log_ratios == pytest.approx(ratio.log_ratios, abs=1e-9)
    assert scaled.geometric_mean == pytest.approx(ratio.geometric_mean, rel=1e-9)


@given(PAIRS)
def test_swapping_sides_mirrors(pairs: list[tuple[float, float]]) -> None:
    ratio, mirrored = ratio_of(pairs), ratio_of([(subject, reference) for reference, subject in pairs])
    assert mirrored.geometric_mean == pytest.approx(1 / ratio.geometric_mean, rel=1e-9)
    assert mirrored.lowest == pytest.approx(1 / ratio.highest, rel=1e-9)
    if ratio.interval and mirrored.interval and ratio.interval[0] > 1e-250 and ratio.interval[1] < 1e250:
        assert mirrored.interval[0] == pytest.approx(1 / ratio.interval[1], rel=1e-6)


@given(PAIRS)
def test_the_mean_lies_within_the_spread(pairs: list[tuple[float, float]]) -> None:
    ratio = ratio_of(pairs)
    assert ratio.lowest * (1 - 1e-9) <= ratio.geometric_mean <= ratio.highest * (1 + 1e-9)
