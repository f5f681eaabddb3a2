"""How arrays are named where ranks compare what they call."""

from __future__ import annotations

from functools import lru_cache

from framework.vm.array import Array, Layout

_LONGEST = 150


def describe(array: Array | Layout) -> str:
    """Its element type and shape, such as `float32[64, 3, 7, 7]`."""
    return _describe(array.dtype.name, array.shape)


@lru_cache(maxsize=1024)
def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    extents = ", ".join(map(str, shape))
    return f"{dtype}[{extents if len(extents) < _LONGEST else extents[:_LONGEST] + ' …'}]"
