"""The memory of CUDA devices: what is held, by whom, and the most that ever was. All figures in bytes."""

from __future__ import annotations

from collections.abc import Callable

from framework.device import DeviceLike, cuda_device
from framework.vm import cuda as vm_cuda
from framework.vm import memory_report
from framework.vm.allocator import CachingAllocator
from framework.vm.runtime import existing_runtime, runtime


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors hold."""
    return _of(device, CachingAllocator.allocated)


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes got from the driver, in use or cached."""
    return _of(device, CachingAllocator.reserved)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors held at once since the last reset."""
    return _of(device, CachingAllocator.peak_allocated)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most bytes reserved at once since the last reset."""
    return _of(device, CachingAllocator.peak_reserved)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Lets both peaks start again from what is held now."""
    made = existing_runtime(cuda_device(device))
    if made is not None:
        made.allocator.reset_peaks()


def set_memory_limit(nbytes: int | None, device: DeviceLike = None) -> None:
    """Refuses, with OutOfMemoryError, to reserve more than `nbytes`; None lifts the limit."""
    runtime(cuda_device(device)).allocator.set_limit(nbytes)


def empty_cache(device: DeviceLike = None) -> None:
    """Gives memory that nothing uses back to the driver."""
    made = existing_runtime(cuda_device(device))
    if made is not None:
        made.allocator.empty_cache()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Bytes of the device that no process holds, and all it has."""
    wanted = cuda_device(device)
    vm_cuda.check(wanted)
    return vm_cuda.free_and_total(wanted)


def memory_summary(device: DeviceLike = None) -> str:
    """A table of what is held, by the module and operation that asked for it."""
    made = existing_runtime(cuda_device(device))
    return "nothing was allocated on this device yet" if made is None else memory_report.summary(made.allocator)


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """What the allocator counts, under PyTorch's names: bytes and numbers of blocks, in use and at their peak."""
    made = existing_runtime(cuda_device(device))
    return {} if made is None else memory_report.stats(made.allocator)


def _of(device: DeviceLike, figure: Callable[[CachingAllocator], int]) -> int:
    """A figure of a device's allocator; 0 where the device was never used, which stays so."""
    made = existing_runtime(cuda_device(device))
    return 0 if made is None else figure(made.allocator)
