"""Array: memory with a shape, the operand of every instruction."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.dtype import DType

if TYPE_CHECKING:
    from framework.vm.storage import Storage

# Kernels read and write whole lines of memory where an array begins on one.
_ALIGNMENT_BYTES = 128


@lru_cache(maxsize=4096)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a dense row-major array of `shape`."""
    stride, step = [], 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


@lru_cache(maxsize=4096)
def channels_last_stride(shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The strides of `[N, C, H, W]` lying NHWC in memory: how convolutional activations are kept."""
    _, c, h, w = (max(extent, 1) for extent in shape)
    return (h * w * c, 1, w * c, c)


@lru_cache(maxsize=4096)
def _byte_stride(stride: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple([step * itemsize for step in stride])


class Layout:
    """How an array lies in memory: its shape, strides and element type, and what follows from these.

    Equal layouts are one object, as long as few thousand are in use: what is prepared for operands is found by their
    layouts, without looking at all the numbers in them.
    """

    __slots__ = ("dtype", "nbytes", "reach_bytes", "shape", "size", "stride")

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: DType) -> None:
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.size = prod(shape)
        self.nbytes = self.size * dtype.itemsize
        # From the first element to behind the last one in memory, gaps between them included.
        self.reach_bytes = _reach(shape, stride) * dtype.itemsize

    @staticmethod
    @lru_cache(maxsize=8192)
    def of(shape: tuple[int, ...], stride: tuple[int, ...], dtype: DType) -> Layout:
        """The layout with these parts."""
        return Layout(shape, stride, dtype)

    @staticmethod
    @lru_cache(maxsize=8192)
    def like(layout: Layout) -> Layout:
        """That of a new dense array with the same shape and type and the same order of dimensions in memory."""
        return Layout.of(layout.shape, dense_stride_like(layout.shape, layout.stride), layout.dtype)

    @property
    def is_channels_last(self) -> bool:
        """Whether it is `[N, C, H, W]` lying densely NHWC in memory."""
        return len(self.shape) == 4 and _is_dense_as(self.shape, self.stride, channels_last_stride(self.shape))

    def __repr__(self) -> str:
        return f"Layout(shape={self.shape}, stride={self.stride}, {self.dtype.name})"


class Array:
    """A strided view of a storage.

    `shape` and `stride` count elements, as does `offset`, the place of the first element in the storage; `ptr` is that
    element's address. `layout` is shape, stride and element type as one.
    """

    __slots__ = ("_ndarray", "dtype", "layout", "offset", "ptr", "shape", "storage", "stride")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: DType,
        offset: int = 0,
        layout: Layout | None = None,
    ) -> None:
        self.storage = storage
        self.shape = shape
        self.stride = stride
        self.dtype = dtype
        self.offset = offset
        self.layout = layout or Layout.of(shape, stride, dtype)
        self.ptr: int = storage.ptr + offset * dtype.itemsize
        self._ndarray: np.ndarray | None = None

    @property
    def ndarray(self) -> np.ndarray:
        """A NumPy view for kernels on the host. It does not keep the storage alive: never hand it to a user."""
        view = self._ndarray
        if view is None:
            if self.dtype.numpy is None:
                raise TypeError(
                    f"{self.dtype.name} has no NumPy type, so no kernel takes it on the host; convert to float32 first"
                )
            view = self._ndarray = self.host_view()
        return view

    def host_view(self) -> np.ndarray:
        """As `ndarray`, but for every element type: those that NumPy does not know are seen as their bits."""
        dtype, block = self.dtype, self.storage.block
        return np.ndarray(
            self.shape,
            dtype.bits,
            block.segment.memory.buffer,
            block.offset + self.offset * dtype.itemsize,
            _byte_stride(self.stride, dtype.itemsize),
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without gaps."""
        return self.layout.nbytes

    @property
    def is_contiguous(self) -> bool:
        """Whether it is dense in row-major order."""
        return _is_dense_as(self.shape, self.stride, contiguous_stride(self.shape))

    @property
    def is_channels_last(self) -> bool:
        """Whether it is `[N, C, H, W]` lying densely NHWC in memory."""
        return self.layout.is_channels_last

    def view(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> Array:
        """The same memory under another shape; `offset` counts elements from this array's first."""
        return Array(self.storage, shape, stride, self.dtype, self.offset + offset)

    def __repr__(self) -> str:
        return f"Array(shape={self.shape}, stride={self.stride}, {self.dtype.name}, {self.storage.device})"


def overlap_partly(written: Array, read: Array) -> bool:
    """Whether writing one changes elements of the other before, or while, these are read: they share memory and are not
    the same elements in the same order."""
    if written.storage is not read.storage or not (written.size and read.size):
        return False
    if written.offset == read.offset and written.shape == read.shape:
        if _is_dense_as(written.shape, read.stride, written.stride):
            return False
    try:
        # By addresses alone, so that it serves memory which the host cannot see.
        return np.shares_memory(_Addresses(written), _Addresses(read), max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


# Ways to fit two layouts together that are tried before they count as overlapping; slices of tensors need a few.
_MOST_WORK: Any = 100_000  # NumPy's type hints know only its constants


class _Addresses:
    """Tells NumPy where an array's elements lie."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = {
            "data": (array.ptr, True),
            "shape": array.shape,
            "strides": _byte_stride(array.stride, array.dtype.itemsize),
            "typestr": np.dtype(array.dtype.bits).str,
            "version": 3,
        }


def group(operand: Array | tuple[Array, ...]) -> tuple[Array, ...]:
    """An operand of kernels that work on many arrays at once, also where it is one."""
    return (operand,) if isinstance(operand, Array) else operand


def _reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    reach = 1
    for extent, step in zip(shape, stride, strict=True):
        if not extent:
            return 0
        reach += (extent - 1) * step
    return reach


@lru_cache(maxsize=4096)
def _is_dense_as(shape: tuple[int, ...], stride: tuple[int, ...], dense: tuple[int, ...]) -> bool:
    # Where an extent is 1 the stride is never taken, so it says nothing about the layout.
    return stride == dense or all(
        extent <= 1 or step == want for extent, step, want in zip(shape, stride, dense, strict=True)
    )


@lru_cache(maxsize=4096)
def dense_stride_like(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a new dense array that keeps the order of dimensions in memory of an existing one.

    An array with overlapping or repeated elements (stride 0) gives row-major order.
    """
    if any(step == 0 and extent > 1 for extent, step in zip(shape, stride, strict=True)):
        return contiguous_stride(shape)
    if len(shape) == 4 and _is_dense_as(shape, stride, channels_last_stride(shape)):
        # 1×1 images are both NCHW and NHWC in memory; keeping NHWC lets the next layer stay on its fast path.
        if stride[1] == 1 or shape[1] == 1:
            return channels_last_stride(shape)
    order = sorted(range(len(shape)), key=lambda i: (-stride[i], i))
    dense, step = [0] * len(shape), 1
    for i in reversed(order):
        dense[i] = step
        step *= max(shape[i], 1)
    return tuple(dense)


def side_by_side(arrays: Iterable[Array]) -> tuple[list[int], int]:
    """The places in one flat array where arrays like these, of one element type, start; and how many elements it takes."""
    places, end = [], 0
    for array in arrays:
        places.append(end)
        step = _ALIGNMENT_BYTES // array.dtype.itemsize
        end += -(-array.size // step) * step
    return places, end
