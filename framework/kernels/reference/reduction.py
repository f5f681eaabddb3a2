"""Reductions over some of an array's dimensions."""

from __future__ import annotations

import numpy as np

from framework.dtype import DType
from framework.kernels.table import kernel
from framework.vm.array import Array


def accumulator(dtype: DType) -> np.dtype:
    """The type to add up in: float64 for floats, so that the order of summation hardly matters."""
    return np.dtype(np.float64) if dtype.is_floating else np.dtype(np.int64)


@kernel(outputs=1)
def sum(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """out = Σ a over `axes`; 0 for an empty sum."""
    result = np.sum(a.ndarray, axis=axes, keepdims=keepdims, dtype=accumulator(a.dtype))
    np.copyto(out.ndarray, result, casting="unsafe")


@kernel(outputs=1)
def mean(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """out = the mean of a over `axes`; NaN for an empty one."""
    total = np.sum(a.ndarray, axis=axes, keepdims=keepdims, dtype=np.float64)
    count = np.prod([a.shape[axis] for axis in axes])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.copyto(out.ndarray, np.divide(total, count), casting="unsafe")


@kernel(outputs=1)
def max(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """out = the largest of a over `axes`; NaN where one is NaN."""
    np.copyto(out.ndarray, np.max(a.ndarray, axis=axes, keepdims=keepdims))


@kernel(outputs=1)
def argmax(out: Array, a: Array, *, axis: int) -> None:
    """out = the place of the largest of a along `axis`, of type int64; the first of equals."""
    np.copyto(out.ndarray, np.argmax(a.ndarray, axis=axis))
