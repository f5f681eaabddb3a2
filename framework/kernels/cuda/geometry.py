"""How kernels walk strided arrays: as few dimensions as their layouts allow, packed as the sources expect them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from framework.vm.array import contiguous_stride

# As in common.cuh.
MOST_DIMS = 8

Shape = tuple[int, ...]


class Walk(NamedTuple):
    """Dimensions to walk together, the last one fastest; `strides` has one tuple for each array, in elements."""

    extents: Shape
    strides: tuple[Shape, ...]

    @property
    def is_dense(self) -> bool:
        """Whether all arrays lie alike in memory, element after element."""
        return len(self.extents) == 0 or (len(self.extents) == 1 and all(stride == (1,) for stride in self.strides))

    @property
    def is_dense_in_order(self) -> bool:
        """Whether the first array lies in memory element after element, in the order of the walk."""
        return self.strides[0] == contiguous_stride(self.extents)

    def without_first(self) -> Walk:
        """The walk over all arrays but the first."""
        return Walk(self.extents, self.strides[1:])

    def code(self) -> str:
        """The walk as codes of the struct module: the number of dimensions, extents, then each array's strides."""
        return f"{1 + (1 + len(self.strides)) * MOST_DIMS}q"

    def values(self) -> list[int]:
        """What `code` packs. Raises ValueError for more dimensions than kernels walk."""
        if len(self.extents) > MOST_DIMS:
            raise ValueError(
                f"arrays whose layouts differ in {len(self.extents)} dimensions are too many for a CUDA kernel, which walks"
                f" {MOST_DIMS}; make one of them contiguous first"
            )
        rows = (self.extents, *self.strides)
        return [len(self.extents), *[entry for row in rows for entry in (*row, *[0] * (MOST_DIMS - len(row)))]]


@lru_cache(maxsize=4096)
def walk(shape: Shape, *strides: Shape, by: int = 0) -> Walk:
    """The shortest walk over arrays of one shape; array number `by` is walked in the order of its memory."""
    dims = [i for i, extent in enumerate(shape) if extent != 1]
    dims.sort(key=lambda i: -strides[by][i])
    extents: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for i in dims:
        joins = extents and all(kept[-1] == stride[i] * shape[i] for kept, stride in zip(merged, strides, strict=True))
        if joins:
            extents[-1] *= shape[i]
            for kept, stride in zip(merged, strides, strict=True):
                kept[-1] = stride[i]
        else:
            extents.append(shape[i])
            for kept, stride in zip(merged, strides, strict=True):
                kept.append(stride[i])
    return Walk(tuple(extents), tuple([tuple(kept) for kept in merged]))


@lru_cache(maxsize=4096)
def broadcast(shape: Shape, own_shape: Shape, own_stride: Shape) -> Shape:
    """The strides of an array of `own_shape` when it is broadcast to `shape`."""
    leading = len(shape) - len(own_shape)
    return (0,) * leading + tuple(
        [0 if extent == 1 else step for extent, step in zip(own_shape, own_stride, strict=True)]
    )
