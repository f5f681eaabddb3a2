"""Two-dimensional convolution (cross-correlation), as a sum of matrix products over the kernel's positions.

Shapes: x [N, C, H, W], weight [O, C/groups, kh, kw], y [N, O, Ho, Wo] with
Ho = ⌊(H + 2·padding - dilation·(kh-1) - 1) / stride⌋ + 1, and Wo alike.
See Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", 2016.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array

Pair = tuple[int, int]


@kernel(outputs=1)
def conv2d(
    y: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """y[n,o,i,j] = bias[o] + Σ_c,p,q weight[o,c,p,q] · x[n, c, i·stride + p·dilation - padding, …]."""
    total = np.zeros(_grouped(_nhwc(y.ndarray), groups).shape, y.dtype.numpy)
    source = _grouped(_padded(_nhwc(x.ndarray), padding), groups)
    for (p, q), window in _windows(weight.shape[2:], y.shape[2:], stride, dilation):
        total += _per_group(source[window], _taps(weight, groups, p, q).transpose(0, 2, 1))
    if bias is not None:
        total += bias.ndarray.reshape(groups, -1)
    _nhwc(y.ndarray)[...] = total.reshape(_nhwc(y.ndarray).shape)


@kernel(outputs=1)
def conv2d_backward_input(
    grad_x: Array,
    grad_y: Array,
    weight: Array,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """grad_x: the gradient of conv2d's input, its transpose applied to grad_y."""
    n, c, h, w = grad_x.shape
    padded = np.zeros((n, h + 2 * padding[0], w + 2 * padding[1], c), grad_x.dtype.numpy)
    target = _grouped(padded, groups)
    source = _grouped(_nhwc(grad_y.ndarray), groups)
    for (p, q), window in _windows(weight.shape[2:], grad_y.shape[2:], stride, dilation):
        target[window] += _per_group(source, _taps(weight, groups, p, q))
    _nhwc(grad_x.ndarray)[...] = padded[:, padding[0] : padding[0] + h, padding[1] : padding[1] + w]


@kernel(outputs=2)
def conv2d_backward_weight(
    grad_weight: Array,
    grad_bias: Array | None,
    grad_y: Array,
    x: Array,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """grad_weight[o,c,p,q] = Σ_n,i,j grad_y[n,o,i,j] · x[n, c, …]; grad_bias[o] = Σ_n,i,j grad_y[n,o,i,j]."""
    source = _grouped(_padded(_nhwc(x.ndarray), padding), groups)
    gradient = _grouped(_nhwc(grad_y.ndarray), groups)
    flat = gradient.reshape(-1, *gradient.shape[3:]).transpose(1, 2, 0)  # [groups, O/groups, N·Ho·Wo]
    out = grad_weight.ndarray
    for (p, q), window in _windows(grad_weight.shape[2:], grad_y.shape[2:], stride, dilation):
        taken = source[window].reshape(-1, *source.shape[3:]).transpose(1, 0, 2)
        out[:, :, p, q] = np.matmul(flat, taken).reshape(out.shape[:2])
    if grad_bias is not None:
        grad_bias.ndarray[...] = np.sum(grad_y.ndarray, axis=(0, 2, 3), dtype=np.float64)


def _nhwc(a: np.ndarray) -> np.ndarray:
    return a.transpose(0, 2, 3, 1)


def _padded(a: np.ndarray, padding: Pair) -> np.ndarray:
    if padding == (0, 0):
        return a
    return np.pad(a, ((0, 0), (padding[0], padding[0]), (padding[1], padding[1]), (0, 0)))


def _grouped(a: np.ndarray, groups: int) -> np.ndarray:
    """[N, H, W, C] as [N, H, W, groups, C/groups]."""
    return a.reshape(*a.shape[:3], groups, a.shape[3] // groups)


def _taps(weight: Array, groups: int, p: int, q: int) -> np.ndarray:
    """The weights at kernel position (p, q): [groups, O/groups, C/groups]."""
    o, c = weight.shape[:2]
    return weight.ndarray[:, :, p, q].reshape(groups, o // groups, c)


def _windows(
    kernel_size: tuple[int, ...], out_size: tuple[int, ...], stride: Pair, dilation: Pair
) -> Iterator[tuple[Pair, tuple[slice, ...]]]:
    """For each kernel position, the part of the padded input that it meets."""
    for p in range(kernel_size[0]):
        for q in range(kernel_size[1]):
            rows = slice(p * dilation[0], p * dilation[0] + stride[0] * (out_size[0] - 1) + 1, stride[0])
            columns = slice(q * dilation[1], q * dilation[1] + stride[1] * (out_size[1] - 1) + 1, stride[1])
            yield (p, q), (slice(None), rows, columns)


def _per_group(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[N, H, W, groups, K] times [groups, K, M] -> [N, H, W, groups, M]."""
    if b.shape[0] == 1:
        return (a[:, :, :, 0] @ b[0])[:, :, :, None]
    return np.matmul(a[..., None, :], b)[..., 0, :]
