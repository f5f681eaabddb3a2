"""The ranks of this job: brought together once, then split into groups."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from framework import cuda
from framework.device import Device, cpu
from framework.distributed import backends
from framework.distributed.environment import Environment, read_environment
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError, rank_list
from framework.distributed.group import ProcessGroup
from framework.distributed.peers import Peers
from framework.distributed.store import Store
from framework.vm import cuda as vm_cuda
from framework.vm.runtime import runtime
from framework.vm.stream import Stream

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_TIMEOUT_S = 1e7
# How long rank 0 keeps the store for ranks that have not said goodbye.
_GOODBYE_S = 10.0
_FAILED_GOODBYE_S = 2.0
_LOOK_S = 0.1


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
            self._come_together(device)
            made = self._made[device.type] = backends.make(backend, self, device)
        return made

    def index(self, rank: int) -> int:
        """The number within the group of rank `rank` of the world."""
        self._check_member()
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in group {self.name}, which has {rank_list(list(self.ranks))}")
        return self.ranks.index(rank)

    def neighbours(self) -> dict[int, int]:
        """The process ids of its other ranks on this machine, by their number in the group."""
        members = self.world.members
        here = members[self.world.rank].machine
        return {
            number: members[rank].pid
            for number, rank in enumerate(self.ranks)
            if number != self.rank and members[rank].machine == here
        }

    def close(self) -> None:
        """Gives up its process groups."""
        for made in self._made.values():
            made.close()
        self._made.clear()

    def _come_together(self, device: Device) -> None:
        """Returns when all its ranks are here to make a process group. Raises CollectiveError that names those that are not."""
        store, timeout_s = self.world.store, self.world.timeout_s
        key, peers = f"{self.name}/{device.type}/here", Peers(self.neighbours())
        store.set(f"{key}/{self.rank}", b"")
        deadline = time.monotonic() + timeout_s
        missing = list(range(self.size))
        while missing:
            patience_s = max(0.0, min(_LOOK_S, deadline - time.monotonic()))
            while missing and store.get(f"{key}/{missing[0]}", patience_s) is not None:
                del missing[0]
            late = time.monotonic() > deadline
            if late or any(peers.is_gone(number) for number in missing):
                missing = [number for number in missing if store.get(f"{key}/{number}") is None]
            gone = [self.ranks[number] for number in missing if peers.is_gone(number)]
            if missing and (gone or late):
                came = rank_list([rank for number, rank in enumerate(self.ranks) if number not in missing])
                absent = rank_list([self.ranks[number] for number in missing])
                first = f"the first collective of group {self.name} on {device.type}: {came} came, {absent} did not"
                if gone:
                    raise CollectiveError(f"{first}: {rank_list(gone)} ended")
                raise CollectiveTimeoutError(f"{first} within {timeout_s:g} s")
        peers.close()

    def _check_member(self) -> None:
        if self.rank < 0:
            raise ValueError(
                f"rank {self.world.rank} is not in group {self.name}, which has {rank_list(list(self.ranks))}: only those"
                " call its collectives"
            )

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={list(self.ranks)}, rank={self.rank})"


@dataclass(frozen=True)
class Member:
    """A rank as the others see it: its machine, its process, and where its GPU sits (None without one)."""

    machine: str
    pid: int
    backend: str | None
    size: int
    gpu: str | None


@dataclass(eq=False)
class World:
    """What `init_process_group` found: this rank, all the others, and how they communicate."""

    rank: int
    size: int
    local_rank: int
    wanted: str | None
    timeout_s: float
    store: Store
    members: tuple[Member, ...]
    machines: backends.Machines
    groups: list[Group] = field(default_factory=list)
    streams: dict[Device, Stream] = field(default_factory=dict)
    # How many times values were exchanged through the store, by group.
    exchanges: dict[str, int] = field(default_factory=dict)

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.groups[0]

    def stream(self, device: Device) -> Stream:
        """The communication stream of a device, which all groups share: all ranks issue to it in the same order."""
        if device not in self.streams:
            backend = backends.choose(self.wanted, device.type, self.machines)
            self.streams[device] = backends.open_stream(backend, device)
        return self.streams[device]


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
    if not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise ValueError(
            f"a timeout is a number of seconds above 0 and up to {_LONGEST_TIMEOUT_S:.0f}, not {timeout!r}"
        )
    environment = read_environment(os.environ)
    gpu = _choose_device(environment.local_rank)
    store = Store(environment, timeout)
    try:
        _world = _meet(environment, store, backend, timeout, gpu)
    except BaseException:
        # The others want to see from the store what is wrong.
        _say_goodbye(store, environment.rank, environment.world_size, _FAILED_GOODBYE_S)
        raise


def destroy_process_group() -> None:
    """Lets go of the other ranks. Raises CollectiveError if a collective had failed and nobody was told."""
    global _world
    if _world is None:
        raise DistributedError("there is no process group to destroy: init_process_group() was not called")
    world, _world = _world, None
    with ExitStack() as ending:
        # Each of these happens, whichever of them raises.
        ending.callback(_say_goodbye, world.store, world.rank, world.size)
        for group in world.groups:
            ending.callback(group.close)
        for device, stream in world.streams.items():
            ending.callback(runtime(device).close_stream, stream)


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


def _choose_device(local_rank: int | None) -> str | None:
    """Makes the rank's own GPU the current one, before anything can make a context on another; returns where it sits."""
    count = cuda.device_count()
    if not count:
        return None
    if local_rank is not None:
        cuda.set_device(local_rank % count)
    return str(vm_cuda.api().deviceGetPCIBusId(cuda.current_device().index))


