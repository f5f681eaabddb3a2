"""The ranks of this job: brought together once, then asked about and split into groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from operator import index

from framework.device import Device
from framework.distributed import backends
from framework.distributed.environment import HOW_TO_START, read_environment
from framework.distributed.errors import DistributedError
from framework.distributed.groups import Group, World
from framework.distributed.rendezvous import FAILED_GOODBYE_S, choose_device, meet, say_goodbye
from framework.distributed.store import Store
from framework.vm.runtime import runtime

DEFAULT_TIMEOUT_S = 600.0
_LONGEST_TIMEOUT_S = 1e7

_FROM_LAUNCHER = f"the environment says it; {HOW_TO_START}"
_WAYS_OUT = {
    "device_id": "leave it out, the rank's GPU is number LOCAL_RANK; flow.cuda.set_device() chooses another",
    "rank": _FROM_LAUNCHER,
    "store": _FROM_LAUNCHER,
    "world_size": _FROM_LAUNCHER,
}

_world: World | None = None
_starts = 0


def init_process_group(
    backend: str | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT_S,
    *,
    init_method: str = "env://",
    **others: object,
) -> None:
    """Brings this rank together with the others that the launcher started.

    The ranks are read from the environment, as the launch module, torchrun, mpirun and srun set it. `backend` is `shm` (one
    machine, CPU and CUDA tensors), `nccl` (CUDA tensors, a GPU for each rank) or `mpi` (CPU tensors); None takes, for CUDA
    tensors, nccl where there are GPUs for all, and otherwise shm on one machine and mpi on several. `timeout`, in seconds or a
    timedelta, bounds every wait for another rank. The default CUDA device becomes number LOCAL_RANK modulo the number of GPUs.
    `init_method` is there for scripts that say it.

    Raises DistributedError where the ranks do not find each other, naming those that did not come, and TypeError for what else
    PyTorch's takes, with the way out.
    """
    global _world, _starts
    if _world is not None:
        raise DistributedError("init_process_group() was called before; destroy_process_group() comes in between")
    _check_arguments(init_method, others)
    backends.check_name(backend)
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    if not 0 < timeout <= _LONGEST_TIMEOUT_S:
        raise ValueError(
            f"a timeout is a number of seconds above 0 and up to {_LONGEST_TIMEOUT_S:.0f}, not {timeout!r}"
        )
    environment = read_environment(os.environ)
    # Ranks that start anew must not meet in the store that rank 0 is just giving up.
    _starts += 1
    environment = replace(environment, job=f"{environment.job} start={_starts}")
    gpu = choose_device(environment.local_rank)
    store = Store(environment, timeout)
    try:
        _world = meet(environment, store, backend, timeout, gpu)
    except BaseException:
        # The others want to see from the store what is wrong.
        say_goodbye(store, environment.rank, environment.world_size, FAILED_GOODBYE_S)
        raise


def _check_arguments(init_method: str, others: Mapping[str, object]) -> None:
    if init_method != "env://":
        raise ValueError(
            f"init_method is env://, the environment that launchers set; got {init_method!r}: {HOW_TO_START}"
        )
    for name in others:
        way_out = _WAYS_OUT.get(name, "help(flow.distributed.init_process_group) says what it takes")
        raise TypeError(f"init_process_group() has no argument {name}: {way_out}")


def destroy_process_group() -> None:
    """Lets go of the other ranks. Raises CollectiveError if a collective had failed and nobody was told."""
    global _world
    if _world is None:
        raise DistributedError("there is no process group to destroy: init_process_group() was not called")
    world, _world = _world, None
    with ExitStack() as ending:
        # Each of these happens, whichever of them raises.
        ending.callback(say_goodbye, world.store, world.rank, world.size)
        for group in world.groups:
            ending.callback(group.close)
        for (device, _), stream in world.streams.items():
            ending.callback(runtime(device).close_stream, stream)


def is_initialized() -> bool:
    """Whether `init_process_group` was called."""
    return _world is not None


def world() -> World:
    """The ranks of this job. Raises DistributedError before `init_process_group`."""
    if _world is None:
        raise DistributedError("flow.distributed.init_process_group() has to be called first, on every rank")
    return _world


def chosen_group(group: Group | None) -> Group:
    """The group that a call is for: all ranks where it names none. Raises TypeError for what is no group."""
    if group is None:
        return world().everyone
    if not isinstance(group, Group):
        raise TypeError(f"a group is what new_group() returns, or None for all ranks; got {group!r}")
    return group


def get_rank(group: Group | None = None) -> int:
    """This process's number in the group (the world), from 0; -1 where it is not in the group."""
    return chosen_group(group).rank


def get_world_size(group: Group | None = None) -> int:
    """How many ranks the group (the world) has."""
    return chosen_group(group).size


def get_local_rank() -> int:
    """This process's number among the ranks of its machine, from 0."""
    return world().local_rank


def get_backend(device: Device | str = "cpu") -> str:
    """The name of the backend that tensors of `device` use."""
    return backends.choose(world().wanted, Device(device).type, world().machines)


def new_group(ranks: list[int], backend: str | None = None) -> Group:
    """A group of some ranks, given by their numbers in the world. Every rank calls this, in the same order of groups.

    `backend` is one for this group alone, in place of what `init_process_group` was given. A group of one rank sends
    nothing; where it is given a backend, each collective goes there all the same: so what sending costs can be measured.
    """
    current = world()
    backends.check_name(backend)
    try:
        chosen = tuple([index(rank) for rank in ranks])
    except TypeError:
        raise TypeError(f"a group is made of a list of ranks, by their numbers; got {ranks!r}") from None
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= rank < current.size for rank in chosen):
        raise ValueError(f"a group has different ranks from 0 to {current.size - 1}, at least one; got {list(ranks)}")
    group = Group(current, str(len(current.groups)), chosen, backend)
    current.groups.append(group)
    return group
