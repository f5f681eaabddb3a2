"""Which backend serves which tensors, and making its process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from framework.device import Device
from framework.distributed.errors import DistributedError
from framework.distributed.group import ProcessGroup

if TYPE_CHECKING:
    from framework.distributed.world import Group

NAMES = ("shm", "nccl", "mpi")


@dataclass(frozen=True)
class Machines:
    """What the job runs on: how many machines, and whether each has a GPU for every one of its ranks."""

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
    """The process group; all ranks of `group` have to come."""
    world = group.world
    name = f"{group.name}/{backend}"
    if backend == "shm":
        from framework.distributed.shm import ShmGroup

        return ShmGroup(world.store, name, group.rank, group.ranks, world.timeout_s)
    raise DistributedError(f"backend {backend!r} is not built yet")
