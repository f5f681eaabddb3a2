"""Elementwise kernels: operands broadcast against each other as in NumPy, and may be scalars."""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array


def value(operand: Array | float) -> np.ndarray | float:
    """What NumPy computes with: a view of an array, or the scalar itself."""
    return operand.ndarray if isinstance(operand, Array) else operand


@kernel(outputs=1)
def add(out: Array, a: Array, b: Array | float) -> None:
    """out = a + b."""
    np.add(value(a), value(b), out=out.ndarray)


@kernel(outputs=1)
def subtract(out: Array, a: Array | float, b: Array | float) -> None:
    """out = a - b."""
    np.subtract(value(a), value(b), out=out.ndarray)


@kernel(outputs=1)
def multiply(out: Array, a: Array, b: Array | float) -> None:
    """out = a · b."""
    np.multiply(value(a), value(b), out=out.ndarray)


@kernel(outputs=1)
def divide(out: Array, a: Array | float, b: Array | float) -> None:
    """out = a / b; division by zero gives inf or NaN, as IEEE 754 has it."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        np.divide(value(a), value(b), out=out.ndarray, casting="unsafe")


@kernel(outputs=1)
def negative(out: Array, a: Array) -> None:
    """out = -a."""
    np.negative(a.ndarray, out=out.ndarray)


@kernel(outputs=1)
def exp(out: Array, a: Array) -> None:
    """out = e^a."""
    with np.errstate(over="ignore"):
        np.exp(a.ndarray, out=out.ndarray)


@kernel(outputs=1)
def log(out: Array, a: Array) -> None:
    """out = ln a; -inf at 0 and NaN below."""
    with np.errstate(divide="ignore", invalid="ignore"):
        np.log(a.ndarray, out=out.ndarray)


@kernel(outputs=1)
def sqrt(out: Array, a: Array) -> None:
    """out = √a; NaN below 0."""
    with np.errstate(invalid="ignore"):
        np.sqrt(a.ndarray, out=out.ndarray)


@kernel(outputs=1)
def equal(out: Array, a: Array, b: Array | float) -> None:
    """out = (a == b), of type bool."""
    np.equal(value(a), value(b), out=out.ndarray)


@kernel(outputs=1)
def relu(y: Array, x: Array) -> None:
    """y = max(x, 0); NaN stays NaN."""
    np.maximum(x.ndarray, 0, out=y.ndarray)


@kernel(outputs=1)
def relu_backward(grad_x: Array, grad_y: Array, y: Array) -> None:
    """grad_x = 0 where y <= 0, else grad_y: what is no number stays so."""
    # Chosen rather than multiplied by 0, which would make a NaN of an infinity.
    grad_x.ndarray[...] = np.where(y.ndarray <= 0, 0, grad_y.ndarray)


@kernel(outputs=1)
def copy(out: Array, a: Array) -> None:
    """out = a, broadcast to its shape and converted to its type."""
    np.copyto(out.ndarray, a.ndarray, casting="unsafe")


@kernel(outputs=1)
def fill(out: Array, *, value: float) -> None:
    """out = value, everywhere."""
    out.ndarray.fill(value)
