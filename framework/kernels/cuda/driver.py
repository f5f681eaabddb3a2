"""The CUDA driver's launch of a kernel, through ctypes: CuPy's knows no launch attributes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import lru_cache

# CUlaunchAttributeID. A kernel that starts early is launched while the one in front of it still runs, and waits for
# it itself: CUDA's programmatic dependent launch.
CLUSTER, CLUSTER_POLICY, STARTS_EARLY = 4, 5, 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("name", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]

    @classmethod
    def of(
        cls,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int = 0,
        attributes: Sequence[tuple[int, tuple[int, ...]]] = (),
    ) -> LaunchConfig:
        """For a grid of blocks of threads, three numbers each; attributes are pairs of what is set and to which numbers."""
        config = cls((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes)
        if attributes:
            held = (_Attribute * len(attributes))()
            for attribute, (name, value) in zip(held, attributes, strict=True):
                attribute.name = name
                attribute.value[: len(value)] = value
            config.attributes = held
            config.attribute_count = len(attributes)
        return config


@lru_cache(maxsize=1)
def api() -> ctypes.CDLL:
    """The driver, which CuPy has loaded already."""
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def error_words(status: int) -> str:
    """What the driver calls an error that it returned."""
    name = ctypes.c_char_p()
    if api().cuGetErrorName(status, ctypes.byref(name)) or not name.value:
        return f"the driver's error {status}"
    return name.value.decode()
