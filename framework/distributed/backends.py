"""Which backend serves which tensors, and making its process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.device import Device, cpu
from framework.distributed.errors import DistributedError, rank_list
from framework.distributed.process_group import ProcessGroup
from framework.vm import cuda
from framework.vm.host_stream import HostStream
from framework.vm.machine import machine
from framework.vm.runtime import runtime
from framework.vm.stream import Stream

if TYPE_CHECKING:
    from framework.distributed.groups import Group

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
        of_pytorch = "; in place of gloo leave it out" if backend == "gloo" else ""
        raise ValueError(f"a backend is one of {', '.join(NAMES)}, or None for what fits; not {backend!r}{of_pytorch}")


def check(wanted: str | None, machines: Machines, gpus: list[str | None]) -> None:
    """Raises DistributedError where the backend asked for cannot serve these ranks; `gpus` says where each one's GPU sits."""
    if wanted == "shm":
        choose(wanted, "cpu", machines)
    if wanted != "nccl":
        return
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if without:
        raise DistributedError(
            f'backend="nccl" needs a GPU for each rank, and {rank_list(without)} found none: {cuda.why() or "see there"}'
        )
    if not machines.gpus_suffice:
        raise DistributedError(
            f"{len(gpus)} ranks have fewer GPUs than that ({', '.join(map(str, gpus))}), and NCCL refuses two ranks on one:"
            ' start one rank per GPU, or take backend="shm", which goes through the host'
        )


def serves_host(wanted: str | None, machines: Machines) -> bool:
    """Whether CPU tensors have a backend that is certain to be there."""
    return wanted in ("shm", "mpi") or (wanted is None and machines.count == 1)


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


def is_on_host(backend: str) -> bool:
    """Whether what a backend does is work of the host, also for tensors of a CUDA device."""
    return backend != "nccl"


def open_stream(backend: str, device: Device) -> Stream:
    """The stream that the collectives of a device go to: what a backend does on the host runs in a thread of its own."""
    kernels = runtime(device)
    if is_on_host(backend):
        return machine.add_stream(HostStream(device, STREAM))
    return kernels.open_stream(STREAM)
