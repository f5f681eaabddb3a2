"""Host memory from the operating system, for the allocator of the CPU device."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from framework.device import cpu

_PAGE_BYTES = mmap.PAGESIZE
_HAS_PRIVATE = hasattr(mmap, "MAP_PRIVATE")


class HostMemory:
    """Anonymous memory, mapped lazily: a page costs nothing until it is touched."""

    __slots__ = ("buffer", "ptr")

    def __init__(self, nbytes: int) -> None:
        # Private, so that a forked process gets a copy of its own; Windows has no such choice to make.
        mapping = (
            mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if _HAS_PRIVATE else mmap.mmap(-1, nbytes)
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Kernels stride through memory: with pages of 4 KiB they wait for address translation.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.buffer: Any = np.frombuffer(mapping, np.uint8)
        self.ptr: int = self.buffer.ctypes.data


class HostSource:
    """The operating system's memory."""

    device = cpu
    title = "cpu"
    granularity = _PAGE_BYTES
    segment_bytes = 32 * 1024 * 1024
    slack = 0.0

    def reserve(self, nbytes: int) -> HostMemory:
        """`nbytes` of zeroed memory. Raises MemoryError where the system refuses."""
        try:
            return HostMemory(nbytes)
        except (OSError, OverflowError, ValueError) as refused:
            raise MemoryError(f"the system refused {nbytes} bytes: {refused}") from refused

    def release(self, memory: HostMemory) -> None:
        """Drops the mapping; the system has it back once no NumPy view is left."""
        memory.buffer = None

    def available(self) -> None:
        """The system lends more than it has, so there is no telling."""
