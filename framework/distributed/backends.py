"""Which backend serves which tensors, and making its process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.device import Device, cpu
from framework.distributed.errors import DistributedError
from framework.distributed.group import ProcessGroup
from framework.vm.host_stream import HostStream
from framework.vm.machine import machine
from framework.vm.runtime import runtime
from framework.vm.stream import Stream

if TYPE_CHECKING:
    from framework.distributed.world import Group

STREAM = "communication"
NAMES = ("shm", "nccl", "mpi")


@dataclass(frozen=True)
class Machines:
    """What the job runs on: how many machines, and whether each rank has a GPU of its own."""

    count: int
    gpus_suffice: bool


def check_name(backend: str | None) -> None:
    """Raises ValueError for a backend that does not exist."""
    if backend is not None and backend not in NAMES:
        raise ValueError(f"a backend is one of {', '.join(NAMES)}, or None for what fits; not {backend!r}")


def choose(wanted: str | None, device_type: str, machines: Machines) -> str:
    """The backend for tensors of a type of device. Raises DistributedError, naming the way out, where none serves."""
    if wanted == "nccl" and device_type == "cpu":
        raise DistributedError(
            'backend="nccl" moves CUDA tensors alone; for CPU tensors too leave the backend out, or move them to the GPU'
        )
    if wanted == "mpi" and device_type == "cuda":
        raise DistributedError(
            'backend="mpi" moves CPU tensors alone; for CUDA tensors take backend="nccl", or "shm" on one machine'
        )
    if wanted == "shm" and machines.count > 1:
        raise DistributedError(
            f'backend="shm" is for ranks of one machine, and these are on {machines.count}; take "nccl" for CUDA tensors,'
            ' "mpi" for those of the CPU'
        )
    if wanted is not None:
        return wanted
    if device_type == "cuda" and machines.gpus_suffice:
        return "nccl"
    if machines.count == 1:
        return "shm"
    if device_type == "cuda":
        raise DistributedError(
            "CUDA tensors on several machines need nccl, with a GPU for each rank: some machine has fewer GPUs than ranks"
        )
    return "mpi"


def make(backend: str, group: Group, device: Device) -> ProcessGroup:
    """The process group for arrays of `device`; all ranks of `group` have to come."""
    name = f"{group.name}/{backend}/{device.type}"
    if backend == "nccl":
        from framework.distributed.nccl import NcclGroup

        return NcclGroup(group, name, device)
    if backend == "mpi":
        from framework.distributed.mpi import MpiGroup

        return MpiGroup(group, name)
    from framework.distributed.shm import ShmGroup

    shared = ShmGroup(group, name)
    if device is cpu:
        return shared
    from framework.distributed.staged import StagedGroup

    return StagedGroup(shared, device)


def open_stream(backend: str, device: Device) -> Stream:
    """The stream that the collectives of a device go to: what a backend does on the host runs in a thread of its own."""
    kernels = runtime(device)
    if backend == "nccl":
        return kernels.open_stream(STREAM)
    return machine.add_stream(HostStream(device, STREAM))
