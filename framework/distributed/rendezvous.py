"""How ranks find each other by the store at the start, and part at the end."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, replace
from pathlib import Path

from framework import cuda
from framework.device import cpu
from framework.distributed import backends
from framework.distributed.environment import Environment
from framework.distributed.errors import DistributedError
from framework.distributed.groups import Group, Member, World
from framework.distributed.store import Store
from framework.vm import cuda as vm_cuda

# How long rank 0 keeps the store for ranks that have not said goodbye.
_GOODBYE_S = 10.0
FAILED_GOODBYE_S = 2.0


def choose_device(local_rank: int | None) -> str | None:
    """Makes the rank's own GPU the current one, before anything can make a context on another; returns where it sits."""
    count = cuda.device_count()
    if not count:
        return None
    if local_rank is not None:
        cuda.set_device(local_rank % count)
    return str(vm_cuda.api().deviceGetPCIBusId(cuda.current_device().index))


def meet(environment: Environment, store: Store, backend: str | None, timeout_s: float, gpu: str | None) -> World:
    """The world, once every rank has come to the store. Raises DistributedError where some do not, or do not fit together."""
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
        store.set(f"gpu/{rank}", json.dumps(choose_device(local_rank)).encode())
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


def say_goodbye(store: Store, rank: int, size: int, patience_s: float = _GOODBYE_S) -> None:
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
