"""What batch normalisation launches for images of one shape and type: one kernel for small images, two for large ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import gcd
from typing import NamedTuple

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, launch
from framework.kernels.cuda.geometry import Shape
from framework.vm.array import Layout, channels_last_stride

# Figures per channel that backward's first pass leaves for the second.
_COEFFICIENTS = 4
_MOST_PACKS = 2**30
# One launch serves up to this many elements and rows: beyond, the two passes are faster.
_SMALL_ELEMENTS = 1 << 20
_SMALL_ROWS = 8192
# As HELD in normalization_cluster.cuh, and the blocks that share their memory there.
_ROWS_HELD = 8
_CLUSTER = 8

# At most so many blocks for each multiprocessor in the first pass and in the second, and at least so many rows for a thread
# of the first and packs for one of the second.
_REDUCING_BLOCKS = 2
_APPLYING_BLOCKS = 64
_LEAST_ROWS = 16
_LEAST_PACKS = 4

Run = Callable[..., None]
# How images lie, or figures per channel, mean and inv_std first; None for what is left out.
Layouts = tuple[Layout | None, ...]


class Types(NamedTuple):
    """The element types of the images, of weight, bias and running figures, and of mean and inv_std."""

    storage: DType
    parameter: DType
    statistic: DType


def value_bytes(dtype: DType) -> int:
    """What the kernels compute in: float64 for float64, float32 for everything else."""
    return 8 if dtype.itemsize == 8 else 4


@lru_cache(maxsize=1024)
def train(
    device: Device,
    relu: bool,
    has_mask: bool,
    is_aligned: bool,
    y: Layout,
    x: Layout,
    residual: Layout | None,
    *vectors: Layout | None,
) -> Run | None:
    """The launch of batch_norm_train, None for operands that are not dense.

    `kept` is where each channel's figures go that backward has the ReLU's input from; 0 where they are not wanted.
    """
    if not are_dense((y, x, residual), vectors):
        return None
    if x.shape[1] == 0:
        return nothing
    spread = Spread(device, x.shape, types_of(x.dtype, vectors), is_aligned)
    has_residual = residual is not None
    name = _apply_name(relu, has_residual, has_mask)
    small = spread.small(device, name, "11Q2d", "")
    if small is not None:
        return small
    statistics = spread.reduce(device, "statistics", "10Q2d", "")
    apply = spread.apply(device, name, "5Q")
    room, parts_bytes = spread.room, spread.parts_bytes

    def run(on, y, mask, running_mean, running_var, mean, inv_std, kept, x, residual, weight, bias, eps, momentum):
        counters = launch.workspace(device, on, room)
        parts = counters + launch.COUNTER_BYTES
        coefficients = kept or parts + parts_bytes
        statistics(
            on, x, weight, bias, running_mean, running_var, mean, inv_std, coefficients, parts, counters, eps, momentum
        )
        apply(on, y, mask, x, residual, coefficients)

    return run


@lru_cache(maxsize=1024)
def again(device: Device, is_aligned: bool, y: Layout, x: Layout, *vectors: Layout | None) -> Run | None:
    """The launch of batch_norm_again, None for operands that are not dense."""
    if not are_dense((y, x), vectors):
        return None
    if x.shape[1] == 0:
        return nothing
    return Spread(device, x.shape, types_of(x.dtype, vectors), is_aligned).apply(device, "apply_relu", "5Q")


@lru_cache(maxsize=1024)
def evaluate(
    device: Device,
    relu: bool,
    has_mask: bool,
    is_aligned: bool,
    y: Layout,
    x: Layout,
    residual: Layout | None,
    *vectors: Layout | None,
) -> Run | None:
    """The launch of batch_norm_eval, None for operands that are not dense."""
    if not are_dense((y, x, residual), vectors):
        return None
    if x.shape[1] == 0:
        return nothing
    spread = Spread(device, x.shape, types_of(x.dtype, vectors), is_aligned)
    has_residual = residual is not None
    statistics = launch.prepare(
        compiler.function(device, "normalization.cu", "given_statistics", **spread.definitions),
        (max(1, -(-spread.channels // launch.THREADS)), 1), "5Qd", "i", (spread.channels,),
    )  # fmt: skip
    apply = spread.apply(device, _apply_name(relu, has_residual, has_mask), "5Q")
    recomputes = has_mask and not has_residual
    room = spread.room

    def run(on, y, mask, x, residual, weight, bias, running_mean, running_var, eps):
        coefficients = mask if recomputes else launch.workspace(device, on, room) + launch.COUNTER_BYTES
        statistics(on, weight, bias, running_mean, running_var, coefficients, eps)
        apply(on, y, mask, x, residual, coefficients)

    return run


@lru_cache(maxsize=1024)
def backward(
    device: Device,
    kind: str,
    is_constant: bool,
    is_aligned: bool,
    grad_x: Layout | None,
    grad_residual: Layout | None,
    grad_y: Layout,
    second_grad_y: Layout | None,
    x: Layout,
    *vectors: Layout | None,
) -> Run | None:
    """The launch of both backward kernels, None for operands that are not dense; `kind` is the mask's."""
    if not are_dense((grad_x, grad_residual, grad_y, second_grad_y, x), vectors):
        return None
    if x.shape[1] == 0:
        return nothing
    spread = Spread(device, x.shape, types_of(x.dtype, vectors), is_aligned)
    wants_x, wants_residual = grad_x is not None, grad_residual is not None
    name = kind + "_store" * wants_residual + "_two" * (second_grad_y is not None)
    if wants_x and name != "recomputed_store":
        small = spread.small(device, f"gradients_{name}", "11Qd", "i", int(is_constant))
        if small is not None:
            return small
    sums = spread.reduce(device, f"sum_gradients_{name}", "13Qd", "i", int(is_constant))
    # Where the masked gradient was stored, the second pass reads that.
    apply = spread.apply(device, f"apply_gradients_{'open' if wants_residual else kind}", "5Q")
    room, parts_bytes = spread.room, spread.parts_bytes

    def run(on, grad_x, grad_residual, grad_weight, grad_bias, grad_y, second, x, weight, mean, inv_std, mask, eps):
        counters = launch.workspace(device, on, room)
        parts = counters + launch.COUNTER_BYTES
        coefficients = parts + parts_bytes
        sums(
            on, grad_residual, grad_weight, grad_bias, coefficients, grad_y, second, x, weight, mean, inv_std, mask,
            parts, counters, eps,
        )  # fmt: skip
        if grad_x:
            apply(on, grad_x, grad_residual or grad_y, x, mask, coefficients)

    return run


