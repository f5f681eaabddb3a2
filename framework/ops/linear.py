"""Matrix products."""

from __future__ import annotations

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.ops.checks import check_floats, check_tensor
from framework.ops.elementwise import broadcast_shape, sum_to_shape
from framework.tensor import Tensor
from framework.vm.array import Array, Layout
from framework.vm.runtime import Runtime
from framework.words import kind_of


class MatMul(Operation):
    name = "matmul"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Array) -> Array:
        node.save(a if node.needs[1] else None, b if node.needs[0] else None)
        node.note = (a.shape, b.shape)
        return _product(kernels, a, b)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        a, b = node.saved
        a_shape, b_shape = node.note
        grad_a = grad_b = None
        if node.needs[0]:
            grad_a = sum_to_shape(kernels, _product(kernels, grad, _transposed(b)), a_shape)
        if node.needs[1]:
            grad_b = sum_to_shape(kernels, _product(kernels, _transposed(a), grad), b_shape)
        return grad_a, grad_b


class Linear(Operation):
    name = "linear"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array, weight: Array, bias: Array | None) -> Array:
        y = kernels.empty((x.shape[0], weight.shape[0]), x.dtype)
        kernels.linear(y, x, weight, bias)
        node.save(x if node.needs[1] else None, weight if node.needs[0] else None)
        node.note = (x.shape, Layout.like(weight.layout))
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight = node.saved
        x_shape, like_weight = node.note
        grads = (
            kernels.empty(x_shape, grad_y.dtype) if node.needs[0] else None,
            node.room(1, like_weight) if node.needs[1] else None,
            node.room(2, Layout.of(like_weight.shape[:1], (1,), like_weight.dtype)) if node.needs[2] else None,
        )
        kernels.linear_backward(*grads, grad_y, x, weight)
        return grads


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b: [..., M, K] times [..., K, N] gives [..., M, N]; leading dimensions broadcast.

    Raises ValueError where the shapes do not fit.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"matmul takes two tensors; got {kind_of(a)} and {kind_of(b)}")
    left, right = a.array.shape, b.array.shape
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        raise ValueError(f"matmul takes [..., M, K] and [..., K, N]; got {list(a.shape)} and {list(b.shape)}")
    if a.dtype is not b.dtype:
        raise TypeError(f"matmul takes operands of one type; got {a.dtype} and {b.dtype}; convert with .to()")
    return apply(MatMul, a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, with x [N, I], weight [O, I], bias [O]; gives [N, O]."""
    check_tensor("linear", x)
    check_tensor("linear", weight)
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear takes x [N, I] and weight [O, I]; got {list(x.shape)} and {list(weight.shape)}")
    check_floats("linear", x, weight, bias)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"linear with {weight.shape[0]} outputs got a bias of shape {list(bias.shape)}")
    return apply(Linear, x, weight, bias)


def _product(kernels: Runtime, a: Array, b: Array) -> Array:
    left, right = a.shape, b.shape
    if len(left) == len(right) == 2:
        c = kernels.empty((left[0], right[1]), a.dtype)
    else:
        c = kernels.empty((*broadcast_shape(left[:-2], right[:-2]), left[-2], right[-1]), a.dtype)
    kernels.matmul(c, a, b)
    return c


def _transposed(a: Array) -> Array:
    shape, stride = a.shape, a.stride
    return a.view((*shape[:-2], shape[-1], shape[-2]), (*stride[:-2], stride[-1], stride[-2]))
