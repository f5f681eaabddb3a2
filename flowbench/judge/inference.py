"""Inference from few pairs: intervals of means, tests against a margin, the exact sign-flip test, Holm, binomial intervals."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowbench.judge.stats import CONFIDENCE, t_probability, t_quantile

# The sign-flip test sums over all 2^n flips by halves of at most 2^15 sums; with more values, neighbours are added up first.
_MOST_FLIPPED = 30


@dataclass(frozen=True)
class Mean:
    """The mean of `count` independent values, and half the width of its t interval of so many `degrees` of freedom.

    A single value has no degrees of freedom, and an infinite width.
    """

    mean: float
    half_width: float
    standard_error: float
    count: int
    degrees: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half_width


def mean_of(values: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """The mean of `values` with its t interval; ValueError where there are none or one is not finite."""
    _check(values)
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Mean(mean, math.inf, math.inf, 1, 0)
    error, degrees = statistics.stdev(values, mean) / math.sqrt(len(values)), len(values) - 1
    return Mean(mean, t_quantile(confidence, degrees) * error, error, len(values), degrees)


def difference_of(first: Sequence[float], second: Sequence[float], confidence: float = CONFIDENCE) -> Mean:
    """Mean of `second` - mean of `first`, for samples that were not taken in pairs (Welch's interval).

    Welch, "The generalization of 'Student's' problem when several different population variances are involved" (1947);
    the degrees of freedom are rounded down. `count` is that of the smaller sample.
    """
    one, two = mean_of(first, confidence), mean_of(second, confidence)
    count = min(one.count, two.count)
    if count == 1:
        return Mean(two.mean - one.mean, math.inf, math.inf, count, 0)
    squares = one.standard_error**2, two.standard_error**2
    error = math.sqrt(sum(squares))
    spread = squares[0] ** 2 / (one.count - 1) + squares[1] ** 2 / (two.count - 1)
    degrees = max(1, int(sum(squares) ** 2 / spread)) if spread > 0 else one.count + two.count - 2
    return Mean(two.mean - one.mean, t_quantile(confidence, degrees) * error, error, count, degrees)


def beyond(mean: Mean, margin: float) -> float:
    """The two-sided p of the t test that the true mean lies within ±`margin`: small where it lies beyond, on either side.

    At most 1 - confidence exactly where the interval lies wholly beyond the margin.
    """
    if mean.count < 2:
        return 1.0
    excess = abs(mean.mean) - margin
    if excess <= 0:
        return 1.0
    if mean.standard_error == 0:
        return 0.0
    return 1 - t_probability(excess / mean.standard_error, mean.degrees)


def sign_flip_p(values: Sequence[float]) -> float:
    """The exact two-sided p of the sign-flip test: how many of the 2^n choices of signs give a sum at least as far from 0.

    Values are taken as symmetric about 0 under the null hypothesis, and as nothing else (Fisher's randomisation test for
    pairs, "The Design of Experiments", 1935). Of more than 30 values, neighbours are added up, which keeps it exact.
    """
    _check(values)
    while len(values) > _MOST_FLIPPED:
        values = [math.fsum(values[index : index + 2]) for index in range(0, len(values), 2)]
    total = abs(math.fsum(values))
    slack = 1e-12 * math.fsum(map(abs, values))  # sums that are equal but for rounding are as far away
    half = len(values) // 2
    left, right = _signed_sums(values[:half]), sorted(_signed_sums(values[half:]))
    extreme = 0
    for one in left:
        upper = len(right) - bisect.bisect_left(right, total - slack - one)
        lower = bisect.bisect_right(right, -total + slack - one)
        extreme += min(len(right), upper + lower)
    return extreme / (len(left) * len(right))


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values adjusted for being several (Holm, "A simple sequentially rejective multiple test procedure", 1979)."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    adjusted = [1.0] * len(ps)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted


def binomial_interval(found: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a probability of which `found` of `trials` were seen (Clopper and Pearson, 1934)."""
    if not 0 <= found <= trials or trials < 1:
        raise ValueError(f"{found} of {trials} were given, expected at least one trial and no more found than tried")
    tail = (1 - confidence) / 2
    low = 0.0 if found == 0 else _solve(lambda p: 1 - _at_most(found - 1, trials, p), tail)
    high = 1.0 if found == trials else _solve(lambda p: -_at_most(found, trials, p), -tail)
    return low, high


def _solve(rising: Callable[[float], float], wanted: float) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < wanted:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _at_most(found: int, trials: int, p: float) -> float:
    return math.fsum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(found + 1))


def _signed_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [one + signed for one in sums for signed in (value, -value)]
    return sums


def _check(values: Sequence[float]) -> None:
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{list(values)[:5]} was given, expected at least one value, all finite")
