"""What it costs to look after every pair whether the interval is narrow: simulated sittings, as many pairs as the rule wants."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from flowbench.judge.inference import beyond, mean_of
from flowbench.judge.times import LEAST_MARGIN, LEAST_PAIRS, LEVEL, Evidence, Judgement, is_precise, judge_times
from flowbench.judge.verdict import Verdict
from flowbench.measure.plan_comparison import PAIRS

SITTINGS = 500
MARGIN = math.log1p(LEAST_MARGIN)


def narrow(log_ratios: list[float]) -> bool:
    """The rule that ends the sampling of a comparison."""
    return is_precise(log_ratios, LEAST_MARGIN)


def significant(log_ratios: list[float]) -> bool:
    """The rule that would cry wolf: sampling ends as soon as it looks changed."""
    return len(log_ratios) >= LEAST_PAIRS and beyond(mean_of(log_ratios), MARGIN) <= LEVEL


def simulated(change: float, spread: float, ends: Callable[[list[float]], bool] = narrow) -> list[Judgement]:
    """Sittings whose pairs have normal noise of `spread` about `change`, in logarithms; each is judged by itself."""
    draw = random.Random(20261130)
    judgements = []
    for _ in range(SITTINGS):
        pairs: list[float] = []
        while len(pairs) < PAIRS and not ends(pairs):
            pairs.append(draw.gauss(change, spread))
        confirming = tuple(draw.gauss(change, spread) for _ in range(LEAST_PAIRS))
        judgements += judge_times([Evidence(tuple(pairs), confirming, LEAST_MARGIN)])
    return judgements


def share(judgements: list[Judgement], *verdicts: Verdict) -> float:
    return sum(one.verdict in verdicts for one in judgements) / len(judgements)


def looking_changed(judgements: list[Judgement]) -> float:
    """Before new pairs confirm it."""
    return sum(one.confirmed is not None for one in judgements) / len(judgements)


# The spreads of pairs that need the least pairs, some more, and more than there are: 0.3 to 5 % from pair to pair.
@pytest.mark.parametrize("spread", [0.003, 0.01, 0.05])
def test_no_change_is_hardly_ever_called_one(spread: float) -> None:
    judgements = simulated(0.0, spread)
    assert looking_changed(judgements) <= 0.01
    assert share(judgements, Verdict.SLOWER, Verdict.FASTER) <= 0.002


@pytest.mark.parametrize("spread", [0.003, 0.01, 0.05])
def test_a_change_just_as_large_as_the_margin_is_the_worst_case(spread: float) -> None:
    """To look after every pair makes 2.5 % of each kind of error some 4 %; the new pairs take that back of `slower`."""
    judgements = simulated(MARGIN, spread)
    assert looking_changed(judgements) <= 0.06
    assert share(judgements, Verdict.SLOWER, Verdict.FASTER) <= LEVEL
    assert share(judgements, Verdict.SAME) <= LEVEL


def test_to_stop_on_significance_would_inflate_it() -> None:
    kept, inflated = (looking_changed(simulated(MARGIN, 0.05, ends)) for ends in (narrow, significant))
    assert kept <= LEVEL
    assert inflated > 3 * kept


def test_a_change_beyond_the_margin_is_found_and_never_called_the_same() -> None:
    judgements = simulated(math.log1p(0.03), 0.01)
    assert share(judgements, Verdict.SLOWER) >= 0.9
    assert share(judgements, Verdict.SAME, Verdict.FASTER) == 0
