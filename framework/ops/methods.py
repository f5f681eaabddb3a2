"""The operators and methods of Tensor that compute: which operation each one is."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.destination import destination
from framework.device import Device, DeviceLike, cuda_device
from framework.device import cpu as host
from framework.dtype import DType, float32, float64, int64
from framework.ops import elementwise, inplace, linear, reduction, view
from framework.tensor import Tensor
from framework.vm import pinned


def to(
    a: Tensor,
    target: DType | Device | str | Tensor | None = None,
    dtype: DType | None = None,
    *,
    device: Device | str | None = None,
    non_blocking: bool = False,
) -> Tensor:
    """a on another device, in another element type, or both; itself where nothing changes. A tensor as target gives both.

    `non_blocking` lets a copy from pinned memory to a device go on beside the host. Whatever uses the copy comes after it,
    and so does whoever writes to `a` by an operation, or takes its values by `numpy()`, from then on.
    """
    where, kind = destination(target, dtype, device)
    # The host has not all kernels that devices have: a type that it only keeps is left before a tensor comes, and met after.
    if kind is not None and where is host:
        a, kind = view.convert_to(a, kind), None
    if where is not None and where is not a.device:
        a = view.move_to(a, where, non_blocking=non_blocking)
    return a if kind is None else view.convert_to(a, kind)


def cuda(a: Tensor, device: DeviceLike = None, non_blocking: bool = False) -> Tensor:
    """a on a CUDA device: the current one, or that of a name or number; itself where it is there. As `to` otherwise."""
    return to(a, cuda_device(device), non_blocking=non_blocking)


def cpu(a: Tensor) -> Tensor:
    """a on the CPU; itself where it is there."""
    return to(a, host)


def assign(a: Tensor, key: Any, value: Any) -> None:
    """a[key] = value, a number or a tensor that broadcasts to that part of a, which `key` picks as in `a[key]`.

    Raises RuntimeError where backward would need it recorded.
    """
    part = view.index(a, key)
    if isinstance(value, Tensor):
        inplace.copy_(part, value)
    else:
        inplace.fill_(part, value)


def to_float(a: Tensor) -> Tensor:
    """a as float32; itself where it is."""
    return to(a, float32)


def to_double(a: Tensor) -> Tensor:
    """a as float64; itself where it is."""
    return to(a, float64)


def to_long(a: Tensor) -> Tensor:
    """a as int64; itself where it is."""
    return to(a, int64)


def dim(a: Tensor) -> int:
    """The number of dimensions."""
    return a.ndim


def pin_memory(a: Tensor) -> Tensor:
    """A copy of a, a tensor on the CPU, in memory that devices read by themselves; itself where it lies there already."""
    if a.device is not host:
        raise RuntimeError(f"pin_memory() is for tensors on the CPU; this one is on {a.device}")
    return a if is_pinned(a) else Tensor(pinned.pinned(a.array))


def is_pinned(a: Tensor) -> bool:
    """Whether a lies in memory that `pin_memory()` gave."""
    return pinned.is_pinned(a.array)


def _reversed(operation: Any) -> Any:
    return lambda a, b: operation(b, a)


def _comparing(operation: Any) -> Any:
    """`operation` for `==` and `!=`, which know what a tensor can be compared with and leave the rest to Python."""
    return lambda a, b: operation(a, b) if isinstance(b, _COMPARABLE) else NotImplemented


# An array is refused by name: it would otherwise be unequal to every tensor, without a word.
_COMPARABLE = (Tensor, int, float, np.generic, np.ndarray)

METHODS = {
    "__add__": elementwise.add,
    "__radd__": elementwise.add,
    "__sub__": elementwise.subtract,
    "__rsub__": _reversed(elementwise.subtract),
    "__mul__": elementwise.multiply,
    "__rmul__": elementwise.multiply,
    "__truediv__": elementwise.divide,
    "__rtruediv__": _reversed(elementwise.divide),
    "__neg__": elementwise.negative,
    "__eq__": _comparing(elementwise.equal),
    "__ne__": _comparing(elementwise.not_equal),
    "__matmul__": linear.matmul,
    "__rmatmul__": _reversed(linear.matmul),
    # All that have an operator: without these Python would bind the name to a new tensor, and the old one stay as it was.
    "__iadd__": inplace.add_,
    "__isub__": inplace.sub_,
    "__imul__": inplace.mul_,
    "__itruediv__": inplace.div_,
    "__getitem__": view.index,
    "__setitem__": assign,
    "__iter__": view.rows,
    "exp": elementwise.exp,
    "log": elementwise.log,
    "sqrt": elementwise.sqrt,
    "relu": elementwise.relu,
    "sum": reduction.sum,
    "mean": reduction.mean,
    "argmax": reduction.argmax,
    "matmul": linear.matmul,
    "reshape": view.reshape,
    "view": view.view,
    "flatten": view.flatten,
    "permute": view.permute,
    "transpose": view.transpose,
    "expand": view.expand,
    "clone": view.clone,
    "contiguous": view.contiguous,
    "to": to,
    "float": to_float,
    "double": to_double,
    "long": to_long,
    "dim": dim,
    "cuda": cuda,
    "cpu": cpu,
    "pin_memory": pin_memory,
    "is_pinned": is_pinned,
    "add_": inplace.add_,
    "sub_": inplace.sub_,
    "mul_": inplace.mul_,
    "div_": inplace.div_,
    "copy_": inplace.copy_,
    "fill_": inplace.fill_,
    "zero_": inplace.zero_,
}

for _name, _function in METHODS.items():
    setattr(Tensor, _name, _function)
# Defining `==` between elements would otherwise make tensors unhashable.
Tensor.__hash__ = object.__hash__  # type: ignore[method-assign]
