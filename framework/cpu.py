"""Memory of the CPU device: what its allocator holds, in bytes."""

from __future__ import annotations

from framework.device import cpu
from framework.vm import memory_report
from framework.vm.allocator import CachingAllocator
from framework.vm.runtime import runtime


def memory_allocated() -> int:
    """Bytes that tensors hold."""
    return _allocator().allocated()


def memory_reserved() -> int:
    """Bytes got from the operating system, in use or cached."""
    return _allocator().reserved()


def max_memory_allocated() -> int:
    """The most bytes that tensors held at once since the last reset."""
    return _allocator().peak_allocated()


def max_memory_reserved() -> int:
    """The most bytes reserved at once since the last reset."""
    return _allocator().peak_reserved()


def reset_peak_memory_stats() -> None:
    """Lets both peaks start again from what is held now."""
    _allocator().reset_peaks()


def set_memory_limit(nbytes: int | None) -> None:
    """Refuses, with OutOfMemoryError, to reserve more than `nbytes`; None lifts the limit."""
    _allocator().set_limit(nbytes)


def empty_cache() -> None:
    """Gives memory that nothing uses back to the operating system."""
    _allocator().empty_cache()


def memory_summary() -> str:
    """A table of what is held, by the module and operation that asked for it."""
    return memory_report.summary(_allocator())


def _allocator() -> CachingAllocator:
    return runtime(cpu).allocator
