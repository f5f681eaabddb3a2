"""Convolutions with stride 2 over few channels, as the first one of a network, as ones with stride 1 over many.

Four neighbouring pixels become one with four times the channels, and weights alike; cuDNN is about twice as fast on
these. With t = padding mod 2, tap r of a kernel goes to place (r + t) mod 2 of tap ⌊(r + t) / 2⌋.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, launch
from framework.vm import scratch
from framework.vm.array import Array, channels_last_stride

_MOST_CHANNELS = 4
Shape = tuple[int, ...]


def applies(x: Array, weight: Array, geometry: Any) -> bool:
    """Whether a convolution gains from folding."""
    return (
        geometry.stride == (2, 2)
        and geometry.dilation == (1, 1)
        and geometry.groups == 1
        and x.shape[1] <= _MOST_CHANNELS
        and min(weight.shape[2:]) >= 3
    )


class Fold(NamedTuple):
    """How the operands of one convolution are folded; shapes of the folded ones, and how far they are moved inside."""

    dtype: DType
    images_shape: Shape
    images_margin: tuple[int, int]
    weights_shape: Shape
    weights_margin: tuple[int, int]
    geometry: tuple

    @staticmethod
    @lru_cache(maxsize=256)
    def of(x: Shape, weight: Shape, y: Shape, geometry: Any, dtype: DType) -> Fold:
        """The fold for a convolution of images `x` with `weight` that gives `y`."""
        group = 16 // dtype.itemsize
        depth = -(-4 * x[1] // group) * group
        shift = (geometry.padding[0] % 2, geometry.padding[1] % 2)
        taps = tuple([-(-(weight[2 + i] + shift[i]) // 2) for i in (0, 1)])
        cells = tuple([y[2 + i] + taps[i] - 1 for i in (0, 1)])
        margin = (geometry.padding[0] + shift[0], geometry.padding[1] + shift[1])
        one = (1, 1)
        return Fold(dtype, (x[0], depth, *cells), margin, (weight[0], depth, *taps), shift, (one, (0, 0), one, 1))

    def images(self, x: Array) -> Array:
        """x folded, with its padding."""
        folded = self._room(self.images_shape, x.storage.device)
        _launch("fold", folded, x, folded=folded, plain=x, margin=self.images_margin)
        return folded

    def weights(self, weight: Array) -> Array:
        """The weights folded."""
        folded = self.empty_weights(weight.storage.device)
        _launch("fold", folded, weight, folded=folded, plain=weight, margin=self.weights_margin)
        return folded

    def empty_weights(self, device: Device) -> Array:
        """Room for folded weights."""
        return self._room(self.weights_shape, device)

    def unfold_weights(self, weight: Array, folded: Array) -> None:
        """The inverse of `weights`."""
        _launch("unfold", weight, folded, folded=folded, plain=weight, margin=self.weights_margin)

    def _room(self, shape: Shape, device: Device) -> Array:
        n, c, h, w = shape
        room = scratch(device, n * c * h * w * self.dtype.itemsize)
        return Array(room.storage, shape, channels_last_stride((n, c, h, w)), self.dtype)


def _launch(name: str, out: Array, source: Array, *, folded: Array, plain: Array, margin: tuple[int, int]) -> None:
    device = out.storage.device
    run = _prepare(device, name, out.dtype, plain.shape, plain.stride, folded.shape, margin)
    run(launch.stream(device), out.ptr, source.ptr)


@lru_cache(maxsize=256)
def _prepare(
    device: Device, name: str, dtype: DType, plain: Shape, stride: Shape, folded: Shape, margin: tuple[int, int]
) -> Callable[..., None]:
    n, depth, rows, columns = folded
    threads = (
        n * rows * columns * depth * dtype.itemsize // 16 if name == "fold" else n * plain[1] * plain[2] * plain[3]
    )
    function = compiler.function(device, "space_to_depth.cu", name, TYPE=compiler.cxx(dtype))
    grid = (launch.blocks(device, threads, per_multiprocessor=16), 1)
    return launch.prepare(function, grid, "QQ", "13q", (*plain, *stride, rows, columns, depth, *margin))
