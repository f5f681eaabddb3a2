"""The values that both sides of an operation compute with, from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

# What is larger repeats itself: drawing it would take longer than measuring with it.
_MOST_DRAWN = 1_000_003


def draw(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers in float32."""
    count = min(prod(shape), _MOST_DRAWN)
    return np.resize(np.random.default_rng(seed).standard_normal(count, np.float32), tuple(shape))


def labels(rows: int, classes: int) -> np.ndarray:
    """Class numbers."""
    return np.random.default_rng(7).integers(0, classes, rows)
