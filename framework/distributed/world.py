"""The ranks of this job: brought together once, then split into groups."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from framework.device import Device
from framework.distributed import backends
from framework.distributed.environment import Environment, read_environment
from framework.distributed.errors import DistributedError, rank_list
from framework.distributed.group import ProcessGroup
from framework.distributed.store import Store

DEFAULT_TIMEOUT_S = 600.0
# How long rank 0 keeps the store for ranks that have not said goodbye.
_GOODBYE_S = 10.0


class Group:
    """Some of the job's ranks, with a process group for each type of device, made when it is first needed.

    `ranks` are their numbers in the world; `rank` is this process's number among them, -1 where it is not one of them.
    """

    def __init__(self, world: World, name: str, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.name = name
        self.ranks = ranks
        self.rank = ranks.index(world.rank) if world.rank in ranks else -1
        self.size = len(ranks)
        self._made: dict[str, ProcessGroup] = {}

    def on(self, device: Device) -> ProcessGroup:
        """The process group for arrays of `device`. Raises DistributedError where there is none for its type."""
        made = self._made.get(device.type)
        if made is None:
            self._check_member()
            backend = backends.choose(self.world.wanted, device.type, self.world.machines)
            made = self._made[device.type] = backends.make(backend, self, device)
        return made

    def index(self, rank: int) -> int:
        """The number within the group of rank `rank` of the world."""
        self._check_member()
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in group {self.name}, which has {rank_list(list(self.ranks))}")
        return self.ranks.index(rank)

    def close(self) -> None:
        """Gives up its process groups."""
        for made in self._made.values():
            made.close()
        self._made.clear()

    def check(self) -> None:
        """Raises CollectiveError where one of its process groups has failed."""
        for made in self._made.values():
            made.check()

    def _check_member(self) -> None:
        if self.rank < 0:
            raise ValueError(
                f"rank {self.world.rank} is not in group {self.name}, which has {rank_list(list(self.ranks))}: only those"
                " call its collectives"
            )

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"


@dataclass(eq=False)
class World:
    """What `init_process_group` found: this rank, all the others, and how they communicate."""

    rank: int
    size: int
    local_rank: int
    wanted: str | None
    timeout_s: float
    store: Store
    machines: backends.Machines
    groups: list[Group] = field(default_factory=list)
    # How many times values were exchanged through the store, by group.
    exchanges: dict[str, int] = field(default_factory=dict)

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.groups[0]


_world: World | None = None


def init_process_group(backend: str | None = None, timeout: float = DEFAULT_TIMEOUT_S) -> None:
    """Brings this rank together with the others that the launcher started.

    The ranks are read from the environment, as the launch module, torchrun, mpirun and srun set it. `backend` is `shm` (one
    machine, CPU and CUDA tensors), `nccl` (CUDA tensors, a GPU for each rank) or `mpi` (CPU tensors); None takes, for CUDA
    tensors, nccl where there are GPUs for all, and otherwise shm on one machine and mpi on several. `timeout`, in seconds,
    bounds every wait for another rank. The default CUDA device becomes number LOCAL_RANK modulo the number of GPUs.

    Raises DistributedError where the ranks do not find each other, naming those that did not come.
    """
    global _world
    if _world is not None:
        raise DistributedError("init_process_group() was called before; destroy_process_group() comes in between")
    backends.check_name(backend)
    if not timeout > 0:
        raise ValueError(f"a timeout is a number of seconds above 0, not {timeout!r}")
    environment = read_environment(os.environ)
    devices = _choose_device(environment.local_rank)
    store = Store(environment, timeout)
    try:
        _world = _meet(environment, store, backend, timeout, devices)
    except BaseException:
        store.close()
        raise


def destroy_process_group() -> None:
    """Lets go of the other ranks. Raises CollectiveError if a collective had failed and nobody was told."""
    global _world
    if _world is None:
        raise DistributedError("there is no process group to destroy: init_process_group() was not called")
    world, _world = _world, None
    try:
        for group in world.groups:
            group.check()
    finally:
        for group in world.groups:
            group.close()
        _say_goodbye(world)


def is_initialized() -> bool:
    """Whether `init_process_group` was called."""
    return _world is not None


def world() -> World:
    """The ranks of this job. Raises DistributedError before `init_process_group`."""
    if _world is None:
        raise DistributedError("flow.distributed.init_process_group() has to be called first, on every rank")
    return _world


def get_rank(group: Group | None = None) -> int:
    """This process's number in the group (the world), from 0; -1 where it is not in the group."""
    return (group or world().everyone).rank


