"""Reductions in CUDA C++, in a fixed order, so that the same values always give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, launch
from framework.kernels.cuda.geometry import Shape, walk
from framework.kernels.table import kernel
from framework.vm.array import Array

# Outputs that lie next to each other are taken 32 at a time, where the input has them side by side as well.
_COLUMNS = 32
# A thread takes at least this many elements before a reduction is split over more blocks.
_LEAST_PER_THREAD = 16
_PART_BYTES = 16


@kernel(outputs=1)
def sum(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """As the reference kernel of the same name."""
    _reduce("Sum", out, a, axes, keepdims)


@kernel(outputs=1)
def mean(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """As the reference kernel of the same name."""
    _reduce("Mean", out, a, axes, keepdims)


@kernel(outputs=1)
def max(out: Array, a: Array, *, axes: tuple[int, ...], keepdims: bool) -> None:
    """As the reference kernel of the same name. Raises ValueError for the largest of no elements."""
    _reduce("Max", out, a, axes, keepdims)


@kernel(outputs=1)
def argmax(out: Array, a: Array, *, axis: int) -> None:
    """As the reference kernel of the same name. Raises ValueError for the largest of no elements."""
    _reduce("ArgMax", out, a, (axis,), False)


def _reduce(operation: str, out: Array, a: Array, axes: tuple[int, ...], keepdims: bool) -> None:
    device = out.storage.device
    run = _plan(device, operation, out.dtype, a.dtype, a.shape, a.stride, out.stride, axes, keepdims)
    if run is not None:
        run(launch.stream(device), out.ptr, a.ptr)


@lru_cache(maxsize=1024)
def _plan(
    device: Device,
    operation: str,
    to: DType,
    given: DType,
    shape: Shape,
    stride: Shape,
    out_stride: Shape,
    axes: tuple[int, ...],
    keepdims: bool,
) -> Callable[[int, int, int], None] | None:
    axes = tuple([axis % len(shape) for axis in axes])
    kept = [i for i in range(len(shape)) if i not in axes]
    outputs, count = prod([shape[i] for i in kept]), prod([shape[i] for i in axes])
    if outputs == 0:
        return None
    if count == 0 and operation in ("Max", "ArgMax"):
        raise ValueError(f"there is no largest of no elements: shape {list(shape)} over dimensions {list(axes)}")
    own = tuple([out_stride[i] for i in kept]) if keepdims else out_stride
    over_kept = walk(tuple([shape[i] for i in kept]), own, tuple([stride[i] for i in kept]), by=1)
    over_reduced = walk(tuple([shape[i] for i in axes]), tuple([stride[i] for i in axes]))
    in_columns = outputs > 1 and (
        count < 64 or min([*over_kept.strides[1], count]) < min([*over_reduced.strides[0], count + 1])
    )
    # With outputs for every thread of the device, each may take all of one.
    in_lanes = in_columns and outputs >= 2 * launch.THREADS * launch.multiprocessors(device)
    columns = launch.THREADS if in_lanes else _COLUMNS if in_columns else 1
    rows = launch.THREADS // columns
    tiles = -(-outputs // columns)
    splits = min(-(-8 * launch.multiprocessors(device) // tiles), -(-count // (rows * _LEAST_PER_THREAD)))
    per_split = -(-count // splits) if splits > 1 else count
    splits = -(-count // per_split) if count else 1
    definitions = {
        "INPUT": compiler.cxx(given),
        "OUTPUT": compiler.cxx(to),
        "OPERATION": operation,
        "FLOATING": int(given.is_floating),
    }
    name = "reduce_lanes" if in_lanes else "reduce_columns" if in_columns else "reduce_rows"
    code = f"qqq {over_kept.code()} {over_reduced.code()}"
    dims = (*over_kept.values(), *over_reduced.values())
    reduce = launch.prepare(
        compiler.function(device, "reduction.cu", name, **definitions),
        (tiles, splits), "3Q", code, (outputs, count, per_split, *dims),
    )  # fmt: skip
    if splits == 1:
        return lambda on, out, a: reduce(on, out, a, 0)
    join = launch.prepare(
        compiler.function(device, "reduction.cu", "join_splits", **definitions),
        (-(-outputs // _COLUMNS), 1), "3Q", code, (outputs, count, splits, *dims),
    )  # fmt: skip
    room = splits * outputs * _PART_BYTES

    def run(on: int, out: int, a: int) -> None:
        parts = launch.workspace(device, on, room) + launch.COUNTER_BYTES
        reduce(on, out, a, parts)
        join(on, out, a, parts)

    return run
