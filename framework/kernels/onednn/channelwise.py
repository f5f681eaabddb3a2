"""Figures per channel of images that lie NHWC, by oneDNN: means, variances, and scaling in one pass.

oneDNN's own batch normalisation walks one block of channels at a time down all rows, which is slow where rows are long;
these walk the rows as they lie.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from framework.device import cpu
from framework.kernels.onednn import descriptors, elementwise, pooling
from framework.kernels.onednn.primitive import Attributes, Primitive
from framework.vm import scratch
from framework.vm.array import Array

Shape = tuple[int, ...]

_RELU, _SQUARE = 32, 35
# Images up to this many elements are added up in one go, larger ones row by row, so that rounding does not pile up.
_ONE_GO = 64


def mean_and_variance(x: Array) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the biased variance of each channel of x, [N, C, H, W] lying NHWC; both [C], float64."""
    mean = _mean(x, x.ptr)
    centre = mean.astype(np.float32)
    ones, shift = np.ones_like(centre), -centre
    squares = scratch(cpu, x.nbytes)
    _squared_distance(x.shape)(x.ptr, ones.ctypes.data, squares.ptr, shift.ctypes.data)
    # Taken about the rounded mean, which is a little off the mean itself.
    return mean, _mean(x, squares.ptr) - (mean - centre) ** 2


def scale(y: Array, x: Array, factor: np.ndarray, shift: np.ndarray, residual: Array | None, *, relu: bool) -> None:
    """y = act(factor · x + shift + residual), the factor and the shift per channel; x, y and residual lie NHWC."""
    run = _scaled(x.shape, residual is not None, relu)
    addresses = (x.ptr, factor.ctypes.data, y.ptr, shift.ctypes.data)
    run(*addresses) if residual is None else run(*addresses, residual.ptr)


def holds_nan(x: Array) -> bool:
    """Whether x, lying NHWC, may hold a NaN: told by its means, at the speed of reading it."""
    return bool(np.isnan(_mean(x, x.ptr)).any())


def _mean(like: Array, address: int) -> np.ndarray:
    n, c, h, w = like.shape
    if not n:
        return np.zeros(c)
    rows = 1 if h * w <= _ONE_GO else h
    means = np.empty((n * rows, c), np.float32)
    pooling.mean_of_windows((n, c, rows, 1), like.shape)(means.ctypes.data, address)
    return means.mean(axis=0, dtype=np.float64)


@lru_cache(maxsize=512)
def _squared_distance(shape: Shape) -> Primitive:
    # A product with ones first: a sum with one number per channel alone is several times slower.
    images, channels = descriptors.channels_last(shape), _per_channel(shape)
    attributes = Attributes().then_binary(elementwise.ADD, channels).then_eltwise(_SQUARE, 0.0, 0.0)
    return elementwise.binary(elementwise.MULTIPLY, images, channels, images, attributes, [channels])


@lru_cache(maxsize=512)
def _scaled(shape: Shape, has_residual: bool, relu: bool) -> Primitive:
    images, channels = descriptors.channels_last(shape), _per_channel(shape)
    attributes = Attributes().then_binary(elementwise.ADD, channels)
    others = [channels]
    if has_residual:
        attributes.then_binary(elementwise.ADD, images)
        others.append(images)
    if relu:
        attributes.then_eltwise(_RELU, 0.0, 0.0)
    return elementwise.binary(elementwise.MULTIPLY, images, channels, images, attributes, others)


def _per_channel(shape: Shape) -> descriptors.Descriptor:
    return descriptors.channels_last((1, shape[1], 1, 1))
