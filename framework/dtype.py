"""Element types: what one number in a tensor is."""

from __future__ import annotations

from typing import Any

import numpy as np


class DType:
    """An element type. `itemsize` is in bytes; `numpy` is the NumPy type that holds it on the host.

    bfloat16 has no NumPy type of its own: its `numpy` is None and its `bits` are 16-bit integers on the host, which
    `encode` and `decode` convert.
    """

    __slots__ = ("bits", "is_floating", "itemsize", "name", "numpy")

    numpy: Any

    def __init__(self, name: str, numpy_type: Any, bits: Any = None) -> None:
        self.name = name
        self.numpy = None if numpy_type is None else np.dtype(numpy_type)
        self.bits = self.numpy if bits is None else np.dtype(bits)
        self.itemsize = self.bits.itemsize
        self.is_floating = numpy_type is None or self.numpy.kind == "f"

    def encode(self, values: np.ndarray) -> np.ndarray:
        """`values` as this type lies in memory, in an array of type `bits`; bfloat16 rounds to the nearest, even on ties."""
        if self.numpy is not None:
            return values.astype(self.numpy, copy=False)
        whole = np.asarray(values, np.float32)
        words = whole.view(np.uint32)
        rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
        # Rounding could carry a NaN's mantissa into an infinity; the quiet bit keeps it a NaN.
        return np.where(np.isnan(whole), ((words >> 16) | 0x40).astype(np.uint16), rounded)

    def decode(self, bits: np.ndarray) -> np.ndarray:
        """What `encode` gave, as numbers: of this type, or float32 where NumPy has no such type."""
        if self.numpy is not None:
            return bits
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def __repr__(self) -> str:
        # As it is found there: flow.bool would stand for Python's own.
        return f"flow.{self.name}" + "_" * (self.name == "bool")

    def __reduce__(self) -> tuple:
        return (by_name, (self.name,))


bool_ = DType("bool", np.bool_)
uint8 = DType("uint8", np.uint8)
int32 = DType("int32", np.int32)
int64 = DType("int64", np.int64)
bfloat16 = DType("bfloat16", None, np.uint16)
float32 = DType("float32", np.float32)
float64 = DType("float64", np.float64)

ALL = (bool_, uint8, int32, int64, bfloat16, float32, float64)
_BY_NAME = {dtype.name: dtype for dtype in ALL}
_BY_NUMPY = {dtype.numpy: dtype for dtype in ALL if dtype.numpy is not None}


def by_name(name: str) -> DType:
    """The element type called `name`. Raises TypeError for a name that is none."""
    if name not in _BY_NAME:
        raise TypeError(f"no element type is called {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def from_numpy(numpy_type: np.dtype) -> DType:
    """The element type that holds NumPy's `numpy_type`. Raises TypeError where there is none."""
    if numpy_type not in _BY_NUMPY:
        raise TypeError(
            f"arrays of {numpy_type} are not supported; convert to one of"
            f" {', '.join(dtype.name for dtype in _BY_NUMPY.values())} first"
        )
    return _BY_NUMPY[numpy_type]


def promote(a: DType, b: DType) -> DType:
    """The element type of an operation on `a` and `b`: floats win over integers, wider over narrower."""
    if a is b:
        return a
    if a.is_floating != b.is_floating:
        return a if a.is_floating else b
    if a is bfloat16 or b is bfloat16:
        return b if a is bfloat16 else a
    return from_numpy(np.promote_types(a.numpy, b.numpy))
