"""Matrix products by oneDNN, so that NumPy's own thread pool never runs beside oneDNN's."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from framework.kernels.onednn import descriptors
from framework.kernels.onednn.library import library
from framework.kernels.onednn.primitive import BIAS, DST, SRC, WEIGHTS, Primitive, describe
from framework.kernels.reference import linear as reference
from framework.kernels.table import kernel
from framework.vm.array import Array

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]


# Below this NumPy is done before oneDNN has been told the addresses.
_SMALL_BYTES = 3 * 4096


@kernel(outputs=1)
def matmul(c: Array, a: Array, b: Array) -> None:
    """As the reference kernel of the same name."""
    run = None
    is_small = a.storage.nbytes + b.storage.nbytes + c.storage.nbytes < _SMALL_BYTES
    if not is_small and min(a.ndim, b.ndim) >= 2 and descriptors.servable(c, a, b):
        run = _product(*(_with_dimensions(array, c.ndim) for array in (c, a, b)), has_bias=False)
    if run is not None:
        run(c.ptr, a.ptr, b.ptr)
    else:
        reference.matmul(c, a, b)


@kernel(outputs=1)
def linear(y: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """As the reference kernel of the same name."""
    run = None
    if descriptors.servable(y, x, weight, bias) and (bias is None or bias.is_contiguous):
        run = _product(_layout(y), _layout(x), _transposed(weight), has_bias=bias is not None)
    if run is None:
        reference.linear(y, x, weight, bias)
    elif bias is None:
        run(y.ptr, x.ptr, weight.ptr)
    else:
        run(y.ptr, x.ptr, weight.ptr, bias.ptr)


@kernel(outputs=3)
def linear_backward(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_y: Array,
    x: Array | None,
    weight: Array | None,
) -> None:
    """As the reference kernel of the same name."""
    if not descriptors.servable(grad_x, grad_weight, grad_y, x, weight):
        reference.linear_backward(grad_x, grad_weight, grad_bias, grad_y, x, weight)
        return
    if grad_x is not None:
        run = _product(_layout(grad_x), _layout(grad_y), _layout(weight), has_bias=False)
        if run is None:
            reference.linear_backward(grad_x, None, None, grad_y, x, weight)
        else:
            run(grad_x.ptr, grad_y.ptr, weight.ptr)
    if grad_weight is not None:
        run = _product(_layout(grad_weight), _transposed(grad_y), _layout(x), has_bias=False)
        if run is None:
            reference.linear_backward(None, grad_weight, None, grad_y, x, weight)
        else:
            run(grad_weight.ptr, grad_y.ptr, x.ptr)
    if grad_bias is not None:
        grad_bias.ndarray[...] = np.sum(grad_y.ndarray, axis=0, dtype=np.float64)


@lru_cache(maxsize=512)
def _product(c: Layout, a: Layout, b: Layout, has_bias: bool) -> Primitive | None:
    """c = a @ b + bias, called with the addresses of c, a, b and bias. None where oneDNN has nothing fast."""
    result, left, right = (descriptors.strided(shape, _told(shape, stride)) for shape, stride in (c, a, b))
    width = c[0][-1]
    row = (1,) * (len(c[0]) - 1)
    bias = descriptors.strided((*row, width), (*(width for _ in row), 1)) if has_bias else None
    description = describe("matmul", library().engine, left, right, bias, result)
    if description is None or description.is_reference:
        return None
    operands = [(DST, result), (SRC, left), (WEIGHTS, right)]
    if bias is not None:
        operands.append((BIAS, bias))
    return Primitive(description, operands)


def _layout(array: Array) -> Layout:
    return array.shape, array.stride


def _transposed(matrix: Array) -> Layout:
    return matrix.shape[::-1], matrix.stride[::-1]


def _with_dimensions(array: Array, count: int) -> Layout:
    """The layout with leading extents of 1, so that every operand has as many dimensions as the result."""
    missing = count - array.ndim
    return (1,) * missing + array.shape, (1,) * missing + array.stride


def _told(shape: Shape, stride: Shape) -> Shape:
    """The strides, but where an extent is 1 a step over all elements: oneDNN looks at it, and refuses one that is too small."""
    outermost = max((step * extent for step, extent in zip(stride, shape, strict=True) if extent > 1), default=1)
    return tuple([outermost if extent == 1 else step for step, extent in zip(stride, shape, strict=True)])
