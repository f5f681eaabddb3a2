"""Views and copies: the same elements under another shape, or at another place."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from operator import index as as_integer
from typing import Any

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.device import Device
from framework.dtype import DType
from framework.ops.checks import check_tensor
from framework.ops.elementwise import broadcast_shape, convert, sum_to_shape
from framework.tensor import Tensor
from framework.vm.array import Array, contiguous_stride
from framework.vm.pinned import is_pinned
from framework.vm.runtime import Runtime, runtime
from framework.words import kind_of

Shape = tuple[int, ...]


class Reshape(Operation):
    name = "reshape"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, shape: tuple[int, ...]) -> Array:
        node.note = a.shape
        return _reshaped(kernels, a, shape)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return _reshaped(kernels, grad, node.note)


class Permute(Operation):
    name = "permute"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, dims: tuple[int, ...]) -> Array:
        node.note = dims
        return _permuted(a, dims)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        inverse = sorted(range(grad.ndim), key=node.note.__getitem__)
        return _permuted(grad, tuple(inverse))


class Expand(Operation):
    name = "expand"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, shape: tuple[int, ...]) -> Array:
        node.note = a.shape
        leading = len(shape) - a.ndim
        stride = tuple([0 if e == 1 else s for e, s in zip(a.shape, a.stride, strict=True)])
        return a.view(shape, (0,) * leading + stride)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return sum_to_shape(kernels, grad, node.note)


class Index(Operation):
    name = "index"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, key: Any) -> Array:
        node.note = (a.shape, key)
        return a.view(*_place(a, key))

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        shape, key = node.note
        whole = kernels.full(shape, 0, grad.dtype)
        kernels.copy(whole.view(*_place(whole, key)), grad)
        return whole


class Convert(Operation):
    name = "to"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, dtype: DType) -> Array:
        node.note = a.dtype
        return convert(kernels, a, dtype)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return convert(kernels, grad, node.note)


class Move(Operation):
    name = "to"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, device: Device, non_blocking: bool) -> Array:
        if non_blocking and is_pinned(a):
            return runtime(device).from_pinned(a)
        return runtime(device).from_host(kernels.to_host(a), a.dtype)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return kernels.from_host(runtime(grad.storage.device).to_host(grad), grad.dtype)


class Clone(Operation):
    name = "clone"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, row_major: bool) -> Array:
        out = kernels.empty(a.shape, a.dtype) if row_major else kernels.empty_like(a)
        kernels.copy(out, a)
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return grad


def reshape(a: Tensor, *shape: Any) -> Tensor:
    """The elements of a, in row-major order, in another shape; one extent may be -1. A view where strides allow it.

    Raises ValueError where the number of elements differs.
    """
    return _as_view(apply(Reshape, a, shape=_wanted(a, shape)), a)


def view(a: Tensor, *shape: Any) -> Tensor:
    """As `reshape`, but never a copy. Raises RuntimeError where only a copy would have that shape."""
    wanted = _wanted(a, shape)
    if reshaped_stride(a.shape, a.stride(), wanted) is None:
        raise RuntimeError(
            f"a tensor of shape {list(a.shape)} and strides {list(a.stride())} cannot be viewed as {list(wanted)};"
            " reshape() copies it"
        )
    return _as_view(apply(Reshape, a, shape=wanted), a)


def flatten(a: Tensor, start_dim: int = 0) -> Tensor:
    """Joins the dimensions from `start_dim` on into one."""
    check_tensor("flatten", a)
    first = _dimension(a, start_dim) if a.ndim else 0
    return reshape(a, *a.shape[:first], prod(a.shape[first:]))


def permute(a: Tensor, *dims: Any) -> Tensor:
    """A view with the dimensions in another order."""
    order = _extents(dims)
    dims = tuple([_dimension(a, d) for d in order])
    if sorted(dims) != list(range(a.ndim)):
        raise ValueError(f"permute of {a.ndim} dimensions got {list(order)}")
    return _as_view(apply(Permute, a, dims=dims), a)


def transpose(a: Tensor, first: int, second: int) -> Tensor:
    """A view with two dimensions exchanged."""
    order = list(range(a.ndim))
    first, second = _dimension(a, first), _dimension(a, second)
    order[first], order[second] = order[second], order[first]
    return permute(a, *order)


def expand(a: Tensor, *shape: Any) -> Tensor:
    """A view that repeats dimensions of extent 1, without copying."""
    wanted = _extents(shape)
    if broadcast_shape(a.shape, wanted) != wanted:
        raise ValueError(f"a tensor of shape {list(a.shape)} cannot be expanded to {list(wanted)}")
    return _as_view(apply(Expand, a, shape=wanted), a)


def index(a: Tensor, key: Any) -> Tensor:
    """The part of a that integers, slices with a positive step, None and `...` pick, as a view."""
    return _as_view(apply(Index, a, key=key), a)


def rows(a: Tensor) -> Iterator[Tensor]:
    """The slices along the first dimension, in order, as views. Raises TypeError for a tensor without dimensions."""
    if not a.shape:
        raise TypeError("a 0-d tensor has no rows to go through; item() gives its value")
    return (index(a, place) for place in range(a.shape[0]))


def convert_to(a: Tensor, dtype: DType) -> Tensor:
    """a in another element type; itself where it is of that type."""
    return a if a.dtype is dtype else apply(Convert, a, dtype=dtype)


def move_to(a: Tensor, device: Device, *, non_blocking: bool) -> Tensor:
    """A copy of a on another device; `non_blocking` lets one from pinned memory go on beside the host."""
    return apply(Move, a, device=device, non_blocking=non_blocking)


def clone(a: Tensor) -> Tensor:
    """A copy with the same order of dimensions in memory."""
    return apply(Clone, a, row_major=False)


def contiguous(a: Tensor) -> Tensor:
    """a densely in row-major order: itself, or a copy."""
    return a if a.is_contiguous() else apply(Clone, a, row_major=True)


def _as_view(result: Tensor, base: Tensor) -> Tensor:
    if result.array.storage is base.array.storage:
        result.show(base)
    return result


def _dimension(a: Tensor, dim: int) -> int:
    """`dim` counted from the first. Raises IndexError where there is no such dimension."""
    if not -a.ndim <= dim < a.ndim:
        raise IndexError(f"dimension {dim} of a tensor with {a.ndim} dimensions")
    return dim % a.ndim


def _extents(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Integers given one by one or as one sequence. Raises TypeError for what is none."""
    extents = given[0] if len(given) == 1 and not hasattr(given[0], "__index__") else given
    try:
        return tuple([as_integer(extent) for extent in extents])
    except TypeError:
        raise TypeError(f"extents and dimensions are integers; got {', '.join(map(repr, given))}") from None


