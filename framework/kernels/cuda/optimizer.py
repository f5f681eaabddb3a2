"""Optimizer updates in CUDA C++: all parameters in one launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, elementwise, launch
from framework.kernels.cuda.geometry import walk
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, Layout, contiguous_stride, group

# How many tensors one launch takes: the least of these that holds all. An argument block may have 32764 bytes.
_CAPACITIES = (16, 64, 192, 512, 900)
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
    parameters, grads = group(parameters), group(grads)
    buffers = None if momentum_buffers is None else group(momentum_buffers)
    flags = _HAS_BUFFER * (buffers is not None) | _IS_FIRST * bool(first) | _NESTEROV * bool(nesterov)
    numbers = (lr, momentum, 1 - dampening, weight_decay, flags)
    layouts = tuple([parameter.layout for parameter in parameters])
    types = _types(layouts)
    if len(types) == 1 and len(parameters) <= _CAPACITIES[-1]:
        _step(types[0], list(parameters), None if buffers is None else list(buffers), list(grads), numbers)
        return
    for dtype in types:
        own = [i for i, parameter in enumerate(parameters) if parameter.dtype is dtype]
        for start in range(0, len(own), _CAPACITIES[-1]):
            some = own[start : start + _CAPACITIES[-1]]
            taken = [None if arrays is None else [arrays[i] for i in some] for arrays in (parameters, buffers, grads)]
            _step(dtype, taken[0] or [], taken[1], taken[2] or [], numbers)


@lru_cache(maxsize=64)
def _types(layouts: tuple[Layout, ...]) -> list[DType]:
    return list({layout.dtype for layout in layouts})


def _step(
    dtype: DType, parameters: list[Array], buffers: list[Array] | None, grads: list[Array], numbers: tuple
) -> None:
    """One launch, for parameters of one type. This runs in every step of training, over hundreds of arrays."""
    device = parameters[0].storage.device
    capacity, run, odd = _plan(
        device,
        dtype,
        tuple([array.layout for array in parameters]),
        None if buffers is None else tuple([array.layout for array in buffers]),
        tuple([array.layout for array in grads]),
    )
    if run is None:
        return
    back: list[tuple[Array, Array]] = []
    for i in odd:
        parameters[i] = _stand_in(parameters[i], dtype, back)
        grads[i] = _stand_in(grads[i], dtype, None)
        if buffers is not None:
            buffers[i] = _stand_in(buffers[i], dtype, back)
    rest = [0] * (capacity - len(parameters))
    given = [array.ptr for array in parameters]
    held = [0] * len(given) if buffers is None else [array.ptr for array in buffers]
    taken = [array.ptr for array in grads]
    run(launch.stream(device), *given, *rest, *held, *rest, *taken, *rest, *numbers)
    for array, stand_in in back:
        elementwise.copy(array, stand_in)


@lru_cache(maxsize=64)
def _plan(
    device: Device,
    dtype: DType,
    parameters: tuple[Layout, ...],
    buffers: tuple[Layout, ...] | None,
    grads: tuple[Layout, ...],
) -> tuple[int, Callable[..., None] | None, list[int]]:
    """The capacity of the launch, the launch, and which parameters do not lie densely and like their gradients."""
    counts = [prod(layout.shape) for layout in parameters]
    odd = [
        i
        for i, (count, own, held, grad) in enumerate(zip(counts, parameters, buffers or parameters, grads, strict=True))
        if count and not (walk(own.shape, own.stride, held.stride, grad.stride).is_dense and grad.dtype is dtype)
    ]
    capacity = next(size for size in _CAPACITIES if len(counts) <= size)
    chunk = _CHUNK_BYTES // dtype.itemsize
    first = [0]
    for count in counts:
        first.append(first[-1] + -(-count // chunk))
    if first[-1] == 0:
        return capacity, None, odd
    rest = [0] * (capacity - len(counts))
    run = launch.prepare(
        compiler.function(device, "optimizer.cu", "sgd_step", TYPE=compiler.cxx(dtype), MOST=capacity),
        (first[-1], 1),
        f"{3 * capacity}Q4dq",
        f"{capacity}q{capacity + 2}i",
        (*counts, *rest, *first, *rest, len(counts)),
    )
    return capacity, run, odd


def _stand_in(array: Array, dtype: DType, back: list[tuple[Array, Array]] | None) -> Array:
    """A dense copy of the array; noted in `back` if it is written."""
    room = scratch(array.storage.device, prod(array.shape) * dtype.itemsize)
    copied = Array(room.storage, array.shape, contiguous_stride(array.shape), dtype)
    elementwise.copy(copied, array)
    if back is not None:
        back.append((array, copied))
    return copied
