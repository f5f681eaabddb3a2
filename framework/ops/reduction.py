"""Reductions: sum, mean, and the place of the maximum."""

from __future__ import annotations

from operator import index

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.dtype import float32, int64
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime

Dims = int | tuple[int, ...] | None


class Sum(Operation):
    name = "sum"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> Array:
        out = kernels.empty(_reduced(a.shape, axes, keepdims), a.dtype if a.dtype.is_floating else int64)
        kernels.sum(out, a, axes=axes, keepdims=keepdims)
        node.note = (a.shape, axes)
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        shape, axes = node.note
        return _spread(grad, shape, axes)


class Mean(Operation):
    name = "mean"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> Array:
        out = kernels.empty(_reduced(a.shape, axes, keepdims), a.dtype if a.dtype.is_floating else float32)
        kernels.mean(out, a, axes=axes, keepdims=keepdims)
        node.note = (a.shape, axes, a.size / max(out.size, 1))
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        shape, axes, count = node.note
        share = kernels.empty_like(grad)
        kernels.divide(share, grad, max(count, 1))
        return _spread(share, shape, axes)


class Argmax(Operation):
    name = "argmax"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, axis: int) -> Array:
        out = kernels.empty(_reduced(a.shape, (axis,), False), int64)
        kernels.argmax(out, a, axis=axis)
        return out


def sum(a: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Σ a over the dimensions `dim`; over all where it is None."""
    return apply(Sum, a, axes=_axes(a, dim), keepdims=keepdim)


def mean(a: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean of a over the dimensions `dim`; over all where it is None."""
    return apply(Mean, a, axes=_axes(a, dim), keepdims=keepdim)


def argmax(a: Tensor, dim: int) -> Tensor:
    """The place of the largest element along `dim`, of type int64; the first of equals."""
    (axis,) = _axes(a, dim)
    if a.shape[axis] == 0:
        raise ValueError(f"argmax over dimension {dim} of shape {list(a.shape)}, which is empty")
    return apply(Argmax, a.detach(), axis=axis)


def _axes(a: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None:
        return tuple(range(a.ndim))
    dims = tuple([index(d) for d in ((dim,) if hasattr(dim, "__index__") else dim)])
    for d in dims:
        if not -a.ndim <= d < a.ndim:
            raise IndexError(f"dimension {d} of a tensor with {a.ndim} dimensions")
    axes = tuple([d % a.ndim for d in dims])
    if len(set(axes)) != len(axes):
        raise ValueError(f"dimensions {dims} name one twice")
    return axes


def _reduced(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> tuple[int, ...]:
    if keepdims:
        return tuple([1 if i in axes else extent for i, extent in enumerate(shape)])
    return tuple([extent for i, extent in enumerate(shape) if i not in axes])


def _spread(grad: Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> Array:
    """`grad` repeated along `axes` to `shape`, as a view that takes no memory."""
    kept = iter(grad.stride if grad.ndim < len(shape) else [s for i, s in enumerate(grad.stride) if i not in axes])
    return grad.view(shape, tuple([0 if i in axes else next(kept) for i in range(len(shape))]))
