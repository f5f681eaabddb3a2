"""Statistics of paired measurements: the unit is a fresh pair of processes, never a step."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

# An interval whose ends are further apart than this factor says nothing.
MOST_SPREAD = 2.0


@dataclass(frozen=True)
class Ratio:
    """Reference time / subject time over pairs: above 1 the subject takes less time.

    `log_ratios` has one natural logarithm per pair. `interval` is the t interval of their mean, as ratios; None for one pair.
    """

    log_ratios: tuple[float, ...]
    geometric_mean: float
    lowest: float
    highest: float
    interval: tuple[float, float] | None

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return len(self.log_ratios)

    @property
    def telling_interval(self) -> tuple[float, float] | None:
        """The interval where it says something: None for one pair, and where its ends are too far apart."""
        return self.interval if self.interval and is_telling(*self.interval) else None


def is_telling(low: float, high: float) -> bool:
    """Whether an interval of a ratio says anything: its ends are within a factor of 2."""
    return high <= MOST_SPREAD * low


def untold(interval: tuple[float, float] | None) -> str | None:
    """Why the interval of a ratio says nothing, in words for people; None where it does."""
    if interval is None:
        return "one pair only"
    return None if is_telling(*interval) else "too few pairs"


def paired_ratio(reference_ms: Sequence[float], subject_ms: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The ratio of two sides measured in pairs, from the median step time of each process.

    Raises ValueError for sides of different length, for none at all, and for times that are not positive and finite.
    """
    if len(reference_ms) != len(subject_ms) or not reference_ms:
        raise ValueError(
            f"{len(reference_ms)} reference and {len(subject_ms)} subject times were given, expected equally many, "
            "at least one: pass the matched pairs only"
        )
    logs = tuple(
        math.log(positive(reference)) - math.log(positive(subject))
        for reference, subject in zip(reference_ms, subject_ms, strict=True)
    )
    mean = math.fsum(logs) / len(logs)
    interval = None
    if len(logs) > 1:
        half = t_quantile(confidence, len(logs) - 1) * statistics.stdev(logs, mean) / math.sqrt(len(logs))
        interval = (math.exp(mean - half), math.exp(mean + half))
    return Ratio(logs, math.exp(mean), math.exp(min(logs)), math.exp(max(logs)), interval)


def process_median(steps_ms: Sequence[float]) -> float:
    """The median step time of one process group; ValueError where a time is not positive and finite, or there is none."""
    if not steps_ms:
        raise ValueError("no step times were given, expected at least one")
    return statistics.median([positive(time) for time in steps_ms])


def geometric_mean(ratios: Iterable[float]) -> float:
    """The geometric mean of positive ratios; ValueError where one is not positive and finite, or there is none."""
    logs = [math.log(positive(ratio)) for ratio in ratios]
    if not logs:
        raise ValueError("no ratios were given, expected at least one")
    return math.exp(math.fsum(logs) / len(logs))


def positive(value: float) -> float:
    """`value` itself; ValueError where it is zero, negative, infinite or not a number."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{value!r} was given, expected a positive finite number: leave out what was not measured")
    return float(value)


@functools.cache
def t_quantile(confidence: float, degrees: int) -> float:
    """The t with P(|T| < t) = `confidence` for Student's distribution with whole `degrees` of freedom.

    Bisection of the finite sums for whole degrees (Abramowitz and Stegun, 26.7.3 and 26.7.4) over the angle atan(t / √degrees).
    """
    if not 0 < confidence < 1 or degrees < 1:
        raise ValueError(
            f"confidence {confidence!r}, degrees {degrees!r} were given, expected 0 < confidence < 1, degrees ≥ 1"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        if _central_probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def t_probability(t: float, degrees: int) -> float:
    """P(|T| < t) for Student's distribution with whole `degrees` of freedom; `t_quantile` is its inverse."""
    if not t >= 0 or degrees < 1:
        raise ValueError(f"t {t!r}, degrees {degrees!r} were given, expected t ≥ 0, degrees ≥ 1")
    return _central_probability(math.atan(t / math.sqrt(degrees)), degrees)


def _central_probability(angle: float, degrees: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(1 + odd, degrees, 2):
        total += term
        term *= cosine * cosine * power / (power + 1)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
