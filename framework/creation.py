"""Making tensors: from values, filled, and random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from framework import dtype as dtypes
from framework.device import Device, cpu
from framework.dtype import DType
from framework.ops.checks import check_number
from framework.random import default_generator
from framework.tensor import Tensor
from framework.vm.runtime import Runtime, runtime

Shape = int | Sequence[int]


def tensor(data: Any, *, dtype: DType | None = None, device: Device | str = cpu, requires_grad: bool = False) -> Tensor:
    """A new tensor with the values of `data`: numbers, nested sequences, a NumPy array, or a tensor.

    Python floats become float32. Raises TypeError for values that are no numbers.
    """
    if isinstance(data, Tensor):
        values = runtime(data.device).to_host(data.array)
        dtype = dtype or data.dtype
    else:
        values = np.asarray(data)
        if dtype is None and values.dtype == np.float64 and not isinstance(data, np.ndarray | np.generic):
            dtype = dtypes.float32
    if dtype is None:
        dtype = dtypes.from_numpy(values.dtype)
    elif values.dtype.kind not in "bifu":
        raise TypeError(f"a tensor holds numbers, not {values.dtype}")
    return Tensor(_runtime(device).from_host(values, _type(dtype))).requires_grad_(requires_grad)


def from_numpy(values: np.ndarray) -> Tensor:
    """A new tensor with a copy of a NumPy array's values, of its element type."""
    return tensor(np.asarray(values))


def empty(
    *shape: Shape, dtype: DType = dtypes.float32, device: Device | str = cpu, requires_grad: bool = False
) -> Tensor:
    """A tensor with undefined values."""
    return Tensor(_runtime(device).empty(_shape(shape), _type(dtype))).requires_grad_(requires_grad)


def full(
    shape: Shape,
    value: float,
    *,
    dtype: DType | None = None,
    device: Device | str = cpu,
    requires_grad: bool = False,
) -> Tensor:
    """A tensor with `value` everywhere; int64 for an integer, bool for a truth value, else float32, where nothing is said."""
    check_number("full", value)
    if dtype is None:
        is_truth, is_whole = isinstance(value, bool | np.bool_), isinstance(value, int | np.integer)
        dtype = dtypes.bool_ if is_truth else dtypes.int64 if is_whole else dtypes.float32
    return Tensor(_runtime(device).full(_shape((shape,)), value, _type(dtype))).requires_grad_(requires_grad)


def zeros(*shape: Shape, dtype: DType | None = None, device: Device | str = cpu, requires_grad: bool = False) -> Tensor:
    """A tensor of zeros, float32 where nothing is said."""
    return full(_shape(shape), 0, dtype=dtype or dtypes.float32, device=device, requires_grad=requires_grad)


def ones(*shape: Shape, dtype: DType | None = None, device: Device | str = cpu, requires_grad: bool = False) -> Tensor:
    """A tensor of ones, float32 where nothing is said."""
    return full(_shape(shape), 1, dtype=dtype or dtypes.float32, device=device, requires_grad=requires_grad)


def zeros_like(like: Tensor) -> Tensor:
    """Zeros of the shape, element type, device and memory order of `like`."""
    kernels = runtime(like.device)
    made = kernels.empty_like(like.array)
    kernels.fill(made, value=0)
    return Tensor(made)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: Device | str = cpu,
    requires_grad: bool = False,
) -> Tensor:
    """The numbers from `start` (0 where only one is given) up to but without `stop`; int64 for integers."""
    if stop is None:
        start, stop = 0, start
    for given in (start, stop, step):
        check_number("arange", given)
    if step == 0:
        raise ValueError(f"arange() from {start} to {stop} needs a step that is not 0")
    values = np.arange(start, stop, step)
    kind = dtypes.float32 if values.dtype.kind == "f" else dtypes.int64
    return tensor(values, dtype=dtype or kind, device=device, requires_grad=requires_grad)


def rand(
    *shape: Shape, dtype: DType = dtypes.float32, device: Device | str = cpu, requires_grad: bool = False
) -> Tensor:
    """Numbers drawn uniformly from [0, 1)."""
    made = empty(*shape, dtype=dtype, device=device, requires_grad=requires_grad)
    default_generator.uniform(made.array, 0.0, 1.0)
    return made


def randn(
    *shape: Shape, dtype: DType = dtypes.float32, device: Device | str = cpu, requires_grad: bool = False
) -> Tensor:
    """Numbers drawn from the standard normal distribution."""
    made = empty(*shape, dtype=dtype, device=device, requires_grad=requires_grad)
    default_generator.normal(made.array, 0.0, 1.0)
    return made


def _runtime(device: Device | str) -> Runtime:
    return runtime(device if isinstance(device, Device) else Device(device))


def _type(dtype: DType) -> DType:
    """`dtype` itself. Raises TypeError for what is none, such as its name."""
    if not isinstance(dtype, DType):
        raise TypeError(f"dtype is one of {', '.join(map(repr, dtypes.ALL))}; got {dtype!r}")
    return dtype


def _shape(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape given as separate extents or as one sequence. Raises TypeError for what is no integer, ValueError below 0."""
    try:
        extents = tuple([index(extent) for extent in _extents(shape)])
    except TypeError:
        raise TypeError(f"a shape is made of integers; got {', '.join(map(repr, shape)) or 'nothing'}") from None
    if any(extent < 0 for extent in extents):
        raise ValueError(f"a shape has no negative extents: {list(extents)}")
    return extents


def _extents(shape: tuple[Any, ...]) -> Iterable[Any]:
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], SupportsIndex) else shape