def _meet(environment: Environment, store: Store, backend: str | None, timeout_s: float, gpu: str | None) -> World:
    rank, size = environment.rank, environment.world_size
    me = Member(_machine(), os.getpid(), backend, size, gpu)
    mine = json.dumps(asdict(me)).encode()
    if store.compare_set(f"rank/{rank}", b"", mine) != mine:
        raise DistributedError(f"two processes say that they are rank {rank}: each needs a RANK of its own")
    members = [Member(**json.loads(value)) for value in store.gather("rank", tuple(range(size)), timeout_s)]
    for name, what in (("backend", "a backend"), ("size", "a world size")):
        if len({getattr(member, name) for member in members}) > 1:
            said = ", ".join(f"rank {number}: {getattr(member, name)}" for number, member in enumerate(members))
            raise DistributedError(f"the ranks were given different values of {what} ({said}); all need the same")
    local_rank = environment.local_rank
    if local_rank is None:
        # The launcher does not say it: by the order of the ranks on this machine, now that all are known.
        local_rank = [number for number, other in enumerate(members) if other.machine == me.machine].index(rank)
        store.set(f"gpu/{rank}", json.dumps(_choose_device(local_rank)).encode())
        places = store.gather("gpu", tuple(range(size)), timeout_s)
        members = [replace(member, gpu=json.loads(place)) for member, place in zip(members, places, strict=True)]
    gpus = {(member.machine, member.gpu) for member in members if member.gpu is not None}
    machines = backends.Machines(len({member.machine for member in members}), gpus_suffice=len(gpus) == size)
    made = World(rank, size, local_rank, backend, timeout_s, store, tuple(members), machines)
    made.groups.append(Group(made, "world", tuple(range(size))))
    backends.check(backend, machines, [member.gpu for member in members])
    if backends.serves_host(backend, machines):
        # Made at once, so that the ranks watch each other from the start.
        made.everyone.on(cpu)
    return made


def _machine() -> str:
    """What processes of one machine have in common, and others have not: the start of its kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _say_goodbye(store: Store, rank: int, size: int, patience_s: float = _GOODBYE_S) -> None:
    """Tells rank 0 that the store is not needed any more; rank 0, which keeps it, waits until all have said so."""
    try:
        store.add("goodbye", 1)
        if rank == 0:
            store.wait_for_count("goodbye", size, patience_s)
    except DistributedError:
        if rank == 0:
            raise
        # Rank 0 has ended, and with it the store: there is nothing to say goodbye to.
    finally:
        store.close()


def exchange_key(group: Group, current: World) -> str:
    """A name, the same on every rank of the group, for values to be exchanged through the store next."""
    number = current.exchanges[group.name] = current.exchanges.get(group.name, 0) + 1
    return f"{group.name}/exchange/{number}"


def gather_values(group: Group, value: bytes, timeout_s: float) -> list[Any]:
    """The values of all ranks of the group, by way of the store."""
    current = world()
    key = exchange_key(group, current)
    current.store.set(f"{key}/{group.rank}", value)
    return current.store.gather(key, group.ranks, timeout_s)
