"""What many sittings of one commit against itself tell: false alarms, the noise in them, which changes would be found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flowbench.judge.inference import binomial_interval, mean_of
from flowbench.judge.stats import t_quantile
from flowbench.judge.times import Evidence, judge_times
from flowbench.judge.verdict import Verdict

# The shares of sittings that the noise floor and the shift of a sitting, and the smallest change found, speak of.
COVERED = 0.95
FOUND = 0.9

# Of fewer sittings, shares of 90 and 95 % say nothing: a machine's noise floor takes so many.
LEAST_SITTINGS = 10


@dataclass(frozen=True)
class Rate:
    """How many of some sittings came to something, with the exact 95 % interval of the probability."""

    count: int
    sittings: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """count / sittings."""
        return self.count / self.sittings


def rate_of(verdicts: Sequence[Verdict], wanted: Sequence[Verdict]) -> Rate:
    """How often a wanted verdict was given; ValueError where there is no verdict at all."""
    count = sum(verdict in wanted for verdict in verdicts)
    return Rate(count, len(verdicts), *binomial_interval(count, len(verdicts)))


def verdicts_of(sittings: Sequence[Evidence]) -> list[Verdict]:
    """The verdict of each sitting, judged by itself: a sitting of `flowbench aa` has one cell."""
    return [judge_times([sitting])[0].verdict for sitting in sittings]


def noise_floor(sittings: Sequence[Evidence]) -> float:
    """The change, as a fraction, that 95 % of these sittings of one commit against itself stay below (or the largest seen)."""
    changes = sorted(abs(mean_of((*sitting.sampling, *sitting.confirming)).mean) for sitting in sittings)
    return math.expm1(changes[math.ceil(COVERED * len(changes)) - 1])


def sitting_shift(sittings: Sequence[Evidence]) -> float:
    """How far, as a fraction, all pairs of a sitting are off together, which its own interval does not tell: 95 % by less.

    The variance of the shift is what the squares of the sittings' means have, on average, beyond their squared standard errors
    (method of moments about 0, since nothing was changed; not below 0). The shift is taken as normal, its variance as known
    from so many sittings, hence Student's t. Of the sampling alone: what confirms was measured only where that looked
    changed, and would draw its mean towards 0.
    """
    means = [mean_of(sitting.sampling) for sitting in sittings]
    variance = statistics.fmean(one.mean**2 for one in means) - statistics.fmean(one.standard_error**2 for one in means)
    return math.expm1(t_quantile(COVERED, len(sittings)) * math.sqrt(max(0.0, variance)))


def smallest_found(sittings: Sequence[Evidence]) -> float:
    """The smallest slowdown, as a fraction, whose interval would have lain beyond the margin in 90 % of the sittings.

    Taken from the width of each sitting's own interval, about a true change; the confirmation is not counted in.
    """
    needed = sorted(
        math.log1p(sitting.margin) + mean_of(sitting.sampling).half_width - mean_of(sitting.sampling).mean
        for sitting in sittings
    )
    return math.expm1(needed[math.ceil(FOUND * len(needed)) - 1])


def pair_spread(sittings: Sequence[Evidence]) -> float:
    """The median over the sittings of the standard deviation from pair to pair, in logarithms (about: as a fraction)."""
    return statistics.median(statistics.stdev(sitting.sampling) for sitting in sittings)
