"""Elementwise operations; operands broadcast against each other, and either may be a number."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.dtype import DType, bool_, promote
from framework.ops.checks import check_floats, check_tensor
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime
from framework.words import kind_of

Operand = Tensor | float


class _Binary(Operation):
    """What the operations on two operands share: their shapes are noted, so that gradients fit them again."""

    @classmethod
    def forward(cls, node: Node, kernels: Runtime, a: Any, b: Any) -> Array:
        kinds = _kinds(a, b) if node.recording else None
        a, b, out = _prepare(kernels, a, b)
        if out.dtype is bool_:
            check_truth(cls.name, a, b)
        getattr(kernels, cls.name)(out, a, b)
        if node.recording:
            cls.keep(node, kinds, a, b)
        return out

    @staticmethod
    def keep(node: Node, kinds: tuple | None, a: Any, b: Any) -> None:
        """Notes what backward needs: first the operands' kinds, see `_kinds`."""
        node.note = (kinds,)

    @staticmethod
    def gradients(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, Array | None]:
        """The gradients of both operands, in the shape of the result."""
        return grad, grad

    @classmethod
    def backward(cls, node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        kinds = node.note[0]
        grads = cls.gradients(node, kernels, grad)
        if kinds is None:
            return grads
        return tuple(
            [
                None if g is None or not needed else _fit(kernels, g, kind)
                for g, needed, kind in zip(grads, node.needs, kinds, strict=True)
            ]
        )


class Add(_Binary):
    name = "add"


class Subtract(_Binary):
    name = "subtract"

    @staticmethod
    def gradients(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, Array | None]:
        return grad, _unary(kernels.negative, kernels, grad) if node.needs[1] else None


class _Scaling(_Binary):
    """Operations whose gradients need the operands' values: that of each the other, that of a divisor both."""

    @classmethod
    def keep(cls, node: Node, kinds: tuple | None, a: Any, b: Any) -> None:
        needs_b = node.needs[0] or (cls is Divide and node.needs[1])
        node.save(
            a if isinstance(a, Array) and node.needs[1] else None,
            b if isinstance(b, Array) and needs_b else None,
        )
        node.note = (kinds, None if isinstance(a, Array) else a, None if isinstance(b, Array) else b)

    @staticmethod
    def operands(node: Node) -> tuple[Any, Any]:
        """Both operands, whether saved arrays or numbers."""
        a, b = node.saved
        return (node.note[1] if a is None else a), (node.note[2] if b is None else b)


class Multiply(_Scaling):
    name = "multiply"

    @staticmethod
    def gradients(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, Array | None]:
        a, b = Multiply.operands(node)
        return (
            _binary(kernels.multiply, kernels, grad, b) if node.needs[0] else None,
            _binary(kernels.multiply, kernels, grad, a) if node.needs[1] else None,
        )


class Divide(_Scaling):
    name = "divide"

    @staticmethod
    def gradients(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, Array | None]:
        a, b = Divide.operands(node)
        grad_a = _binary(kernels.divide, kernels, grad, b)
        if not node.needs[1]:
            return grad_a, None
        quotient = kernels.empty_like(grad_a)
        kernels.divide(quotient, a, b)
        grad_b = _binary(kernels.multiply, kernels, grad_a, quotient)
        kernels.negative(grad_b, grad_b)
        return grad_a, grad_b


class Negative(Operation):
    name = "negative"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array) -> Array:
        return _unary(kernels.negative, kernels, a)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return _unary(kernels.negative, kernels, grad)


class Exp(Operation):
    name = "exp"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array) -> Array:
        out = _unary(kernels.exp, kernels, a)
        node.save(out)
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return _binary(kernels.multiply, kernels, grad, node.saved[0])


class Log(Operation):
    name = "log"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array) -> Array:
        node.save(a)
        return _unary(kernels.log, kernels, a)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        return _binary(kernels.divide, kernels, grad, node.saved[0])


class Sqrt(Operation):
    name = "sqrt"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array) -> Array:
        out = _unary(kernels.sqrt, kernels, a)
        node.save(out)
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        half = _binary(kernels.multiply, kernels, grad, 0.5)
        kernels.divide(half, half, node.saved[0])
        return half


class Relu(Operation):
    name = "relu"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array) -> Array:
        y = _unary(kernels.relu, kernels, x)
        node.save(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        (y,) = node.saved
        grad_x = kernels.empty_like(y)
        kernels.relu_backward(grad_x, grad, y)
        return grad_x


class Equal(Operation):
    name = "equal"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Any, b: Any) -> Array:
        a, b, like = _prepare(kernels, a, b)
        out = kernels.empty_like(like, bool_)
        kernels.equal(out, a, b)
        return out


def add(a: Operand, b: Operand) -> Tensor:
    """a + b."""
    return apply(Add, a, b)


def subtract(a: Operand, b: Operand) -> Tensor:
    """a - b."""
    return apply(Subtract, a, b)


def multiply(a: Operand, b: Operand) -> Tensor:
    """a · b."""
    return apply(Multiply, a, b)


def divide(a: Operand, b: Operand) -> Tensor:
    """a / b; of floating-point operands. Raises TypeError where neither is one."""
    if not any(isinstance(operand, Tensor) and operand.dtype.is_floating for operand in (a, b)):
        types = " and ".join(str(operand.dtype) for operand in (a, b) if isinstance(operand, Tensor))
        raise TypeError(f"divide takes floating-point operands; got {types}; convert with .to(flow.float32)")
    return apply(Divide, a, b)