def get_world_size(group: Group | None = None) -> int:
    """How many ranks the group (the world) has."""
    return (group or world().everyone).size


def get_local_rank() -> int:
    """This process's number among the ranks of its machine, from 0."""
    return world().local_rank


def get_backend(device: Device | str = "cpu") -> str:
    """The name of the backend that tensors of `device` use."""
    return backends.choose(world().wanted, Device(device).type, world().machines)


def new_group(ranks: list[int]) -> Group:
    """A group of some ranks, given by their numbers in the world. Every rank calls this, in the same order of groups."""
    current = world()
    chosen = tuple(ranks)
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= rank < current.size for rank in chosen):
        raise ValueError(f"a group has different ranks from 0 to {current.size - 1}, at least one; got {list(ranks)}")
    group = Group(current, f"group {len(current.groups)}", chosen)
    current.groups.append(group)
    return group


def _choose_device(local_rank: int | None) -> int:
    """Makes the rank's own GPU the current one, before anything can make a context on another; returns how many there are."""
    from framework import cuda

    count = cuda.device_count()
    if count and local_rank is not None:
        cuda.set_device(local_rank % count)
    return count


def _meet(environment: Environment, store: Store, backend: str | None, timeout_s: float, devices: int) -> World:
    rank, size = environment.rank, environment.world_size
    me = {
        "machine": _machine(),
        "host": platform.node(),
        "pid": os.getpid(),
        "backend": backend,
        "size": size,
        "gpus": devices,
    }
    mine = json.dumps(me).encode()
    if store.compare_set(f"rank/{rank}", b"", mine) != mine:
        raise DistributedError(f"two processes say that they are rank {rank}: each needs a RANK of its own")
    ranks = [json.loads(value) for value in _gather(store, "rank", size, timeout_s)]
    for key, what in (("backend", "a backend"), ("size", "a world size")):
        if any(other[key] != me[key] for other in ranks):
            said = ", ".join(f"rank {number}: {other[key]}" for number, other in enumerate(ranks))
            raise DistributedError(f"the ranks were given different values of {what} ({said}); all need the same")
    neighbours = [number for number, other in enumerate(ranks) if other["machine"] == me["machine"]]
    local_rank = environment.local_rank
    if local_rank is None:
        local_rank = neighbours.index(rank)
        _choose_device(local_rank)
    machines = backends.Machines(
        count=len({other["machine"] for other in ranks}),
        gpus_suffice=all(
            other["gpus"] >= sum(same["machine"] == other["machine"] for same in ranks) for other in ranks
        ),
    )
    made = World(rank, size, local_rank, backend, timeout_s, store, machines)
    made.groups.append(Group(made, "world", tuple(range(size))))
    return made


def _gather(store: Store, name: str, size: int, timeout_s: float) -> list[bytes]:
    """What every rank has set. Raises DistributedError that names the ranks which did not in time."""
    deadline = time.monotonic() + timeout_s
    found = [store.get(f"{name}/{rank}", max(0.0, deadline - time.monotonic())) for rank in range(size)]
    missing = [rank for rank, value in enumerate(found) if value is None]
    if missing:
        raise DistributedError(
            f"{rank_list(missing)} of {size} did not start within {timeout_s:g} s (the store at {store.where} heard nothing of"
            " them); a rank that is slow to start needs a longer timeout"
        )
    return [value for value in found if value is not None]


def _machine() -> str:
    """What processes of one machine have in common, and others have not: the start of its kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _say_goodbye(current: World) -> None:
    """Tells rank 0 that the store is not needed any more; rank 0 waits for all to say so."""
    try:
        left = current.store.add("goodbye", 1)
        deadline = time.monotonic() + _GOODBYE_S
        while current.rank == 0 and left < current.size and time.monotonic() < deadline:
            time.sleep(0.005)
            left = current.store.add("goodbye", 0)
    except DistributedError:
        if current.rank == 0:
            raise
        # Rank 0 has ended, and with it the store: there is nothing to say goodbye to.
    finally:
        current.store.close()


def exchange_key(group: Group, current: World) -> str:
    """A name, the same on every rank of the group, for values to be exchanged through the store next."""
    number = current.exchanges[group.name] = current.exchanges.get(group.name, 0) + 1
    return f"{group.name}/exchange/{number}"


def gather_values(group: Group, value: bytes, timeout_s: float) -> list[Any]:
    """The values of all ranks of the group, by way of the store."""
    current = world()
    key = exchange_key(group, current)
    current.store.set(f"{key}/{group.rank}", value)
    return _gather(current.store, key, group.size, timeout_s)
