"""How arrays are named where ranks compare what they call."""

from __future__ import annotations

from framework.vm.array import Array

_LONGEST = 150


def describe(array: Array) -> str:
    """Its element type and shape, such as `float32[64, 3, 7, 7]`."""
    shape = ", ".join(map(str, array.shape))
    return f"{array.dtype.name}[{shape if len(shape) < _LONGEST else shape[:_LONGEST] + ' …'}]"
