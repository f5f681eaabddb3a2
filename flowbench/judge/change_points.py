"""Where the level of a series of figures shifts, by PELT (Killick, Fearnhead, Eckley 2012) as the package ruptures has it.

A change point is a remark about a history, found after the fact; it is never a verdict about a commit.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from flowbench.errors import FlowbenchError

LIBRARY = "ruptures"
# A level lasts for at least so many points: one odd run is no shift.
SHORTEST_LEVEL = 3
# The price of a shift in units of the noise's variance, times log n: on series without a shift, at most 1 in 70 of 20 or more
# points gets one, and of shifts by three standard deviations at least 85 % are found (simulated with normal noise).
_PENALTY = 6.0
# Noise is never taken to be less than this, as a fraction: figures that repeat to the last digit have none at all.
_LEAST_NOISE = 1e-4


def unavailable() -> str | None:
    """Why no change points can be had here, with the way out; None where they can."""
    if importlib.util.find_spec(LIBRARY) is None:
        return f"{LIBRARY} is not installed (python -m pip install 'flowbench[history]')"
    return None


def level_shifts(values: Sequence[float], margin: float) -> list[tuple[int, float, float]]:
    """The shifts of positive `values` by more than `margin`, a fraction: the new level's first index, medians before and after.

    Raises FlowbenchError without ruptures.
    """
    if len(values) < 2 * SHORTEST_LEVEL:
        return []
    ends = _pelt([math.log(value) for value in values])
    while True:
        levels = [statistics.median(values[start:end]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        small = [
            index
            for index in range(len(levels) - 1)
            if abs(math.log(levels[index + 1] / levels[index])) < math.log1p(margin)
        ]
        if not small:
            return [(ends[index], levels[index], levels[index + 1]) for index in range(len(levels) - 1)]
        del ends[small[0]]


def _pelt(logs: list[float]) -> list[int]:
    """The end of each level, the last one's included."""
    reason = unavailable()
    if reason is not None:
        raise FlowbenchError(f"no change points: {reason}")
    import numpy as np
    import ruptures

    # Of differences, the median is not moved by the shifts themselves.
    steps = [abs(after - before) for before, after in pairwise(logs)]
    noise = max(1.4826 * statistics.median(steps) / math.sqrt(2), _LEAST_NOISE)
    signal = (np.asarray(logs) / noise).reshape(-1, 1)
    search = ruptures.Pelt(model="l2", min_size=SHORTEST_LEVEL, jump=1).fit(signal)
    return list(map(int, search.predict(pen=_PENALTY * math.log(len(logs)))))