def _apply_name(relu: bool, has_residual: bool, has_mask: bool) -> str:
    bits = has_mask and has_residual
    return "apply" + "_add" * has_residual + "_relu" * relu + "_bits" * bits


def nothing(*_: object) -> None:
    """What is to be done for images without channels, or a second pass over none."""


def are_dense(images: Layouts, vectors: Layouts) -> bool:
    """Whether images lie NHWC, and figures per channel side by side."""
    return all(
        layout is None
        or all(
            extent <= 1 or step == dense
            for extent, step, dense in zip(
                layout.shape,
                layout.stride,
                channels_last_stride(layout.shape),  # type: ignore[arg-type]
                strict=True,
            )
        )
        for layout in images
    ) and all(layout is None or layout.shape[0] <= 1 or layout.stride == (1,) for layout in vectors)


def types_of(storage: DType, vectors: Layouts) -> Types:
    """Those of images of type `storage` with these figures per channel. Raises TypeError where they are of several."""
    statistic, _, *rest = [None if vector is None else vector.dtype for vector in vectors]
    given = {dtype for dtype in rest if dtype is not None} or {statistic}
    if len(given) > 1:
        raise TypeError(
            "batch_norm takes weight, bias, their gradients and running figures of one type; got"
            f" {', '.join(sorted(dtype.name for dtype in given))}"
        )
    return Types(storage, given.pop(), statistic)


