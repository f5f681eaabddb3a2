"""Convolutions as one matrix product over gathered patches: for what oneDNN has only plain loops for, and for small images.

Plain loops are all it has for the weight gradient of a kernel larger than its images, such as 3×3 over the 2×2 that a ResNet
makes of 64×64. Of a few small images it spends more time on bringing large weights into its own layout than on the product.

A patch is what the kernel meets of an image at one place of the result, [C·kh·kw] in the order of the weights: with one
patch a row, the convolution is a linear layer (Chellapilla, Puri and Simard, "High Performance Convolutional Neural Networks
for Document Processing", 2006). The products run on oneDNN's threads; NumPy only moves the patches, which are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Literal

import numpy as np

from framework.device import cpu
from framework.dtype import float32
from framework.kernels.onednn import elementwise, matmul
from framework.vm import scratch
from framework.vm.array import Array, channels_last_stride, contiguous_stride

Pair = tuple[int, int]
Shape = tuple[int, ...]
# Stride, padding, dilation, groups.
Geometry = tuple[Pair, Pair, Pair, int]
Window = tuple[slice, slice]
Direction = Literal["forward", "backward_input", "backward_weight"]

# How many times the bytes of the convolution's own operands its patches may take. A 3×3 kernel stays below 5.
_MOST_OF_OPERANDS = 8

# From how many outputs for each patch, and from how many weights, patches are faster than oneDNN's own algorithms. Measured
# on one and two cores with AVX2, over the 1×1 and 3×3 kernels of ResNets on images of 2×2 to 16×16; on two with AVX-512 they
# are as fast, but for 3×3 forward, which takes up to 7 % longer there.
_WORTHWHILE: dict[Direction, tuple[int, int]] = {
    "forward": (4, 1 << 18),
    "backward_input": (32, 1 << 18),
    "backward_weight": (4, 1 << 19),
}


@lru_cache(maxsize=512)
def are_faster(direction: Direction, weight: Shape, y: Shape, geometry: Geometry) -> bool:
    """Whether the weights outweigh the patches so far that oneDNN's own algorithm would mostly move weights.

    The patches then take a quarter of the weights' memory at most.
    """
    if direction == "backward_input" and weight[2:] == (1, 1):
        return False  # there oneDNN's is as fast, or faster
    outputs_per_patch, weights = _WORTHWHILE[direction]
    patches = _patches_shape(y, weight)[0]
    return geometry[3] == 1 and weight[0] >= outputs_per_patch * patches and prod(weight) >= weights


@lru_cache(maxsize=512)
def serves(x: Shape, weight: Shape, y: Shape, geometry: Geometry) -> bool:
    """Whether patches are a way to do this convolution: in one group, and in memory bounded by its operands."""
    return geometry[3] == 1 and prod(_patches_shape(y, weight)) <= _MOST_OF_OPERANDS * (
        prod(x) + prod(weight) + prod(y)
    )


def conv2d(y: Array, x: Array, weight: Array, bias: Array | None, geometry: Geometry) -> None:
    """y = patches · weightᵀ + bias."""
    result = y if y.is_channels_last else _images(y.shape)
    matmul.linear(_rows(result), _gathered(x, weight.shape, y.shape, geometry), _matrix(_read_weight(weight)), bias)
    if result is not y:
        elementwise.copy(y, result)


def conv2d_backward_input(grad_x: Array, grad_y: Array, weight: Array, geometry: Geometry) -> None:
    """grad_x: grad_y · weight, every patch added back to where it was taken from."""
    rows, columns = _rows(_read_images(grad_y)), _matrix(_read_weight(weight))
    patches = _array(_patches_shape(grad_y.shape, weight.shape))
    matmul.matmul(patches, rows, columns)
    taps, target = _by_tap(patches, weight.shape, grad_y.shape), _nhwc(grad_x)
    target[...] = 0
    for tap, places, met in _taps(weight.shape, grad_y.shape, grad_x.shape, geometry):
        target[:, *met] += taps[:, *places, :, *tap]


def conv2d_backward_weight(
    grad_weight: Array, grad_bias: Array | None, grad_y: Array, x: Array, geometry: Geometry
) -> None:
    """grad_weight = grad_yᵀ · patches; grad_bias[o] = Σ_n,i,j grad_y[n,o,i,j]."""
    result = grad_weight if grad_weight.is_contiguous else _array(grad_weight.shape)
    rows = _rows(_read_images(grad_y))
    columns = rows.view(rows.shape[::-1], rows.stride[::-1])
    matmul.matmul(_matrix(result), columns, _gathered(x, grad_weight.shape, grad_y.shape, geometry))
    if result is not grad_weight:
        elementwise.copy(grad_weight, result)
    if grad_bias is not None:
        grad_bias.ndarray[...] = np.sum(grad_y.ndarray, axis=(0, 2, 3), dtype=np.float64)


def _gathered(x: Array, weight: Shape, y: Shape, geometry: Geometry) -> Array:
    """The patches of x, [N·Ho·Wo, C·kh·kw]; what lies in the padding is 0."""
    if _is_pixel_by_pixel(weight, geometry):
        return _rows(_read_images(x))
    patches = _array(_patches_shape(y, weight))
    patches.ndarray.fill(0)
    taps, source = _by_tap(patches, weight, y), _nhwc(x)
    for tap, places, met in _taps(weight, y, x.shape, geometry):
        taps[:, *places, :, *tap] = source[:, *met]
    return patches


def _is_pixel_by_pixel(weight: Shape, geometry: Geometry) -> bool:
    """Whether the patches are the images' pixels as they lie."""
    return weight[2:] == (1, 1) and geometry[:2] == ((1, 1), (0, 0))


