"""Elementwise kernels in CUDA C++: dense operands in packs of 16 bytes, others by their strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

from framework.device import Device
from framework.dtype import DType, bool_, promote
from framework.kernels.cuda import compiler, launch
from framework.kernels.cuda.geometry import Shape, Walk, broadcast, walk
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, contiguous_stride

# Elements for each thread, so that several loads are under way at once.
_PER_THREAD = 16
_OUT, _A, _B = 0, 1, 2


@kernel(outputs=1)
def add(out: Array, a: Array | float, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    _compute("Add", out, a, b)


@kernel(outputs=1)
def subtract(out: Array, a: Array | float, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    _compute("Subtract", out, a, b)


@kernel(outputs=1)
def multiply(out: Array, a: Array | float, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    _compute("Multiply", out, a, b)


@kernel(outputs=1)
def divide(out: Array, a: Array | float, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    _compute("Divide", out, a, b)


@kernel(outputs=1)
def negative(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("Negative", out, a, 0)


@kernel(outputs=1)
def exp(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("Exp", out, a, 0)


@kernel(outputs=1)
def log(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("Log", out, a, 0)


@kernel(outputs=1)
def sqrt(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("Sqrt", out, a, 0)


@kernel(outputs=1)
def equal(out: Array, a: Array | float, b: Array | float) -> None:
    """As the reference kernel of the same name."""
    _compute("Equal", out, a, b)


@kernel(outputs=1)
def relu(y: Array, x: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("Relu", y, x, 0)


@kernel(outputs=1)
def relu_backward(grad_x: Array, grad_y: Array, y: Array) -> None:
    """As the reference kernel of the same name."""
    _compute("ReluBackward", grad_x, grad_y, y)


@kernel(outputs=1)
def fill(out: Array, *, value: float) -> None:
    """As the reference kernel of the same name."""
    _compute("Fill", out, value, 0)


@kernel(outputs=1)
def copy(out: Array, a: Array) -> None:
    """As the reference kernel of the same name."""
    device = out.storage.device
    run = _copy_plan(device, out.dtype, a.dtype, out.shape, out.stride, a.shape, a.stride)
    if run is not None:
        run(launch.stream(device), out.ptr, a.ptr)


def _compute(operation: str, out: Array, a: Any, b: Any) -> None:
    a_shape = a_stride = b_shape = b_stride = None
    a_address = b_address = 0
    dtype = None
    if type(a) is Array:
        a_shape, a_stride, a_address, dtype, a_value = a.shape, a.stride, a.ptr, a.dtype, 0
    else:
        a_value = a
    if type(b) is Array:
        b_shape, b_stride, b_address, b_value = b.shape, b.stride, b.ptr, 0
        if dtype is not b.dtype:
            dtype = b.dtype if dtype is None else promote(dtype, b.dtype)
    else:
        b_value = b
    if dtype is None:
        dtype = out.dtype
    device = out.storage.device
    run = _plan(device, operation, dtype, out.shape, out.stride, a_shape, a_stride, b_shape, b_stride)
    if run is None:
        return
    made = bool_ if operation == "Equal" else dtype
    if (
        made is not out.dtype
        or (a_shape is not None and a.dtype is not dtype)
        or (b_shape is not None and b.dtype is not dtype)
    ):
        _compute_mixed(operation, out, a, b, dtype, made)
    elif dtype.is_floating:
        run(launch.stream(device), out.ptr, a_address, b_address, a_value, b_value)
    else:
        run(launch.stream(device), out.ptr, a_address, b_address, int(a_value), int(b_value))


def _compute_mixed(operation: str, out: Array, a: Any, b: Any, dtype: DType, made: DType) -> None:
    """For operands of several types: computes in the one that holds them all, and converts before and after."""
    a, b = (_converted(operand, dtype) if isinstance(operand, Array) else operand for operand in (a, b))
    if made is out.dtype:
        _compute(operation, out, a, b)
        return
    result = _dense(out.storage.device, out.shape, made)
    _compute(operation, result, a, b)
    copy(out, result)


def _converted(array: Array, dtype: DType) -> Array:
    if array.dtype is dtype:
        return array
    converted = _dense(array.storage.device, array.shape, dtype)
    copy(converted, array)
    return converted


def _dense(device: Device, shape: Shape, dtype: DType) -> Array:
    return Array(scratch(device, prod(shape) * dtype.itemsize).storage, shape, contiguous_stride(shape), dtype)


@lru_cache(maxsize=4096)
def _plan(
    device: Device,
    operation: str,
    dtype: DType,
    shape: Shape,
    out_stride: Shape,
    a_shape: Shape | None,
    a_stride: Shape | None,
    b_shape: Shape | None,
    b_stride: Shape | None,
) -> Callable[..., None] | None:
    """A launch for operands of these layouts, None for a shape of no scalar (a number); None where nothing is to do."""
    count = prod(shape)
    if count == 0:
        return None
    none = (0,) * len(shape)
    given = [(a_shape, a_stride), (b_shape, b_stride)]
    strides = [none if s is None or t is None else broadcast(shape, s, t) for s, t in given]
    # A scalar fits every walk: it lies where the output lies.
    present = [i for i, (s, _) in enumerate(given) if s is not None]
    steps = walk(shape, out_stride, *[strides[i] for i in present])
    definitions = {"TYPE": compiler.cxx(dtype), "FLOATING": int(dtype.is_floating), "OPERATION": operation}
    scalars = "2d" if dtype.is_floating else "2q"
    if steps.is_dense:
        function = compiler.function(device, "elementwise.cu", "dense", **definitions)
        return launch.prepare(
            function, (launch.blocks(device, -(-count // _PER_THREAD)), 1), f"3Q{scalars}", "q", (count,)
        )
    steps = walk(shape, out_stride, *strides)
    return _strided(device, "elementwise.cu", definitions, count, steps, f"3Q{scalars}")


@lru_cache(maxsize=4096)
def _copy_plan(
    device: Device, to: DType, given: DType, shape: Shape, out_stride: Shape, a_shape: Shape, a_stride: Shape
) -> Callable[..., None] | None:
    count = prod(shape)
    if count == 0:
        return None
    steps = walk(shape, out_stride, broadcast(shape, a_shape, a_stride))
    definitions = {"OUTPUT": compiler.cxx(to), "INPUT": compiler.cxx(given)}
    if steps.is_dense:
        function = compiler.function(device, "copy.cu", "dense", **definitions)
        return launch.prepare(function, (launch.blocks(device, -(-count // _PER_THREAD)), 1), "2Q", "q", (count,))
    return _strided(device, "copy.cu", definitions, count, steps, "2Q")


def _strided(
    device: Device, file: str, definitions: dict[str, Any], count: int, steps: Walk, varying: str
) -> Callable[..., None]:
    name, threads = "strided", count
    if steps.is_dense_in_order:
        name, threads, steps = "gathered", -(-count // 4), steps.without_first()
    return launch.prepare(
        compiler.function(device, file, name, **definitions),
        (launch.blocks(device, threads, per_multiprocessor=32), 1),
        varying,
        f"q{steps.code()}",
        (count, *steps.values()),
    )
