"""Dense stand-ins: for operands of kernels that take them only dense, images NHWC."""

from __future__ import annotations

from typing import Any

from framework.kernels.cuda import elementwise
from framework.vm import scratch
from framework.vm.array import Array, channels_last_stride


class Dense:
    """Dense stand-ins for operands, and the way back for those that are written."""

    def __init__(self) -> None:
        self._back: list[tuple[Array, Array]] = []

    def read(self, array: Array | None) -> Any:
        """A copy; the array itself where it is dense."""
        stand_in = self._stand_in(array)
        if stand_in is not array:
            elementwise.copy(stand_in, array)
        return stand_in

    def written(self, array: Array | None) -> Any:
        """Room for what is to be written."""
        stand_in = self._stand_in(array)
        if stand_in is not array:
            self._back.append((array, stand_in))
        return stand_in

    def updated(self, array: Array | None) -> Any:
        """A copy that goes back."""
        stand_in = self.written(array)
        if stand_in is not array:
            elementwise.copy(stand_in, array)
        return stand_in

    def give_back(self) -> None:
        """Copies what was written to where it belongs."""
        for array, stand_in in self._back:
            elementwise.copy(array, stand_in)

    @staticmethod
    def _stand_in(array: Array | None) -> Any:
        if array is None or (array.is_channels_last if array.ndim == 4 else array.is_contiguous):
            return array
        room = scratch(array.storage.device, array.nbytes)
        stride = channels_last_stride(array.shape) if array.ndim == 4 else (1,)
        return Array(room.storage, array.shape, stride, array.dtype)
