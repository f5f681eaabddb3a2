"""Is head slower than base? Judges one cell's step times from the log-ratios of its pairs, and several cells together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flowbench.judge.inference import Mean, beyond, holm, mean_of, sign_flip_p
from flowbench.judge.stats import CONFIDENCE, positive
from flowbench.judge.verdict import Verdict

LEAST_MARGIN = 0.01
LEAST_PAIRS = 6
LEVEL = 1 - CONFIDENCE

# The sign-flip test only checks the t test, which assumes more; of five pairs its p is 0.06 at least.
CHECK_LEVEL = 0.1


@dataclass(frozen=True)
class Evidence:
    """The log-ratios head / base of one cell: one per pair of fresh processes; those of `confirming` came later.

    `margin` is the change that does not count, as a fraction.
    """

    sampling: tuple[float, ...]
    confirming: tuple[float, ...]
    margin: float


@dataclass(frozen=True)
class Judgement:
    """What the evidence of one cell says. `mean` is of all pairs, in logarithms; `p`, `sign_flip_p` of the sampling."""

    verdict: Verdict
    reason: str
    mean: Mean
    p: float
    adjusted_p: float
    sign_flip_p: float
    confirmed: bool | None


def pair_log_ratio(base_ms: Sequence[float], head_ms: Sequence[float]) -> float:
    """log(head / base) of one pair of process groups, from their steps' times: each side's faster half, in the mean."""
    return typical_log(head_ms) - typical_log(base_ms)


def typical_log(steps_ms: Sequence[float]) -> float:
    """The mean logarithm of the faster half of the steps; ValueError where a time is not positive and finite, or there is none.

    Whatever else runs on a machine makes steps longer, never shorter: on a busy one the faster half differs from process
    to process half as much as the median does. What slows fewer than half of the steps shows in neither.
    """
    logs = sorted(math.log(positive(time)) for time in steps_ms)
    if not logs:
        raise ValueError("no step times were given, expected at least one")
    return statistics.fmean(logs[: (len(logs) + 1) // 2])


def is_precise(log_ratios: Sequence[float], margin: float, least_pairs: int = LEAST_PAIRS) -> bool:
    """Whether sampling may end: the interval is as narrow as the margin on each side, whatever it says."""
    return len(log_ratios) >= least_pairs and mean_of(log_ratios).half_width <= math.log1p(margin) / 2


def judge_times(cells: Sequence[Evidence]) -> list[Judgement]:
    """The judgement of each cell, Holm-adjusted over all; ValueError where a cell has no pair.

    `slower` and `faster`: the interval lies wholly beyond the margin, after the adjustment; the sign-flip test, which assumes
    less, does not disagree; and the confirming pairs alone show a change that way too. `same`: the interval lies wholly within
    the margin.
    """
    means = [mean_of(cell.sampling) for cell in cells]
    ps = [beyond(mean, math.log1p(cell.margin)) for mean, cell in zip(means, cells, strict=True)]
    return [
        _judge(cell, mean, p, adjusted, len(cells))
        for cell, mean, p, adjusted in zip(cells, means, ps, holm(ps), strict=True)
    ]


def _judge(cell: Evidence, mean: Mean, p: float, adjusted: float, cells: int) -> Judgement:
    margin, flips = math.log1p(cell.margin), sign_flip_p(cell.sampling)
    everything = mean_of((*cell.sampling, *cell.confirming))
    direction = Verdict.SLOWER if mean.mean > 0 else Verdict.FASTER

    def so(verdict: Verdict, reason: str, confirmed: bool | None = None) -> Judgement:
        return Judgement(verdict, reason, everything, p, adjusted, flips, confirmed)

    if mean.count < 2:
        return so(Verdict.UNCLEAR, "one pair has no spread to judge it by")
    if p > LEVEL:
        if -margin <= everything.low and everything.high <= margin:
            return so(Verdict.SAME, f"the interval lies within ±{percent(cell.margin)}")
        return so(Verdict.UNCLEAR, f"the interval neither lies within ±{percent(cell.margin)} nor wholly beyond")
    if adjusted > LEVEL:
        return so(Verdict.UNCLEAR, by_chance(direction, cells))
    if flips > CHECK_LEVEL:
        return so(
            Verdict.UNCLEAR, f"it looks {direction}, but the exact sign-flip test does not agree (p = {flips:.2g})"
        )
    return so(*_confirm(cell, direction, margin))


def _confirm(cell: Evidence, direction: Verdict, margin: float) -> tuple[Verdict, str, bool]:
    if len(cell.confirming) < 2:
        return Verdict.UNCLEAR, f"it looks {direction}, but no new pairs were measured to confirm it", False
    # The sampling has said which direction: to confirm it is a one-sided question.
    again = mean_of(cell.confirming, 1 - 2 * LEVEL)
    sign = 1 if direction is Verdict.SLOWER else -1
    excludes_none = again.low > 0 if sign > 0 else again.high < 0
    count = len(cell.confirming)
    if sign * again.mean > margin and excludes_none:
        return (
            direction,
            f"the interval lies wholly beyond {percent(cell.margin)}, and {count} new pairs confirm it",
            True,
        )
    return Verdict.UNCLEAR, f"it looked {direction}, but {count} new pairs do not confirm it", False


def by_chance(direction: Verdict, cells: int) -> str:
    """Why a change that would count alone does not."""
    return f"it would look {direction} alone, but among {cells} cells one may by chance (Holm)"


def percent(fraction: float) -> str:
    """A fraction as a percentage with as many digits as matter: `0.35 %`, `2.1 %`, `130 %`."""
    value = 100 * fraction
    return f"{value:.2g} %" if abs(value) < 10 else f"{value:.0f} %"