def _wanted(a: Tensor, given: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape that is asked of a, with the extent that -1 stands for."""
    extents = _extents(given)
    wanted = list(extents)
    if wanted.count(-1) == 1:
        known = prod(extent for extent in wanted if extent != -1)
        wanted[wanted.index(-1)] = a.numel() // known if known else 0
    if prod(wanted) != a.numel() or any(extent < 0 for extent in wanted):
        raise ValueError(f"a tensor of shape {list(a.shape)} cannot be reshaped to {list(extents)}")
    return tuple(wanted)


def _reshaped(kernels: Runtime, a: Array, shape: tuple[int, ...]) -> Array:
    stride = reshaped_stride(a.shape, a.stride, shape)
    if stride is not None:
        return a.view(shape, stride)
    dense = kernels.empty(a.shape, a.dtype)
    kernels.copy(dense, a)
    return dense.view(shape, contiguous_stride(shape))


@lru_cache(maxsize=4096)
def reshaped_stride(shape: Shape, stride: Shape, wanted: Shape) -> Shape | None:
    """The strides under which the same elements, in the same order, have the shape `wanted`; None where none do."""
    if 0 in shape:
        return contiguous_stride(wanted)
    # Runs of elements that are one step apart, each over as many dimensions as it goes.
    runs: list[tuple[int, int]] = []
    for extent, step in zip(shape, stride, strict=True):
        if extent != 1:
            size = runs.pop()[0] if runs and runs[-1][1] == extent * step else 1
            runs.append((size * extent, step))
    left, step, found = 1, 1, []
    for extent in reversed(wanted):
        if extent != 1 and left == 1:
            left, step = runs.pop()
        if left % extent:
            return None
        found.append(step)
        left, step = left // extent, step * extent
    return tuple(reversed(found))


def _permuted(a: Array, dims: tuple[int, ...]) -> Array:
    return a.view(tuple([a.shape[d] for d in dims]), tuple([a.stride[d] for d in dims]))


def _place(a: Array, key: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset of the part of an array that an index picks."""
    keys = list(key) if isinstance(key, tuple) else [key]
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if taken > a.ndim:
        raise IndexError(f"{taken} indices for a tensor with {a.ndim} dimensions")
    # By identity: a tensor among the keys would be compared element by element.
    at = next((place for place, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (a.ndim - taken)
    shape, stride, offset, dim = [], [], 0, 0
    for k in keys:
        if k is None:
            shape.append(1)
            stride.append(0)
            continue
        extent, step = a.shape[dim], a.stride[dim]
        if isinstance(k, slice):
            start, stop, by = k.indices(extent)
            if by < 0:
                raise IndexError("a slice takes a positive step")
            shape.append(max(0, -(-(stop - start) // by)))
            stride.append(step * by)
            offset += start * step
        elif hasattr(k, "__index__") and not isinstance(k, bool):
            k = as_integer(k)
            if not -extent <= k < extent:
                raise IndexError(f"index {k} of dimension {dim} with {extent} elements")
            offset += (k % extent) * step
        else:
            way_out = "; int() of a tensor with one element is such an integer" if isinstance(k, Tensor) else ""
            raise TypeError(f"an index is an integer, a slice, None or ..., not {kind_of(k)}{way_out}")
        dim += 1
    # Behind the last element there is no memory to point to, and of no elements none is needed.
    return tuple(shape), tuple(stride), 0 if 0 in shape else offset
