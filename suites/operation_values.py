"""The values that both sides of an operation compute with, from a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Standard normal numbers in float32."""
    return np.random.default_rng(seed).standard_normal(tuple(shape), np.float32)


def labels(rows: int, classes: int) -> np.ndarray:
    """Class numbers."""
    return np.random.default_rng(7).integers(0, classes, rows)
