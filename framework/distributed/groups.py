"""The ranks of a job, and groups of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from framework.device import Device
from framework.distributed import backends
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError, rank_list
from framework.distributed.peers import Peers
from framework.distributed.process_group import ProcessGroup
from framework.distributed.store import Store
from framework.vm.stream import Stream

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
