"""Optimizer updates in CUDA C++: all parameters in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, elementwise, launch
from framework.kernels.cuda.geometry import Shape, walk
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, contiguous_stride

# How many tensors one launch takes: the least of these that holds all. An argument block may have 32764 bytes.
_CAPACITIES = (16, 64, 192, 512, 1000)
_CHUNK_BYTES = 256 * 4 * 16
_HAS_BUFFER, _IS_FIRST, _NESTEROV = 1, 2, 4

Arrays = tuple[Array, ...]


@kernel(outputs=2)
def sgd_step(
    parameters: Array | Arrays,
    momentum_buffers: Array | Arrays | None,
    grads: Array | Arrays,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    """As the reference kernel of the same name, for one parameter or a tuple of them."""
    parameters, grads = _many(parameters), _many(grads)
    has_buffers = momentum_buffers is not None
    buffers = _many(momentum_buffers) if momentum_buffers is not None else parameters
    flags = _HAS_BUFFER * has_buffers | _IS_FIRST * bool(first) | _NESTEROV * bool(nesterov)
    numbers = (lr, momentum, 1 - dampening, weight_decay, flags)
    for dtype in {parameter.dtype for parameter in parameters}:
        own = [i for i, parameter in enumerate(parameters) if parameter.dtype is dtype]
        for start in range(0, len(own), _CAPACITIES[-1]):
            some = own[start : start + _CAPACITIES[-1]]
            _step(
                dtype, [parameters[i] for i in some], [buffers[i] for i in some], [grads[i] for i in some],
                numbers, has_buffers,
            )  # fmt: skip


def _many(arrays: Array | Arrays) -> Arrays:
    return (arrays,) if isinstance(arrays, Array) else arrays


def _step(
    dtype: DType, parameters: list[Array], buffers: list[Array], grads: list[Array], numbers: tuple, has_buffers: bool
) -> None:
    """One launch, for parameters of one type."""
    device = parameters[0].storage.device
    back: list[tuple[Array, Array]] = []
    shapes = tuple([parameter.shape for parameter in parameters])
    strides = [tuple([array.stride for array in arrays]) for arrays in (parameters, buffers, grads)]
    odd = set(_differing(shapes, *strides))
    odd.update(i for i, grad in enumerate(grads) if grad.dtype is not dtype or buffers[i].dtype is not dtype)
    for i in odd:
        stride = contiguous_stride(shapes[i])
        parameters[i], buffers[i] = (_in_layout(a, stride, dtype, back) for a in (parameters[i], buffers[i]))
        grads[i] = _in_layout(grads[i], stride, dtype, None)
    capacity, run = _plan(device, dtype, shapes)
    if run is None:
        return
    rest = [0] * (capacity - len(parameters))
    run(
        launch.stream(device),
        *[array.ptr for array in parameters], *rest,
        *([array.ptr for array in buffers] if has_buffers else [0] * len(parameters)), *rest,
        *[array.ptr for array in grads], *rest,
        *numbers,
    )  # fmt: skip
    for array, stand_in in back:
        elementwise.copy(array, stand_in)


@lru_cache(maxsize=64)
def _plan(device: Device, dtype: DType, shapes: tuple[Shape, ...]) -> tuple[int, Callable[..., None] | None]:
    counts = [prod(shape) for shape in shapes]
    capacity = next(size for size in _CAPACITIES if len(counts) <= size)
    chunk = _CHUNK_BYTES // dtype.itemsize
    first = [0]
    for count in counts:
        first.append(first[-1] + -(-count // chunk))
    if first[-1] == 0:
        return capacity, None
    rest = [0] * (capacity - len(counts))
    launched = launch.prepare(
        compiler.function(device, "optimizer.cu", "sgd_step", TYPE=compiler.cxx(dtype), MOST=capacity),
        (first[-1], 1),
        f"{3 * capacity}Q4dq",
        f"{2 * capacity + 2}i",
        (*first, *rest, *counts, *rest, len(counts)),
    )
    return capacity, launched


def _in_layout(array: Array, stride: Shape, dtype: DType, back: list[tuple[Array, Array]] | None) -> Array:
    """The array itself where it lies as wanted, else a copy that does; noted in `back` if it is written."""
    if array.stride == stride and array.dtype is dtype:
        return array
    room = scratch(array.storage.device, prod(array.shape) * dtype.itemsize)
    stand_in = Array(room.storage, array.shape, stride, dtype)
    elementwise.copy(stand_in, array)
    if back is not None:
        back.append((array, stand_in))
    return stand_in


@lru_cache(maxsize=64)
def _differing(
    shapes: tuple[Shape, ...], parameters: tuple[Shape, ...], buffers: tuple[Shape, ...], grads: tuple[Shape, ...]
) -> list[int]:
    """Which parameters do not lie densely and alike with their buffers and gradients, given the strides of all."""
    return [
        i
        for i, (shape, *strides) in enumerate(zip(shapes, parameters, buffers, grads, strict=True))
        if prod(shape) and not walk(shape, *strides).is_dense
    ]
