"""The ranks of a job, and groups of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from framework.device import Device
from framework.distributed import backends
from framework.distributed.alone import AloneGroup
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError, rank_list
from framework.distributed.peers import Peers
from framework.distributed.process_group import ProcessGroup
from framework.distributed.store import Store
from framework.vm.runtime import runtime
from framework.vm.stream import Stream

_LOOK_S = 0.1


class Group:
    """Some of the job's ranks, with a process group for each type of device, made when it is first needed.

    `ranks` are their numbers in the world; `rank` is this process's number among them, -1 where it is not one of them.
    `backend` is the one it was made for, where it was made for one: this one serves the group even if it has one rank.
    """

    def __init__(self, world: World, name: str, ranks: tuple[int, ...], backend: str | None = None) -> None:
        self.world = world
        self.name = name
        self.ranks = ranks
        self.rank = ranks.index(world.rank) if world.rank in ranks else -1
        self.size = len(ranks)
        self._backend = backend
        self._made: dict[str, ProcessGroup] = {}
        self._is_closed = False

    def on(self, device: Device) -> ProcessGroup:
        """The process group for arrays of `device`. Raises DistributedError where there is none for its type."""
        made = self._made.get(device.type)
        if made is None:
            self._check_member()
            if self._is_closed:
                # What the ranks would find in the store to come together by is that of before.
                raise DistributedError(
                    f"group {self.name} was destroyed with its process group; init_process_group() makes new ones"
                )
            backend = self._choose(device)
            if self.is_alone:
                made = AloneGroup()
            else:
                self._come_together(device)
                made = backends.make(backend, self, device)
            self._made[device.type] = made
        return made

    def stream(self, device: Device) -> Stream:
        """Where its collectives of arrays of `device` are issued to: those of one rank go where all else does."""
        return runtime(device).compute if self.is_alone else self.world.stream(device, self._choose(device))

    @property
    def is_alone(self) -> bool:
        """Whether it has one rank, and no backend was asked for by name: nothing is sent then."""
        return self.size == 1 and self._backend is None

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
        """Gives up its process groups; it has none from now on."""
        self._is_closed = True
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

    def _choose(self, device: Device) -> str:
        return backends.choose(self._backend or self.world.wanted, device.type, self.world.machines)

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
    # The communication streams, by their device and by whether their work is the host's.
    streams: dict[tuple[Device, bool], Stream] = field(default_factory=dict)
    # How many times values were exchanged through the store, by group.
    exchanges: dict[str, int] = field(default_factory=dict)

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.groups[0]

    def stream(self, device: Device, backend: str) -> Stream:
        """A backend's communication stream of a device, which all groups share: all ranks issue to it in the same order."""
        kind = device, backends.is_on_host(backend)
        if kind not in self.streams:
            self.streams[kind] = backends.open_stream(backend, device)
        return self.streams[kind]
