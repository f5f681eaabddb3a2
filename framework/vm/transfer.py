"""The runtime of a CUDA device, and how values travel between it and the host: through pinned memory, in pieces."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from framework.device import Device
from framework.dtype import DType
from framework.kernels.table import kernel
from framework.vm import cuda
from framework.vm.allocator import CachingAllocator
from framework.vm.array import Array, channels_last_stride, contiguous_stride, dense_stride_like
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.pinned import PinnedMemory
from framework.vm.runtime import Runtime
from framework.vm.side_stream import SideStream
from framework.vm.stream import Stream

_PIECE_BYTES = 8 * 1024 * 1024
_PIECES = 2
# Multiplications of an instruction that is worth the waits between two streams.
_LEAST_BESIDE = 2_500_000_000


class CudaRuntime(Runtime):
    """The runtime of a CUDA device. Raises CudaUnavailableError where the device cannot be used."""

    def __init__(self, device: Device) -> None:
        from framework.kernels import table_for

        cuda.check(device)
        cuda.choose(device)
        stream = cuda.CudaStream(device, "compute")
        super().__init__(device, CachingAllocator(cuda.CudaSource(device)), table_for(device), stream)
        self._staging = Staging(stream)
        self._beside: SideStream | None = None

    def open_stream(self, name: str) -> Stream:
        """A stream beside the compute stream, whose work the device prefers where it has to choose."""
        return machine.add_stream(cuda.CudaStream(self.device, name, urgent=True))

    def beside(self, multiplications: int) -> Any:
        """A second compute stream, for instructions that take the device longer than the host takes to send them there."""
        if multiplications < _LEAST_BESIDE or not machine.goes_to_first(self.device):
            return self
        if self._beside is None:
            stream = machine.add_stream(cuda.CudaStream(self.device, "beside"))
            self._beside = SideStream(self.table, stream)
        return self._beside

    def join(self) -> None:
        """Lets whatever is issued from now on come after all that was issued beside it."""
        if self._beside is not None:
            self._beside.join()

    def from_host(self, values: np.ndarray, dtype: DType) -> Array:
        """A new array with a copy of `values`, converted to `dtype`; images and their like lie NHWC.

        Returns when `values` has been read; the copy to the device may still be under way.
        """
        bits = dtype.encode(values)
        if bits.ndim != 4:
            array = self.empty(bits.shape, dtype)
            self._staging.send(array.ptr, np.ascontiguousarray(bits))
            return array
        array = self.empty(bits.shape, dtype, channels_last_stride(bits.shape))
        nhwc = bits.transpose(0, 2, 3, 1)
        if nhwc.flags.c_contiguous:
            self._staging.send(array.ptr, nhwc)
        else:
            # The device transposes many times faster than the host.
            dense = self.empty(bits.shape, dtype)
            self._staging.send(dense.ptr, np.ascontiguousarray(bits))
            self.copy(array, dense)
        return array

    def from_pinned(self, array: Array) -> Array:
        """A new array with a copy of one in pinned memory, laid out as `from_host` does it. Returns at once.

        The device copies when its stream comes to it, which is before whatever uses the copy. A view with gaps is copied
        as `from_host` does it.
        """
        if not (array.is_contiguous or array.is_channels_last):
            machine.settle(array)
            return self.from_host(array.dtype.decode(array.host_view()), array.dtype)
        sent = self.empty(array.shape, array.dtype, array.stride)
        stream = machine.current_stream(self.device)
        machine.issue(Instruction(copy_from_pinned, (sent, array), {}), stream)
        machine.hold(array, stream)
        if array.ndim != 4 or array.is_channels_last:
            return sent
        laid_out = self.empty(array.shape, array.dtype, channels_last_stride(array.shape))
        self.copy(laid_out, sent)
        return laid_out

    def to_host(self, array: Array) -> np.ndarray:
        """The values of `array`, copied to the host when everything issued before has run."""
        machine.settle(array)
        dense = array
        if dense_stride_like(array.shape, array.stride) != array.stride and not array.is_contiguous:
            dense = self.empty(array.shape, array.dtype)
            self.copy(dense, array)
            machine.settle(dense)  # it may have gone to another stream than what comes
        raw = np.empty(array.size, array.dtype.bits)
        self._staging.receive(raw, dense.ptr)
        stride = contiguous_stride(array.shape) if dense.is_contiguous else dense.stride
        itemsize = array.dtype.itemsize
        bits = np.ndarray(array.shape, raw.dtype, raw, 0, tuple([step * itemsize for step in stride]))
        return array.dtype.decode(bits)


@kernel(outputs=1)
def copy_from_pinned(out: Array, a: Array) -> None:
    """out, on a CUDA device, = a, which lies in pinned memory and in the same order."""
    if out.nbytes:
        cuda.copy(out.ptr, a.ptr, out.nbytes, cuda.TO_DEVICE, cuda.stream_pointer(out.storage.device))


class Staging:
    """Pinned memory that copies go through: the device reads and writes it by itself, while the host goes on."""

    def __init__(self, stream: cuda.CudaStream) -> None:
        self.stream = stream
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []
        self._next = -1

    def send(self, target: int, source: np.ndarray) -> None:
        """Copies a C-contiguous array to the device's address `target`."""
        flat = source.reshape(-1).view(np.uint8)
        with self._lock:
            for start in range(0, flat.size, _PIECE_BYTES):
                piece = self._take()
                part = flat[start : start + _PIECE_BYTES]
                piece.buffer[: part.size] = part
                cuda.copy(target + start, piece.ptr, part.size, cuda.TO_DEVICE, self.stream.pointer)
                piece.event = self.stream.record()

    def receive(self, target: np.ndarray, source: int) -> None:
        """Copies from the device's address `source` into a C-contiguous array, and waits for it."""
        flat = target.reshape(-1).view(np.uint8)
        with self._lock:
            under_way: list[tuple[_Piece, np.ndarray]] = []
            for start in range(0, flat.size, _PIECE_BYTES):
                if len(under_way) == _PIECES:
                    self._land(*under_way.pop(0))
                piece = self._take()
                part = flat[start : start + _PIECE_BYTES]
                cuda.copy(piece.ptr, source + start, part.size, cuda.TO_HOST, self.stream.pointer)
                piece.event = self.stream.record()
                under_way.append((piece, part))
            for piece, part in under_way:
                self._land(piece, part)

    def _land(self, piece: _Piece, part: np.ndarray) -> None:
        self._wait(piece)
        part[:] = piece.buffer[: part.size]

    def _take(self) -> _Piece:
        """The piece used longest ago, once the device is done with it."""
        cuda.choose(self.stream.device)
        if len(self._pieces) < _PIECES:
            self._pieces.append(_Piece(self.stream.device))
            return self._pieces[-1]
        self._next = (self._next + 1) % _PIECES
        piece = self._pieces[self._next]
        self._wait(piece)
        return piece

    def _wait(self, piece: _Piece) -> None:
        if piece.event is None:
            return
        try:
            cuda.api().eventSynchronize(piece.event)
        except cuda.api().CUDARuntimeError as error:
            raise cuda.translated(error, "a copy between host and device") from error
        self.stream.recycle(piece.event)
        piece.event = None


class _Piece:
    """A part of pinned memory, and the event behind the last copy that used it."""

    __slots__ = ("buffer", "event", "memory", "ptr")

    def __init__(self, device: Device) -> None:
        self.memory = PinnedMemory(device, _PIECE_BYTES)
        self.ptr, self.buffer = self.memory.ptr, self.memory.buffer
        self.event: int | None = None
