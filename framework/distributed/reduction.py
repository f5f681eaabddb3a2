"""Reductions on the host: how the ranks' values of one element become one, always added up in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

import numpy as np

from framework.dtype import DType


class ReduceOp(StrEnum):
    """The reductions under PyTorch's names; each is the string that a collective takes."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"


OPERATIONS = tuple(ReduceOp)

_UFUNCS: dict[str, np.ufunc] = {"sum": np.add, "avg": np.add, "min": np.minimum, "max": np.maximum}


def check_operation(op: str, dtype: DType) -> None:
    """Raises ValueError for an operation that does not exist, or not for the element type."""
    if op not in OPERATIONS:
        raise ValueError(f"a reduction is one of {', '.join(OPERATIONS)}, not {op!r}")
    if op == "avg" and not dtype.is_floating:
        raise ValueError(f"avg is for floating-point tensors, not {dtype.name}; take the sum and divide it")


def reduction(op: str, dtype: DType) -> Callable[[Sequence[np.ndarray], np.ndarray], None]:
    """A function `reduce(parts, out)` of arrays of the element type's bits; `out` may be one of the parts.

    bfloat16 is added up in float32 and rounded once.
    """
    ufunc = _UFUNCS[op]

    def reduce(parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        # Infinities and what is no number are results like others: whoever trains looks for them in the gradients.
        with np.errstate(over="ignore", invalid="ignore"):
            if dtype.numpy is None:
                _reduce_bits(ufunc, op, dtype, parts, out)
            else:
                _reduce(ufunc, op, parts, out)

    return reduce


def _reduce(ufunc: np.ufunc, op: str, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    if len(parts) == 1:
        np.copyto(out, parts[0])
        return
    # In the order of the ranks whichever part `out` is, so that it does not matter who reduces.
    later = next((i for i, part in enumerate(parts) if i >= 2 and part is out), None)
    if later is not None:
        parts = [*parts[:later], out.copy(), *parts[later + 1 :]]
    ufunc(parts[0], parts[1], out=out)
    for part in parts[2:]:
        ufunc(out, part, out=out)
    if op == "avg":
        np.divide(out, len(parts), out=out)


def _reduce_bits(ufunc: np.ufunc, op: str, dtype: DType, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    total = dtype.decode(parts[0])
    for part in parts[1:]:
        ufunc(total, dtype.decode(part), out=total)
    if op == "avg":
        np.divide(total, len(parts), out=total)
    np.copyto(out, dtype.encode(total))
