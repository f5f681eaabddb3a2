"""Writing in place: the result takes the memory of the first operand."""

from __future__ import annotations

from typing import Any

from framework.autograd.function import Operation, apply_in_place
from framework.autograd.node import Node
from framework.ops.elementwise import broadcast_shape, convert, sum_to_shape
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
            if isinstance(b, Array):
                scaled = kernels.empty_like(b)
                kernels.multiply(scaled, b, scale)
                b = scaled
            else:
                b = b * scale
        kernels.add(a, a, b)
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
        kind = _kind(b)
        b = _fitting(kernels, a, b)
        before = None
        if node.recording and node.needs[1]:
            before = kernels.empty_like(a)
            kernels.copy(before, a)
        # Saved before the write, so that a factor which shares the memory of a is found to be gone.
        node.save(before, b if isinstance(b, Array) else None)
        node.note = (kind, None if isinstance(b, Array) else b)
        kernels.multiply(a, a, b)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        before, b = node.saved
        kind, number = node.note
        grad_a = kernels.empty_like(grad)
        kernels.multiply(grad_a, grad, number if b is None else b)
        if not node.needs[1]:
            return grad_a, None
        grad_b = kernels.empty_like(grad)
        kernels.multiply(grad_b, grad, before)
        return grad_a, convert(kernels, sum_to_shape(kernels, grad_b, kind[0]), kind[1])


class DivideInPlace(Operation):
    name = "div_"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Any) -> Array:
        if not a.dtype.is_floating:
            raise TypeError(f"div_ takes floating-point operands; got {a.dtype}; convert with .to(flow.float32)")
        kind = _kind(b)
        b = _fitting(kernels, a, b)
        before = None
        if node.recording and node.needs[1]:
            before = kernels.empty_like(a)
            kernels.copy(before, a)
        node.save(before, b if isinstance(b, Array) else None)
        node.note = (kind, None if isinstance(b, Array) else b)
        kernels.divide(a, a, b)
        return a

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        before, b = node.saved
        kind, number = node.note
        grad_a = kernels.empty_like(grad)
        kernels.divide(grad_a, grad, number if b is None else b)
        if not node.needs[1]:
            return grad_a, None
        grad_b = kernels.empty_like(grad)
        kernels.divide(grad_b, before, b)
        kernels.multiply(grad_b, grad_b, grad_a)
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
    return add_(a, b, alpha=-alpha)


def mul_(a: Tensor, b: Tensor | float) -> Tensor:
    """a *= b."""
    return apply_in_place(MultiplyInPlace, a, b)


def div_(a: Tensor, b: Tensor | float) -> Tensor:
    """a /= b."""
    return apply_in_place(DivideInPlace, a, b)


def copy_(a: Tensor, b: Tensor) -> Tensor:
    """a = b, broadcast to its shape and converted to its type."""
    return apply_in_place(CopyInPlace, a, b)


def fill_(a: Tensor, value: float) -> Tensor:
    """a = value, everywhere."""
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
    if not isinstance(b, Array):
        return b
    broadcast_into(a, b)
    if b.dtype.is_floating and not a.dtype.is_floating:
        raise TypeError(f"a {a.dtype.name} tensor cannot hold the result with a {b.dtype.name} one in place")
    return convert(kernels, b, a.dtype)
