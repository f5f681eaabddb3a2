"""Pooling by oneDNN, on NHWC. The places of the maxima lie NHWC too, whichever kernel wrote them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from framework.device import cpu
from framework.dtype import DType, float32
from framework.kernels.onednn import descriptors
from framework.kernels.onednn.descriptors import dimensions
from framework.kernels.onednn.library import library
from framework.kernels.onednn.primitive import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    SRC,
    WORKSPACE,
    Computation,
    Description,
    Operand,
    Primitive,
    describe,
)
from framework.kernels.reference import pooling as reference
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array

Pair = tuple[int, int]
Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]

_FORWARD_TRAINING = 64
_MAXIMUM, _MEAN = 511, 767


def max_pool2d_indices(y_shape: Shape, kernel: Pair) -> tuple[DType, Shape]:
    """Type and shape of the `indices` of max_pool2d: the reference's, in the order [N, H, W, C]."""
    dtype, (n, c, h, w) = reference.max_pool2d_indices(y_shape, kernel)
    return dtype, (n, h, w, c)


@kernel(outputs=2)
def max_pool2d(y: Array, indices: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """As the reference kernel of the same name, but for the order of `indices`."""
    run, places = None, _as_nchw(indices)
    if descriptors.servable(y, x) and _is_finite(x):
        run = _max_pool(_layout(y), _layout(places), _layout(x), kernel, stride, padding)
    if run is not None:
        run(y.ptr, places.ptr, x.ptr)
    else:
        reference.max_pool2d(y, places, x, kernel=kernel, stride=stride, padding=padding)


@kernel(outputs=1)
def max_pool2d_backward(
    grad_x: Array, grad_y: Array, indices: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> None:
    """As the reference kernel of the same name, but for the order of `indices`."""
    run, places = None, _as_nchw(indices)
    if descriptors.servable(grad_x, grad_y):
        run = _max_pool_backward(_layout(grad_x), _layout(grad_y), _layout(places), kernel, stride, padding)
    if run is not None:
        run(grad_x.ptr, grad_y.ptr, places.ptr)
    else:
        reference.max_pool2d_backward(grad_x, grad_y, places, kernel=kernel, stride=stride, padding=padding)


@kernel(outputs=1)
def global_avg_pool2d(y: Array, x: Array) -> None:
    """As the reference kernel of the same name."""
    if descriptors.servable(y, x):
        _mean(_layout(y), _layout(x))(y.ptr, x.ptr)
    else:
        reference.global_avg_pool2d(y, x)


@kernel(outputs=1)
def global_avg_pool2d_backward(grad_x: Array, grad_y: Array) -> None:
    """As the reference kernel of the same name."""
    if descriptors.servable(grad_x, grad_y):
        _mean_backward(_layout(grad_x), _layout(grad_y))(grad_x.ptr, grad_y.ptr)
    else:
        reference.global_avg_pool2d_backward(grad_x, grad_y)


def _is_finite(x: Array) -> bool:
    """Whether x holds no NaN, which oneDNN's maximum would lose, and no infinity: of a window of -∞ it makes the lowest
    finite number. Each channel's mean tells, at the speed of reading x."""
    means = scratch(cpu, x.shape[0] * x.shape[1] * float32.itemsize)
    y = Array(means.storage, (*x.shape[:2], 1, 1), (x.shape[1], 1, 1, 1), float32)
    _mean(_layout(y), _layout(x))(y.ptr, x.ptr)
    return bool(np.isfinite(y.ndarray).all())


def _layout(array: Array) -> Layout:
    return array.shape, array.stride


def _as_nchw(indices: Array) -> Array:
    n, h, w, c = indices.shape
    by_n, by_h, by_w, by_c = indices.stride
    return indices.view((n, c, h, w), (by_n, by_c, by_h, by_w))


@lru_cache(maxsize=256)
def _max_pool(y: Layout, places: Layout, x: Layout, kernel: Pair, stride: Pair, padding: Pair) -> Computation | None:
    description = _describe_forward(_MAXIMUM, x[0], y[0], kernel, stride, padding)
    if description is None or not _keeps_bytes(description, y[0]):
        return None
    return Computation(
        description,
        [
            Operand(DST, descriptors.activation(*y), is_output=True),
            Operand(WORKSPACE, descriptors.activation(*places, "uint8"), is_output=True),
            Operand(SRC, descriptors.activation(*x)),
        ],
    )


@lru_cache(maxsize=256)
def _max_pool_backward(
    grad_x: Layout, grad_y: Layout, places: Layout, kernel: Pair, stride: Pair, padding: Pair
) -> Computation | None:
    hint = _describe_forward(_MAXIMUM, grad_x[0], grad_y[0], kernel, stride, padding)
    if hint is None or not _keeps_bytes(hint, grad_y[0]):
        return None
    description = _describe_backward(_MAXIMUM, grad_x[0], grad_y[0], kernel, stride, padding, hint)
    if description is None:
        return None
    return Computation(
        description,
        [
            Operand(DIFF_SRC, descriptors.activation(*grad_x), is_output=True),
            Operand(DIFF_DST, descriptors.activation(*grad_y)),
            Operand(WORKSPACE, descriptors.activation(*places, "uint8")),
        ],
    )


@lru_cache(maxsize=256)
def _mean(y: Layout, x: Layout) -> Computation:
    window = x[0][2:]
    description = _describe_forward(_MEAN, x[0], y[0], window, window, (0, 0))
    assert description is not None, "oneDNN has average pooling for every shape"
    return Computation(
        description,
        [Operand(DST, descriptors.activation(*y), is_output=True), Operand(SRC, descriptors.activation(*x))],
    )


@lru_cache(maxsize=512)
def mean_of_windows(y: Shape, x: Shape) -> Primitive:
    """The means of the windows that y [N, C, h, w] divides x into evenly, both NHWC; called with the addresses of y and x."""
    window = (x[2] // y[2], x[3] // y[3])
    description = _describe_forward(_MEAN, x, y, window, window, (0, 0))
    assert description is not None, "oneDNN has average pooling for every shape"
    return Primitive(description, [(DST, descriptors.channels_last(y)), (SRC, descriptors.channels_last(x))])


@lru_cache(maxsize=256)
def _mean_backward(grad_x: Layout, grad_y: Layout) -> Computation:
    window = grad_x[0][2:]
    hint = _describe_forward(_MEAN, grad_x[0], grad_y[0], window, window, (0, 0))
    assert hint is not None, "oneDNN has average pooling for every shape"
    description = _describe_backward(_MEAN, grad_x[0], grad_y[0], window, window, (0, 0), hint)
    assert description is not None, "oneDNN has average pooling for every shape"
    return Computation(
        description,
        [
            Operand(DIFF_SRC, descriptors.activation(*grad_x), is_output=True),
            Operand(DIFF_DST, descriptors.activation(*grad_y)),
        ],
    )


def _keeps_bytes(description: Description, y: Shape) -> bool:
    """Whether the primitive notes the maxima as we do, a byte each; for large windows it would take four."""
    return description.layout(WORKSPACE) == descriptors.channels_last(y, "uint8")


def _describe_forward(
    algorithm: int, x: Shape, y: Shape, window: Shape, stride: Shape, padding: Pair
) -> Description | None:
    return describe(
        "pooling_forward",
        library().engine,
        _FORWARD_TRAINING,
        algorithm,
        descriptors.channels_last(x),
        descriptors.channels_last(y),
        *_steps(window, stride, padding),
    )


def _describe_backward(
    algorithm: int, x: Shape, y: Shape, window: Shape, stride: Shape, padding: Pair, hint: Description
) -> Description | None:
    return describe(
        "pooling_backward",
        library().engine,
        algorithm,
        descriptors.channels_last(x),
        descriptors.channels_last(y),
        *_steps(window, stride, padding),
        hint.handle,
    )


def _steps(window: Shape, stride: Shape, padding: Pair) -> list:
    no_dilation = (0, 0)
    return [dimensions(values) for values in (stride, window, no_dilation, padding, padding)]
