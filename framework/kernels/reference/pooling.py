"""Pooling over windows of an image, shaped [N, C, H, W]."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from framework.dtype import DType, uint8
from framework.kernels.table import kernel
from framework.vm.array import Array

Pair = tuple[int, int]


def max_pool2d_indices(y_shape: tuple[int, ...], kernel: Pair) -> tuple[DType, tuple[int, ...]]:
    """Type and shape of the `indices` of max_pool2d: here each maximum's place in its window, counted row by row."""
    if kernel[0] * kernel[1] > 256:
        raise ValueError(f"max_pool2d takes windows of up to 256 elements, not {kernel[0]}×{kernel[1]}")
    return uint8, y_shape


@kernel(outputs=2)
def max_pool2d(y: Array, indices: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """y[n,c,i,j] = the largest of its window of x, padded with -∞; NaN wins, and the first of equals."""
    source = np.pad(
        x.ndarray,
        ((0, 0), (0, 0), (padding[0], padding[0]), (padding[1], padding[1])),
        constant_values=-np.inf,
    )
    inside = np.pad(np.ones(x.shape[2:], bool), [(pad, pad) for pad in padding])
    best = np.full(y.shape, -np.inf, y.dtype.numpy)
    met = np.zeros(y.shape[2:], bool)
    place = np.zeros(y.shape, np.uint8)
    for index, window in _windows(kernel, y.shape[2:], stride):
        candidate = source[window]
        better = (candidate > best) | (np.isnan(candidate) & ~np.isnan(best))
        # The first one that is no padding, whatever it is: padding has no gradient.
        better |= inside[window[2:]] & ~met
        met |= inside[window[2:]]
        best = np.where(better, candidate, best)
        place[better] = index
    y.ndarray[...] = best
    indices.ndarray[...] = place


@kernel(outputs=1)
def max_pool2d_backward(
    grad_x: Array, grad_y: Array, indices: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> None:
    """grad_x gets each element of grad_y at the place of its window's maximum."""
    n, c, h, w = grad_x.shape
    padded = np.zeros((n, c, h + 2 * padding[0], w + 2 * padding[1]), grad_x.dtype.numpy)
    for index, window in _windows(kernel, grad_y.shape[2:], stride):
        padded[window] += np.where(indices.ndarray == index, grad_y.ndarray, 0)
    grad_x.ndarray[...] = padded[:, :, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


@kernel(outputs=1)
def global_avg_pool2d(y: Array, x: Array) -> None:
    """y[n,c,0,0] = the mean of x[n,c]."""
    y.ndarray[...] = np.mean(x.ndarray, axis=(2, 3), keepdims=True, dtype=np.float64)


@kernel(outputs=1)
def global_avg_pool2d_backward(grad_x: Array, grad_y: Array) -> None:
    """grad_x[n,c,i,j] = grad_y[n,c,0,0] / (H·W)."""
    grad_x.ndarray[...] = grad_y.ndarray / (grad_x.shape[2] * grad_x.shape[3])


def _windows(kernel: Pair, out_size: tuple[int, ...], stride: Pair) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """For each place in the window, counted row by row, the part of the padded input that lies there."""
    every = slice(None)
    for p in range(kernel[0]):
        for q in range(kernel[1]):
            rows = slice(p, p + stride[0] * (out_size[0] - 1) + 1, stride[0])
            columns = slice(q, q + stride[1] * (out_size[1] - 1) + 1, stride[1])
            yield p * kernel[1] + q, (every, every, rows, columns)
