"""What operations refuse: operands and settings that do not fit, named in one line."""

from __future__ import annotations

from operator import index

import numpy as np

from framework.tensor import Tensor
from framework.vm.array import Layout
from framework.words import kind_of

Pair = tuple[int, int]


def check_tensor(operation: str, x: Tensor) -> None:
    """Raises TypeError for what is no tensor, such as a NumPy array."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{operation} takes tensors; got {kind_of(x)}, which flow.tensor() converts")


def check_number(operation: str, value: object) -> None:
    """Raises TypeError for what is no number or truth value of Python or NumPy."""
    if not isinstance(value, (int, float, np.integer, np.floating, np.bool_)):
        raise TypeError(f"{operation} takes a number; got {kind_of(value)}")


def check_tensors(operation: str, first: Tensor, *others: Tensor | None) -> None:
    """Raises TypeError for what is no tensor; the others may be left out."""
    if not isinstance(first, Tensor):
        check_tensor(operation, first)
    for operand in others:
        if operand is not None and not isinstance(operand, Tensor):
            check_tensor(operation, operand)


def check_floats(operation: str, first: Tensor | Layout, *others: Tensor | Layout | None) -> None:
    """Raises TypeError unless all operands are of one floating-point type."""
    if type(first) is not Layout:
        check_tensors(operation, first, *others)  # type: ignore[arg-type]
    dtype = first.dtype
    if not dtype.is_floating or any(other is not None and other.dtype is not dtype for other in others):
        types = ", ".join(str(operand.dtype) for operand in (first, *others) if operand is not None)
        raise TypeError(f"{operation} takes operands of one floating-point type; got {types}; convert with .to()")


def pair(name: str, value: int | Pair, *, least: int) -> Pair:
    """A setting for height and width, given as one number or as two."""
    if type(value) is tuple and [type(one) for one in value] == [int, int] and value[0] >= least <= value[1]:
        return value
    try:
        both = tuple([index(one) for one in ((value, value) if hasattr(value, "__index__") else value)])
    except TypeError:
        both = ()
    if len(both) != 2 or min(both) < least:
        raise ValueError(f"{name} is one integer >= {least}, or two; got {value}")
    return both


def check_images(operation: str, x: Tensor | Layout) -> None:
    """Raises ValueError unless x is shaped [N, C, H, W]."""
    if type(x) is not Layout:
        check_tensor(operation, x)  # type: ignore[arg-type]
    if len(x.shape) != 4:
        raise ValueError(f"{operation} takes images [N, C, H, W]; got shape {list(x.shape)}")


def window_count(operation: str, size: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> int:
    """How many windows fit along an axis of `size`. Raises ValueError where none does."""
    count = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if count < 1:
        raise ValueError(
            f"{operation}: a window of {dilation * (kernel - 1) + 1} does not fit an image of {size} padded by {padding}"
        )
    return count
