"""Memory descriptors: how oneDNN is told the shape, the layout and the element type of an array."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Literal

from framework.kernels.onednn.library import library
from framework.vm.array import Array, channels_last_stride

_MAX_DIMENSIONS = 12
_TYPES = {"float32": 3, "int32": 4, "uint8": 6}
# Format tags by oneDNN's letters: `a` is the first dimension, the order is that in memory, `8b` a block of 8.
_ANY, _ACDB = 1, 22
_BLOCKED_CHANNELS = {8: 102, 16: 78}
_BLOCKED_WEIGHTS_TRANSPOSED = 100

Dimensions = ctypes.c_int64 * _MAX_DIMENSIONS


class Descriptor:
    """A memory descriptor. Equal layouts compare equal, whatever they were made from."""

    __slots__ = ("__weakref__", "handle", "nbytes")

    def __init__(self, handle: ctypes.c_void_p, owned: bool = True) -> None:
        self.handle = handle
        self.nbytes: int = library().functions.dnnl_memory_desc_get_size(handle)
        if owned:
            library().destroy_with(self, "memory_desc_destroy", handle)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Descriptor):
            return NotImplemented
        return bool(library().functions.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]


@lru_cache(maxsize=2048)
def strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str = "float32") -> Descriptor:
    """A layout given by strides, in elements."""
    return Descriptor(
        library().make(
            "memory_desc_create_with_strides", len(shape), dimensions(shape), _TYPES[dtype], dimensions(stride)
        )
    )


def activation(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str = "float32") -> Descriptor:
    """The layout of a [N, C, H, W]; one that lies NHWC is `channels_last`, also where extents of 1 hide it."""
    dense = channels_last_stride(shape)  # type: ignore[arg-type]
    same = all(extent == 1 or a == b for extent, a, b in zip(shape, stride, dense, strict=True))
    return channels_last(shape, dtype) if same else strided(shape, stride, dtype)


def vector(count: int, dtype: str = "float32") -> Descriptor:
    """`count` elements in a row."""
    return strided((count,), (1,), dtype)


def free(shape: tuple[int, ...]) -> Descriptor:
    """float32 of this shape in the layout that a primitive likes best: only for asking primitives."""
    return _tagged(shape, _ANY)


def channels_last(shape: tuple[int, ...], dtype: str = "float32") -> Descriptor:
    """[N, C, H, W] lying NHWC in memory."""
    return _tagged(shape, _ACDB, dtype)


def blocked_channels(shape: tuple[int, ...], block: Literal[8, 16]) -> Descriptor:
    """[N, C, H, W] lying in blocks of channels, [N, C/block, H, W, block] in memory: 8 is AVX2's own, 16 AVX-512's."""
    return _tagged(shape, _BLOCKED_CHANNELS[block])


def blocked_weights_transposed(shape: tuple[int, ...]) -> Descriptor:
    """Weights [O, I, h, w] in blocks of 8 outputs by 8 inputs, [O/8, I/8, h, w, 8, 8] in memory."""
    return _tagged(shape, _BLOCKED_WEIGHTS_TRANSPOSED)


def servable(*arrays: Array | None) -> bool:
    """Whether oneDNN can be given these at all: float32, not empty, no element shared by two places."""
    return all(array is None or _servable(array.shape, array.stride, array.dtype.name) for array in arrays)


def dimensions(values: tuple[int, ...]) -> ctypes.Array:
    """The C array that oneDNN wants for shapes, strides and paddings."""
    return Dimensions(*values)


@lru_cache(maxsize=2048)
def _tagged(shape: tuple[int, ...], tag: int, dtype: str = "float32") -> Descriptor:
    return Descriptor(library().make("memory_desc_create_with_tag", len(shape), dimensions(shape), _TYPES[dtype], tag))


@lru_cache(maxsize=4096)
def _servable(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str) -> bool:
    if dtype != "float32" or not 0 < len(shape) <= _MAX_DIMENSIONS:
        return False
    if not all(extent > 0 and (step > 0 or extent == 1) for extent, step in zip(shape, stride, strict=True)):
        return False
    # oneDNN wants each dimension to step over all that lies within it; a slice with a step can fall short of that.
    within = 1
    for step, extent in sorted((step, extent) for extent, step in zip(shape, stride, strict=True) if extent > 1):
        if step < within:
            return False
        within = step * extent
    return True
