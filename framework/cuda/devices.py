"""CUDA devices: which there are, which is the current one, what they can do, and waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from framework.device import Device, DeviceLike, cuda_device, set_current
from framework.vm import cuda as vm_cuda
from framework.vm import launch_groups
from framework.vm.cuda import CudaError, CudaStream
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.runtime import existing_runtime


@dataclass(frozen=True)
class DeviceProperties:
    """What a device is, under PyTorch's names. `total_memory` in bytes; `major`.`minor` is its compute capability."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int


def is_available() -> bool:
    """Whether there is a CUDA device to use. Makes no context."""
    return vm_cuda.why() is None


def why() -> str | None:
    """Why no CUDA device can be used, with the way out; None where one can."""
    return vm_cuda.why()


def set_device(device: Device | str | int) -> None:
    """Makes a device the current one, which `"cuda"` then means. A rank does this before anything else."""
    set_current(cuda_device(device))


def current_device() -> Device:
    """What `"cuda"` means."""
    return Device("cuda")


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """What a device is. Makes no context. Raises CudaUnavailableError where there is none."""
    wanted = cuda_device(device)
    vm_cuda.check(wanted)
    told = vm_cuda.api().getDeviceProperties(wanted.index)
    return DeviceProperties(
        name=told["name"].decode(),
        major=told["major"],
        minor=told["minor"],
        total_memory=told["totalGlobalMem"],
        multi_processor_count=told["multiProcessorCount"],
    )


def get_device_name(device: DeviceLike = None) -> str:
    """The name that its maker gave a device, such as `NVIDIA H200`."""
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """The compute capability of a device, such as (9, 0)."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def synchronize(device: DeviceLike = None) -> None:
    """Returns when everything issued to the device has run. Raises CudaError where some of it failed."""
    wanted = cuda_device(device)
    if existing_runtime(wanted) is not None:
        launch_groups.flush_all()  # no stream's work waits until the host has waited for another
        machine.synchronize(wanted)


def group_launches(on: bool = True) -> None:
    """Lets launches that come again as they came before go to the device in groups, as they do at first, or one by one.

    A loop whose steps launch the same kernels at the same addresses waits less for the host in groups. Nothing else changes:
    all runs in the order in which it was issued, and has run when anybody looks. The driver keeps each group as a graph, in
    memory that no figure here counts. On a stream whose address was given to other libraries launches go one by one.
    """
    launch_groups.is_on = on
    for stream in machine.streams:
        if isinstance(stream, CudaStream):
            stream.group_launches(on)


@contextmanager
def launch_blocking() -> Iterator[None]:
    """Waits for every instruction within it, so that what fails on the device names its instruction.

    A fault is raised as a CudaError, a class number that cross_entropy has no class for as a ValueError.
    """
    # What failed before is no instruction's within.
    machine.synchronize()
    with machine.observed(_wait_for_each):
        yield


def _wait_for_each(instruction: Instruction, run: Callable[[], Any]) -> None:
    from framework.kernels.cuda import loss

    operands = instruction.writes or instruction.reads
    device = operands[0].storage.device if operands else None
    try:
        run()
        if device is not None and device.type == "cuda":
            machine.synchronize(device)
            loss.raise_for_bad_target(device)
    except CudaError as error:
        raise CudaError(f"{instruction!r} failed on the device: {error.__cause__ or error}") from error
    except loss.BadTargetError as error:
        raise loss.BadTargetError(f"{instruction!r}: {error}") from error