def negative(a: Tensor) -> Tensor:
    """-a. Raises TypeError for bool."""
    check_tensor("negative", a)
    if a.dtype is bool_:
        check_truth("negative")
    return apply(Negative, a)


def exp(a: Tensor) -> Tensor:
    """e^a."""
    check_floats("exp", a)
    return apply(Exp, a)


def log(a: Tensor) -> Tensor:
    """ln a."""
    check_floats("log", a)
    return apply(Log, a)


def sqrt(a: Tensor) -> Tensor:
    """√a."""
    check_floats("sqrt", a)
    return apply(Sqrt, a)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); its gradient at 0 is 0. Raises TypeError for bool."""
    check_tensor("relu", x)
    if x.dtype is bool_:
        check_truth("relu")
    return apply(Relu, x)


def equal(a: Operand, b: Operand) -> Tensor:
    """a == b, elementwise, of type bool."""
    with_detached = [x.detach() if isinstance(x, Tensor) else x for x in (a, b)]
    return apply(Equal, *with_detached)


def not_equal(a: Operand, b: Operand) -> Tensor:
    """a != b, elementwise, of type bool."""
    return equal(equal(a, b), 0)


def _prepare(kernels: Runtime, a: Any, b: Any) -> tuple[Any, Any, Array]:
    """Both operands in one element type, and a new array for the result."""
    if not isinstance(a, Array):
        return number_for(b, a), b, kernels.empty_like(b)
    if not isinstance(b, Array):
        return a, number_for(a, b), kernels.empty_like(a)
    if a.dtype is not b.dtype:
        dtype = _common_type(a, b)
        a, b = convert(kernels, a, dtype), convert(kernels, b, dtype)
    if a.shape == b.shape:
        return a, b, kernels.empty_like(a)
    shape = broadcast_shape(a.shape, b.shape)
    if shape == a.shape:
        return a, b, kernels.empty_like(a)
    return a, b, kernels.empty_like(b) if shape == b.shape else kernels.empty(shape, a.dtype)


def _common_type(a: Array, b: Array) -> DType:
    """The type of the result: one without dimensions does not widen one with some, of its kind. As in PyTorch."""
    one, other = ((array.dtype.is_floating, array.dtype is bool_) for array in (a, b))
    if one == other and bool(a.shape) != bool(b.shape):
        return a.dtype if a.shape else b.dtype
    return promote(a.dtype, b.dtype)


def number_for(other: Array, value: Any) -> float:
    """A number that an operation takes beside an array, as Python's own: NumPy's would change the result's type.

    Raises TypeError for what is none, and for a float beside integers.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if not isinstance(value, float | np.floating):
        raise TypeError(f"an operand is a tensor or a number, not {kind_of(value)}")
    if not other.dtype.is_floating:
        raise TypeError(f"a {other.dtype.name} tensor meets the float {value}; convert the tensor with .to() first")
    return float(value)


def check_truth(operation: str, *operands: Any) -> None:
    """Raises TypeError unless an operation on bool, with these operands, gives bool: sums (or) and products (and)."""
    if operation in ("add", "multiply") and all(isinstance(operand, Array | bool) for operand in operands):
        return
    raise TypeError(f"{operation} takes numbers; got truth values ({bool_}); convert with .to()")


@lru_cache(maxsize=4096)
def broadcast_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a and b broadcast against each other. Raises ValueError where they do not fit."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ValueError(f"shapes {list(a)} and {list(b)} do not broadcast against each other") from None


def convert(kernels: Runtime, array: Array, dtype: Any) -> Array:
    """`array` in another element type; itself where it is of that type."""
    if array.dtype is dtype:
        return array
    converted = kernels.empty_like(array, dtype)
    kernels.copy(converted, array)
    return converted


def _kinds(a: Any, b: Any) -> tuple | None:
    """Shape and element type of each operand, None for a number; None altogether where both are alike."""
    if isinstance(a, Array) and isinstance(b, Array):
        if a.shape == b.shape and a.dtype is b.dtype:
            return None
        return (a.shape, a.dtype), (b.shape, b.dtype)
    return ((a.shape, a.dtype), None) if isinstance(a, Array) else (None, (b.shape, b.dtype))


def _fit(kernels: Runtime, grad: Array, kind: tuple) -> Array:
    """Sums `grad` over what was broadcast, and gives it the operand's element type."""
    shape, dtype = kind
    return convert(kernels, sum_to_shape(kernels, grad, shape), dtype)


def sum_to_shape(kernels: Runtime, grad: Array, shape: tuple[int, ...]) -> Array:
    """`grad` summed over the dimensions along which an operand of `shape` was broadcast."""
    if grad.shape == shape:
        return grad
    leading = grad.ndim - len(shape)
    stretched = [i + leading for i, extent in enumerate(shape) if extent == 1 and grad.shape[i + leading] != 1]
    reduced = kernels.empty((1,) * leading + shape, grad.dtype)
    kernels.sum(reduced, grad, axes=(*range(leading), *stretched), keepdims=True)
    return reduced.view(shape, reduced.stride[leading:])


def _unary(kernel: Any, kernels: Runtime, a: Array) -> Array:
    out = kernels.empty_like(a)
    kernel(out, a)
    return out


def _binary(kernel: Any, kernels: Runtime, a: Array, b: Any) -> Array:
    out = kernels.empty_like(a)
    kernel(out, a, b)
    return out
