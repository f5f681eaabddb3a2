"""Writing in place: the result takes the memory of the first operand."""

from __future__ import annotations

from typing import Any

from framework.autograd.function import Operation, apply_in_place
from framework.autograd.node import Node
from framework.dtype import bool_
from framework.ops.checks import check_number, check_tensor
from framework.ops.elementwise import broadcast_shape, convert, number_for, sum_to_shape
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime


class AddInPlace(Operation):
    name = "add_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Any, *, scale: float) -> Array:
        node.note = (_kind(b), scale)
        b = _fitting(kernels, a, b)
        if scale != 1:
            scale = _fitting(kernels, a, scale)
        # A number as it is where that can be: -2 is no uint8, and True * 1 no truth value.
        if scale == 1:
            kernels.add(a, a, b)
        elif scale == -1:
            kernels.subtract(a, a, b)
        elif not isinstance(b, Array):
            kernels.add(a, a, b * scale)
        else:
            scaled = kernels.empty_like(b)
            kernels.multiply(scaled, b, scale)
            kernels.add(a, a, scaled)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        kind, scale = node.note
        if not node.needs[1]:
            return grad, None
        grad_b = sum_to_shape(kernels, grad, kind[0])
        if scale != 1:
            scaled = kernels.empty_like(grad_b)
            kernels.multiply(scaled, grad_b, scale)
            grad_b = scaled
        return grad, convert(kernels, grad_b, kind[1])


class MultiplyInPlace(Operation):
    name = "mul_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Any) -> Array:
        kind, b = _kind(b), _fitting(kernels, a, b)
        _keep(node, kernels, a, b, kind, needs_b=node.needs[0] is not None)
        kernels.multiply(a, a, b)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        before, b = node.saved
        kind, number = node.note
        grad_a = _result(kernels.multiply, kernels, grad, number if b is None else b) if node.needs[0] else None
        if not node.needs[1]:
            return grad_a, None
        grad_b = _result(kernels.multiply, kernels, grad, before)
        return grad_a, convert(kernels, sum_to_shape(kernels, grad_b, kind[0]), kind[1])


class DivideInPlace(Operation):
    name = "div_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Any) -> Array:
        if not a.dtype.is_floating:
            raise TypeError(f"div_ takes floating-point operands; got {a.dtype}; convert with .to(flow.float32)")
        kind, b = _kind(b), _fitting(kernels, a, b)
        _keep(node, kernels, a, b, kind, needs_b=True)
        kernels.divide(a, a, b)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        before, b = node.saved
        kind, number = node.note
        grad_a = _result(kernels.divide, kernels, grad, number if b is None else b)
        if not node.needs[1]:
            return grad_a, None
        # -grad · a / b²
        grad_b = _result(kernels.divide, kernels, _result(kernels.multiply, kernels, grad_a, before), b)
        kernels.negative(grad_b, grad_b)
        return grad_a, convert(kernels, sum_to_shape(kernels, grad_b, kind[0]), kind[1])


class CopyInPlace(Operation):
    name = "copy_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Array) -> Array:
        broadcast_into(a, b)
        kernels.copy(a, b)
        node.note = (b.shape, b.dtype)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        shape, dtype = node.note
        return None, convert(kernels, sum_to_shape(kernels, grad, shape), dtype) if node.needs[1] else None


class FillInPlace(Operation):
    name = "fill_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, value: float) -> Array:
        kernels.fill(a, value=value)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> None:
        return None


def add_(a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
    """a += alpha · b."""
    return apply_in_place(AddInPlace, a, b, scale=alpha)


def sub_(a: Tensor, b: Tensor | float, *, alpha: float = 1) -> Tensor:
    """a -= alpha · b."""
    return apply_in_place(AddInPlace, a, b, scale=-alpha)


def mul_(a: Tensor, b: Tensor | float) -> Tensor:
    """a *= b."""
    return apply_in_place(MultiplyInPlace, a, b)


def div_(a: Tensor, b: Tensor | float) -> Tensor:
    """a /= b. Raises TypeError unless a holds floats."""
    return apply_in_place(DivideInPlace, a, b)


def copy_(a: Tensor, b: Tensor) -> Tensor:
    """a = b, broadcast to its shape and converted to its type."""
    check_tensor("copy_", b)
    return apply_in_place(CopyInPlace, a, b)


def fill_(a: Tensor, value: float) -> Tensor:
    """a = value, everywhere."""
    check_number("fill_", value)
    return apply_in_place(FillInPlace, a, value=value)


def zero_(a: Tensor) -> Tensor:
    """a = 0, everywhere."""
    return fill_(a, 0)


def broadcast_into(a: Array, b: Array) -> None:
    """Raises ValueError unless b can be broadcast to the shape of a."""
    if broadcast_shape(a.shape, b.shape) != a.shape:
        raise ValueError(f"a tensor of shape {list(b.shape)} does not fit in place of one of {list(a.shape)}")


def _kind(b: Any) -> tuple | None:
    """Shape and element type of an operand, which its gradient gets; None for a number."""
    return (b.shape, b.dtype) if isinstance(b, Array) else None


def _fitting(kernels: Runtime, a: Array, b: Any) -> Any:
    """The operand b in the element type of a. Raises TypeError where a cannot hold the result."""
    if not isinstance(b, Array):
        b = number_for(a, b)
        if a.dtype is bool_ and not isinstance(b, bool):
            raise TypeError(f"a bool tensor cannot hold the result with the number {b} in place")
        return b
    broadcast_into(a, b)
    if (b.dtype.is_floating and not a.dtype.is_floating) or (a.dtype is bool_ and b.dtype is not bool_):
        raise TypeError(f"a {a.dtype.name} tensor cannot hold the result with a {b.dtype.name} one in place")
    return convert(kernels, b, a.dtype)


def _keep(node: Node, kernels: Runtime, a: Array, b: Any, kind: tuple | None, *, needs_b: bool) -> None:
    """Saves what the gradients of a product or a quotient need: a copy of a for that of b, and b where `needs_b` is set.

    It comes before the write, so that an operand b which shares the memory of a is found to be gone.
    """
    before = None
    if node.recording and node.needs[1]:
        before = kernels.empty_like(a)
        kernels.copy(before, a)
    is_array = isinstance(b, Array)
    node.save(before, b if is_array and needs_b else None)
    node.note = (kind, None if is_array else b)


def _result(kernel: Any, kernels: Runtime, a: Array, b: Any) -> Array:
    out = kernels.empty_like(a)
    kernel(out, a, b)
    return out
