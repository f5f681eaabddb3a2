"""Element types: what one number in a tensor is."""

from __future__ import annotations

import numpy as np


class DType:
    """An element type. `itemsize` is in bytes; `numpy` is the NumPy type that holds it on the host."""

    __slots__ = ("is_floating", "itemsize", "name", "numpy")

    def __init__(self, name: str, numpy_type: type) -> None:
        self.name = name
        self.numpy = np.dtype(numpy_type)
        self.itemsize = self.numpy.itemsize
        self.is_floating = self.numpy.kind == "f"

    def __repr__(self) -> str:
        return f"flow.{self.name}"

    def __reduce__(self) -> tuple:
        return (by_name, (self.name,))


bool_ = DType("bool", np.bool_)
uint8 = DType("uint8", np.uint8)
int32 = DType("int32", np.int32)
int64 = DType("int64", np.int64)
float32 = DType("float32", np.float32)
float64 = DType("float64", np.float64)

ALL = (bool_, uint8, int32, int64, float32, float64)
_BY_NAME = {dtype.name: dtype for dtype in ALL}
_BY_NUMPY = {dtype.numpy: dtype for dtype in ALL}


def by_name(name: str) -> DType:
    """The element type called `name`. Raises TypeError for a name that is none."""
    if name not in _BY_NAME:
        raise TypeError(f"no element type is called {name!r}; there are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def from_numpy(numpy_type: np.dtype) -> DType:
    """The element type that holds NumPy's `numpy_type`. Raises TypeError where there is none."""
    if numpy_type not in _BY_NUMPY:
        raise TypeError(
            f"arrays of {numpy_type} are not supported; convert to one of {', '.join(_BY_NAME)} first"
        )
    return _BY_NUMPY[numpy_type]


def promote(a: DType, b: DType) -> DType:
    """The element type of an operation on `a` and `b`: floats win over integers, wider over narrower."""
    if a is b:
        return a
    if a.is_floating != b.is_floating:
        return a if a.is_floating else b
    return from_numpy(np.promote_types(a.numpy, b.numpy))