class Spread:
    """How images [n, c, h, w] are spread over blocks and threads; names as in normalization.cu."""

    def __init__(self, device: Device, shape: Shape, types: Types, is_aligned: bool) -> None:
        self.rows = shape[0] * shape[2] * shape[3]
        self.channels = shape[1]
        pack = 16 // types.storage.itemsize
        self.width = pack if is_aligned and self.channels % pack == 0 else 1
        self.packs = self.channels // self.width
        self.total = self.rows * self.packs
        if self.total > _MOST_PACKS:
            raise ValueError(
                f"batch_norm of shape {list(shape)} has too many elements for one CUDA kernel call, which takes"
                f" {_MOST_PACKS * self.width} of this type; split the batch"
            )
        lanes = min(32, 64 // self.width)
        depth = launch.THREADS // lanes
        self.tile = lanes * self.width
        self.columns = -(-self.packs // lanes)
        # Enough blocks to fill the device, but each with some rows for every thread.
        processors = launch.multiprocessors(device)
        chunks = max(1, min(_REDUCING_BLOCKS * processors // self.columns, -(-self.rows // (_LEAST_ROWS * depth))))
        self.rows_per_block = max(depth, -(-self.rows // chunks // depth) * depth)
        self.chunks = max(1, -(-self.rows // self.rows_per_block))
        # The second pass walks in steps of its grid, which must be a whole number of rows.
        unit = self.packs // gcd(self.packs, launch.THREADS)
        blocks = launch.blocks(device, -(-self.total // _LEAST_PACKS), per_multiprocessor=_APPLYING_BLOCKS)
        # Small images still get a block for each place, since the loads of one thread wait for each other less.
        blocks = max(blocks, launch.blocks(device, self.total, per_multiprocessor=4))
        self.blocks = -(-blocks // unit) * unit
        self.parts_bytes = self.chunks * self.columns * self.tile * 16
        self.coefficient_bytes = _COEFFICIENTS * self.channels * value_bytes(types.storage)
        self.room = self.parts_bytes + self.coefficient_bytes
        self.definitions = {
            "STORAGE": compiler.cxx(types.storage),
            "PARAMETER": compiler.cxx(types.parameter),
            "STATISTIC": compiler.cxx(types.statistic),
            "WIDTH": self.width,
        }

    def reduce(
        self, device: Device, name: str, varying: str, constants: str, *values: int, file: str = "normalization.cu"
    ) -> Run:
        """A kernel of the first pass. Raises ValueError for more channels than there are counters, of 4 bytes, for."""
        most = launch.COUNTER_BYTES // 4 * self.tile
        if self.channels > most:
            raise ValueError(
                f"batch_norm of {self.channels} channels is more than one CUDA kernel call takes, which is {most}; split them"
            )
        return launch.prepare(
            compiler.function(device, file, name, **self.definitions), (self.chunks, self.columns),
            varying, "3i" + constants, (self.rows, self.channels, self.rows_per_block, *values),
        )  # fmt: skip

    def apply(self, device: Device, name: str, varying: str, file: str = "normalization.cu") -> Run:
        """A kernel of the second pass."""
        if self.total == 0:
            return nothing
        return launch.prepare(
            compiler.function(device, file, name, **self.definitions), (self.blocks, 1),
            varying, "2i", (self.total, self.channels),
        )  # fmt: skip

    def small(
        self,
        device: Device,
        name: str,
        varying: str,
        constants: str,
        *values: int,
        file: str = "normalization_small.cu",
    ) -> Run | None:
        """A kernel that does it in one launch; None where it does not pay or does not fit."""
        if self.width == 1 or not 0 < self.rows <= _SMALL_ROWS or self.rows * self.channels > _SMALL_ELEMENTS:
            return None
        has_clusters = compiler.capability(device) >= (9, 0)
        for tile, cluster in ((16, 1), (16, _CLUSTER), (8, _CLUSTER)):
            depth = launch.THREADS // max(1, tile // self.width)
            fits = self.rows <= _ROWS_HELD * depth * cluster and self.channels % tile == 0 and tile >= self.width
            if fits and (cluster == 1 or has_clusters):
                function = compiler.function(device, file, name, **self.definitions, TILE=tile, CLUSTER=cluster)
                rows_per_block = -(-self.rows // cluster)
                return launch.prepare(
                    function, (cluster, self.channels // tile), varying, "3i" + constants,
                    (self.rows, self.channels, rows_per_block, *values),
                )  # fmt: skip
        return None
