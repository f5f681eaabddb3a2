"""CUDA devices: which there are, waiting for them, their memory, streams and events.

Functions that take a device mean the current one where none is given: the first, or what `set_device` was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from framework.device import Device, set_current
from framework.vm import cuda as vm_cuda
from framework.vm import report
from framework.vm.cuda import CudaError, CudaUnavailableError, device_count
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.memory import CachingAllocator
from framework.vm.runtime import existing_runtime, runtime

__all__ = [
    "CudaError",
    "CudaUnavailableError",
    "Event",
    "current_device",
    "device_count",
    "empty_cache",
    "is_available",
    "launch_blocking",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_summary",
    "reset_peak_memory_stats",
    "set_device",
    "set_memory_limit",
    "synchronize",
    "why",
]


def is_available() -> bool:
    """Whether there is a CUDA device to use. Makes no context."""
    return vm_cuda.why() is None


def why() -> str | None:
    """Why no CUDA device can be used, with the way out; None where one can."""
    return vm_cuda.why()


def set_device(device: Device | str | int) -> None:
    """Makes a device the current one, which `"cuda"` then means. A rank does this before anything else."""
    set_current(_device(device))


def current_device() -> Device:
    """What `"cuda"` means."""
    return Device("cuda")


def synchronize(device: Device | str | int | None = None) -> None:
    """Returns when everything issued to the device has run. Raises CudaError where some of it failed."""
    wanted = _device(device)
    if existing_runtime(wanted) is not None:
        machine.synchronize(wanted)


@contextmanager
def launch_blocking() -> Iterator[None]:
    """Waits for every instruction within it, so that a fault is raised as a CudaError that names its instruction."""
    with machine.observed(_wait_for_each):
        yield


class Event:
    """A point in a device's work, to wait for and to measure times between.

    `enable_timing` as in PyTorch; without it an event costs less.
    """

    def __init__(self, *, enable_timing: bool = False, device: Device | str | int | None = None) -> None:
        self._stream = runtime(_device(device)).compute
        cuda = vm_cuda.api()
        vm_cuda.choose(self._stream.device)
        self._event = cuda.eventCreateWithFlags(cuda.eventDefault if enable_timing else cuda.eventDisableTiming)
        self._timed = enable_timing

    def record(self) -> None:
        """Moves the event behind everything issued so far."""
        vm_cuda.api().eventRecord(self._event, vm_cuda.stream_pointer(self._stream.device))

    def query(self) -> bool:
        """Whether everything before it has run."""
        return vm_cuda.has_passed(self._event)

    def synchronize(self) -> None:
        """Returns when everything before it has run."""
        try:
            vm_cuda.api().eventSynchronize(self._event)
        except vm_cuda.api().CUDARuntimeError as error:
            raise vm_cuda.translated(error, "waiting for an event") from error

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`, both recorded with timing and passed."""
        if not (self._timed and end._timed):
            raise RuntimeError("elapsed_time needs two events made with enable_timing=True")
        return float(vm_cuda.api().eventElapsedTime(self._event, end._event))

    def __del__(self) -> None:
        # Absent where __init__ found no device.
        event = getattr(self, "_event", None)
        if event is not None and not sys.is_finalizing():
            vm_cuda.api().eventDestroy(event)


# ---- memory


def memory_allocated(device: Device | str | int | None = None) -> int:
    """Bytes that tensors hold."""
    return _of(device, CachingAllocator.allocated)


def memory_reserved(device: Device | str | int | None = None) -> int:
    """Bytes got from the driver, in use or cached."""
    return _of(device, CachingAllocator.reserved)


def max_memory_allocated(device: Device | str | int | None = None) -> int:
    """The most bytes that tensors held at once since the last reset."""
    return _of(device, CachingAllocator.peak_allocated)


def max_memory_reserved(device: Device | str | int | None = None) -> int:
    """The most bytes reserved at once since the last reset."""
    return _of(device, CachingAllocator.peak_reserved)


def reset_peak_memory_stats(device: Device | str | int | None = None) -> None:
    """Lets both peaks start again from what is held now."""
    made = existing_runtime(_device(device))
    if made is not None:
        made.allocator.reset_peaks()


def set_memory_limit(nbytes: int | None, device: Device | str | int | None = None) -> None:
    """Refuses, with OutOfMemoryError, to reserve more than `nbytes`; None lifts the limit."""
    runtime(_device(device)).allocator.set_limit(nbytes)


def empty_cache(device: Device | str | int | None = None) -> None:
    """Gives memory that nothing uses back to the driver."""
    made = existing_runtime(_device(device))
    if made is not None:
        made.allocator.empty_cache()


def mem_get_info(device: Device | str | int | None = None) -> tuple[int, int]:
    """Bytes of the device that no process holds, and all it has."""
    wanted = _device(device)
    vm_cuda.check(wanted)
    return vm_cuda.free_and_total(wanted)


def memory_summary(device: Device | str | int | None = None) -> str:
    """A table of what is held, by the module and operation that asked for it."""
    made = existing_runtime(_device(device))
    return "nothing was allocated on this device yet" if made is None else report.summary(made.allocator)


def _device(device: Device | str | int | None) -> Device:
    wanted = Device("cuda", device) if isinstance(device, int) else Device("cuda" if device is None else device)
    if wanted.type != "cuda":
        raise ValueError(f"flow.cuda is about CUDA devices, not {wanted}")
    return wanted


def _of(device: Device | str | int | None, figure: Callable[[CachingAllocator], int]) -> int:
    """A figure of a device's allocator; 0 where the device was never used, which stays so."""
    made = existing_runtime(_device(device))
    return 0 if made is None else figure(made.allocator)


def _wait_for_each(instruction: Instruction, run: Callable[[], None]) -> None:
    run()
    try:
        machine.synchronize()
    except CudaError as error:
        raise CudaError(f"{instruction!r} failed on the device: {error.__cause__}") from error
