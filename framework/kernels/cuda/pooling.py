"""Pooling in CUDA C++: maxima with the place of each saved, and means over whole images."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, elementwise, launch, reduction
from framework.kernels.cuda.geometry import Shape
from framework.kernels.reference.pooling import max_pool2d_indices
from framework.kernels.table import kernel as declare
from framework.vm.array import Array

__all__ = [
    "global_avg_pool2d", "global_avg_pool2d_backward", "max_pool2d", "max_pool2d_backward", "max_pool2d_indices",
]  # fmt: skip

Pair = tuple[int, int]
_MOST_GRID_ROWS = 65535
# Inputs that a thread of the backward kernel takes together, as in pooling.cu.
_MOST_TILE = 4


@declare(outputs=2)
def max_pool2d(y: Array, indices: Array, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """As the reference kernel of the same name."""
    device = x.storage.device
    run = _plan(device, "max_pool", x.dtype, x.shape, y.shape, x.stride, y.stride, indices.stride, kernel, stride,
                padding, _is_aligned(x, y, indices))  # fmt: skip
    if run is not None:
        run(launch.stream(device), y.ptr, indices.ptr, x.ptr)


@declare(outputs=1)
def max_pool2d_backward(
    grad_x: Array, grad_y: Array, indices: Array, *, kernel: Pair, stride: Pair, padding: Pair
) -> None:
    """As the reference kernel of the same name."""
    device = grad_x.storage.device
    run = _plan(device, "max_pool_backward", grad_x.dtype, grad_x.shape, grad_y.shape, grad_x.stride, grad_y.stride,
                indices.stride, kernel, stride, padding, _is_aligned(grad_x, grad_y, indices))  # fmt: skip
    if run is not None:
        run(launch.stream(device), grad_x.ptr, grad_y.ptr, indices.ptr)


@declare(outputs=1)
def global_avg_pool2d(y: Array, x: Array) -> None:
    """As the reference kernel of the same name."""
    reduction.mean(y, x, axes=(2, 3), keepdims=True)


@declare(outputs=1)
def global_avg_pool2d_backward(grad_x: Array, grad_y: Array) -> None:
    """As the reference kernel of the same name."""
    elementwise.divide(grad_x, grad_y, grad_x.shape[2] * grad_x.shape[3])


@lru_cache(maxsize=1024)
def _plan(
    device: Device,
    name: str,
    dtype: DType,
    x_shape: Shape,
    y_shape: Shape,
    x_stride: Shape,
    y_stride: Shape,
    indices_stride: Shape,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    is_aligned: bool,
) -> Callable[[int, int, int, int], None] | None:
    """`x` stands for the side of the images, `y` for that of the windows, in both directions."""
    images, channels, height, width = x_shape
    strides = (x_stride, y_stride, indices_stride)
    pack = 16 // dtype.itemsize
    is_packed = is_aligned and all(s[1] == 1 and all(step % pack == 0 for step in (s[0], *s[2:])) for s in strides)
    elements = pack if is_packed and channels % pack == 0 else 1
    packs = channels // elements
    if name == "max_pool":
        lines, across = y_shape[2:]
    elif stride[0] * stride[1] <= _MOST_TILE:
        name = "max_pool_backward_tiles"
        lines, across = (
            -(-(before + extent) // step) - before // step
            for before, extent, step in zip(padding, x_shape[2:], stride, strict=True)
        )
    else:
        lines, across = x_shape[2:]
    # Where channels do not lie within a column, they count as more images.
    inner, outer = (packs, 1) if x_stride[1] <= x_stride[3] else (1, packs)
    lines *= images * outer
    if lines * across * inner == 0:
        return None
    steps = [step for s in strides for step in s[2:]]
    if max(abs(step) for step in steps) * max(*x_shape[2:], *y_shape[2:]) >= 2**30:
        raise ValueError(f"max_pool2d of shape {list(x_shape)}: a single image is too large for the CUDA kernel")
    windows = {
        "WINDOW_ROWS": kernel[0],
        "WINDOW_COLUMNS": kernel[1],
        "STRIDE_ROWS": stride[0],
        "STRIDE_COLUMNS": stride[1],
    }
    return launch.prepare(
        compiler.function(device, "pooling.cu", name, TYPE=compiler.cxx(dtype), WIDTH=elements, **windows),
        (-(-across * inner // launch.THREADS), min(lines, _MOST_GRID_ROWS)),
        "3Q",
        "7q8i3i3i",
        (
            lines, *[s[0] for s in strides], *[s[1] * elements for s in strides],
            height, width, *y_shape[2:], *padding, inner, outer, *steps[0::2], *steps[1::2],
        ),
    )  # fmt: skip


def _is_aligned(*arrays: Array) -> bool:
    bits = 0
    for array in arrays:
        bits |= array.ptr
    return bits % 16 == 0
