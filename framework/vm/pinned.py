"""Pinned memory: memory of the host that a CUDA device reads by itself, while the host goes on."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from framework.device import Device, cpu
from framework.vm import cuda
from framework.vm.allocator import CachingAllocator
from framework.vm.array import Array, dense_stride_like
from framework.vm.machine import machine
from framework.vm.storage import Storage


@lru_cache(maxsize=1)
def allocator() -> CachingAllocator:
    """The allocator of pinned memory, one for all devices. A block that a device still reads is not handed out again."""
    return CachingAllocator(PinnedSource())


def is_pinned(array: Array) -> bool:
    """Whether an array lies in pinned memory."""
    return isinstance(array.storage.block.segment.memory, PinnedMemory)


def pinned(array: Array) -> Array:
    """A copy of an array of the CPU in pinned memory, with the same order of dimensions.

    Raises CudaUnavailableError where there is no CUDA device.
    """
    machine.settle(array)
    nbytes = array.size * array.dtype.itemsize
    copied = Array(Storage(allocator(), nbytes), array.shape, dense_stride_like(array.shape, array.stride), array.dtype)
    np.copyto(copied.host_view(), array.host_view())
    return copied


class PinnedMemory:
    """Memory that the driver has locked, for every device to reach. Raises MemoryError where the system refuses."""

    __slots__ = ("buffer", "device", "ptr")

    def __init__(self, device: Device, nbytes: int) -> None:
        # Locking creates a context on the device that is chosen: without choosing, every rank would have one on the first.
        cuda.choose(device)
        self.device = device
        try:
            self.ptr: int = cuda.api().hostAlloc(nbytes, cuda.api().hostAllocPortable)
        except cuda.api().CUDARuntimeError as refused:
            if refused.status != cuda.NO_MEMORY:
                raise cuda.translated(refused, f"locking {nbytes} bytes of the host's memory") from refused
            raise MemoryError(f"the system refused to lock {nbytes} bytes of the host's memory: {refused}") from refused
        self.buffer: Any = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.ptr))


class PinnedSource:
    """The driver's locked memory of the host, asked for on behalf of the current CUDA device."""

    device = cpu
    title = "the host's pinned memory"
    granularity = 4096
    segment_bytes = 8 * 1024 * 1024
    slack = 0.0

    def reserve(self, nbytes: int) -> PinnedMemory:
        """`nbytes` of locked memory. Raises MemoryError where the system refuses."""
        device = Device("cuda")
        cuda.check(device)
        return PinnedMemory(device, nbytes)

    def release(self, memory: PinnedMemory) -> None:
        """Gives memory back, which is work of its device's context too."""
        cuda.choose(memory.device)
        memory.buffer = None
        cuda.api().freeHost(memory.ptr)

    def available(self) -> None:
        """The driver does not say how much it would lock."""
