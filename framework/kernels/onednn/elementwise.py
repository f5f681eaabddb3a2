"""Elementwise kernels by oneDNN: they use every thread, where NumPy uses one.

Arrays that lie alike and densely are treated as one row. What is small, broadcast or otherwise laid out goes to NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

from framework.dtype import float32
from framework.kernels.onednn import descriptors
from framework.kernels.onednn.descriptors import Descriptor
from framework.kernels.onednn.library import UNIMPLEMENTED, OneDnnError, library
from framework.kernels.onednn.primitive import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    POST_OPERATION,
    SRC,
    SRC_1,
    Attributes,
    Description,
    Primitive,
    describe,
)
from framework.kernels.reference import elementwise as reference
from framework.kernels.table import kernel
from framework.vm.array import Array, dense_stride_like

ADD, MULTIPLY = 0x1FFF0, 0x1FFF1
_RELU_FROM_RESULT = 256
_FORWARD_TRAINING = 64
# Below this NumPy's one thread is done before two have been called.
_SMALL = 8192
_SMALL_BYTES = _SMALL * float32.itemsize


@kernel(outputs=1)
def add(out: Array, a: Array, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    # Asked first, since it is asked of every small tensor that a program adds.
    is_small = out.storage.nbytes < _SMALL_BYTES
    if not is_small and isinstance(a, Array) and isinstance(b, Array) and is_row(out, a, b):
        _binary(out.size, ADD)(a.ptr, b.ptr, out.ptr)
    else:
        reference.add(out, a, b)


@kernel(outputs=1)
def relu_backward(grad_x: Array, grad_y: Array, y: Array) -> None:
    """As the reference kernel of the same name."""
    if is_row(grad_x, grad_y, y):
        _relu_backward(y.size)(y.ptr, grad_y.ptr, grad_x.ptr)
    else:
        reference.relu_backward(grad_x, grad_y, y)


@kernel(outputs=1)
def copy(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    if out.size < _SMALL or out.shape != a.shape or not descriptors.servable(out, a):
        reference.copy(out, a)
    elif is_row(out, a):
        _copy_row(out.size)(a.ptr, out.ptr)
    elif out.stride == a.stride:
        reference.copy(out, a)  # the same gaps in both: oneDNN would take it for a plain copy, gaps and all
    else:
        _copy_strided(a.shape, a.stride, out.stride)(a.ptr, out.ptr)


def is_row(out: Array, *others: Array) -> bool:
    """Whether all lie alike and densely, are float32, and are worth two threads."""
    shape, stride = out.shape, out.stride
    for other in others:
        if other.shape != shape or other.stride != stride or other.dtype is not out.dtype:
            return False
    return out.size >= _SMALL and descriptors.servable(out) and _is_dense(shape, stride)


@lru_cache(maxsize=4096)
def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    dense = dense_stride_like(shape, stride)
    return all(extent == 1 or a == b for extent, a, b in zip(shape, stride, dense, strict=True))


@lru_cache(maxsize=512)
def _binary(size: int, operation: int) -> Primitive:
    row = descriptors.vector(size)
    return binary(operation, row, row, row)


def binary(
    operation: int,
    a: Descriptor,
    b: Descriptor,
    out: Descriptor,
    attributes: Attributes | None = None,
    others: Sequence[Descriptor] = (),
) -> Primitive:
    """out = a operation b, called with the addresses of a, b, out, and `others` that post-operations take in turn."""
    description = _need("binary", describe("binary", library().engine, operation, a, b, out, attributes=attributes))
    operands = [(SRC, a), (SRC_1, b), (DST, out)]
    operands += [(POST_OPERATION * (place + 1) | SRC_1, other) for place, other in enumerate(others)]
    return Primitive(description, operands)


def scaled(size: int, attributes: Attributes, others: Sequence[Descriptor] = ()) -> Primitive:
    """out = a · factor, then post-operations; the factor lies in memory. Called as `binary` is."""
    row = descriptors.vector(size)
    return binary(MULTIPLY, row, descriptors.vector(1), row, attributes, others)


@lru_cache(maxsize=512)
def _relu_backward(size: int) -> Primitive:
    row = descriptors.vector(size)
    hint = _describe_relu(row, _RELU_FROM_RESULT)
    description = describe(
        "eltwise_backward",
        library().engine,
        _RELU_FROM_RESULT,
        row,
        row,
        row,
        ctypes.c_float(0),
        ctypes.c_float(0),
        hint.handle,
    )
    return Primitive(_need("eltwise_backward", description), [(DST, row), (DIFF_DST, row), (DIFF_SRC, row)])


def _describe_relu(row: Descriptor, algorithm: int) -> Description:
    description = describe(
        "eltwise_forward",
        library().engine,
        _FORWARD_TRAINING,
        algorithm,
        row,
        row,
        ctypes.c_float(0),
        ctypes.c_float(0),
    )
    return _need("eltwise_forward", description)


@lru_cache(maxsize=512)
def _copy_row(size: int) -> Primitive:
    # A reorder between equal layouts is a plain copy, by every thread.
    return _copy(descriptors.vector(size), descriptors.vector(size))


@lru_cache(maxsize=512)
def _copy_strided(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> Primitive:
    return _copy(descriptors.strided(shape, source), descriptors.strided(shape, target))


def _copy(source: Descriptor, target: Descriptor) -> Primitive:
    engine = library().engine
    description = _need("reorder", describe("reorder", source, engine, target, engine))
    return Primitive(description, [(SRC, source), (DST, target)])


def _need(operation: str, description: Description | None) -> Description:
    if description is None:
        raise OneDnnError(f"dnnl_{operation}_primitive_desc_create", UNIMPLEMENTED)
    return description