def _taps(weight: Shape, y: Shape, x: Shape, geometry: Geometry) -> Iterator[tuple[Pair, Window, Window]]:
    """For each place in the kernel that meets the images: itself, the places in y where it does, and what it meets of x."""
    stride, padding, dilation, _ = geometry
    rows, columns = (
        [_span(stride[i], tap * dilation[i] - padding[i], y[2 + i], x[2 + i]) for tap in range(weight[2 + i])]
        for i in (0, 1)
    )
    for p, row in enumerate(rows):
        for q, column in enumerate(columns):
            if row is not None and column is not None:
                yield (p, q), (row[0], column[0]), (row[1], column[1])


def _span(stride: int, shift: int, out_size: int, in_size: int) -> tuple[slice, slice] | None:
    """The i below out_size for which i·stride + shift lies within in_size, and these sums."""
    first = max(0, -(shift // stride))
    last = min(out_size - 1, (in_size - 1 - shift) // stride)
    if first > last:
        return None
    return slice(first, last + 1), slice(first * stride + shift, last * stride + shift + 1, stride)


def _patches_shape(y: Shape, weight: Shape) -> Shape:
    return y[0] * y[2] * y[3], prod(weight[1:])


def _by_tap(patches: Array, weight: Shape, y: Shape) -> np.ndarray:
    """The patches as [N, Ho, Wo, C, kh, kw]."""
    return patches.ndarray.reshape(y[0], *y[2:], *weight[1:])


def _nhwc(images: Array) -> np.ndarray:
    return images.ndarray.transpose(0, 2, 3, 1)


def _rows(images: Array) -> Array:
    """Images lying NHWC as a matrix [N·H·W, C]."""
    n, c, h, w = images.shape
    return images.view((n * h * w, c), (c, 1))


def _matrix(weight: Array) -> Array:
    """Contiguous weights [O, C, kh, kw] as a matrix [O, C·kh·kw]."""
    shape = weight.shape[0], prod(weight.shape[1:])
    return weight.view(shape, contiguous_stride(shape))


def _read_images(images: Array) -> Array:
    """The images lying NHWC: themselves, or a copy."""
    return images if images.is_channels_last else _copied(_images(images.shape), images)


def _read_weight(weight: Array) -> Array:
    """The weights lying row-major: themselves, or a copy."""
    return weight if weight.is_contiguous else _copied(_array(weight.shape), weight)


def _copied(target: Array, source: Array) -> Array:
    elementwise.copy(target, source)
    return target


def _images(shape: Shape) -> Array:
    return _array(shape, channels_last_stride(shape))  # type: ignore[arg-type]


def _array(shape: Shape, stride: Shape | None = None) -> Array:
    """Scratch memory as an array, row-major if no stride is given."""
    room = scratch(cpu, prod(shape) * float32.itemsize)
    return Array(room.storage, shape, stride or contiguous_stride(shape), float32)
