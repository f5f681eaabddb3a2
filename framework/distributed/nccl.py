"""The nccl backend: collectives of CUDA tensors by NCCL, a GPU for each rank, on one machine or many.

NCCL itself waits for ever. So every collective leaves an event behind, and a watchdog thread looks whether the events pass: it
finds ranks that do not come or have ended, ends NCCL's waiting, and lets the next call say why.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from framework.device import Device
from framework.distributed.errors import CollectiveError, DistributedError
from framework.distributed.watchdog import Flight, Watchdog
from framework.distributed.words import describe
from framework.dtype import DType
from framework.vm import cuda
from framework.vm.array import Array, Layout

if TYPE_CHECKING:
    from framework.distributed.groups import Group

_TYPES = {
    "bool": "NCCL_UINT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}
# A collective in words, NCCL's function for it, and the arguments in front of the stream.
_Call = tuple[str, Callable[..., object], tuple]
# How long ranks wait for each other before they give up their communicators.
_CLOSING_S = 10.0


class NcclGroup:
    """The ranks of a group, over an NCCL communicator. Collectives are enqueued on the CUDA stream that is current.

    Raises DistributedError where NCCL is missing, or where two ranks have the same GPU.
    """

    backend = "nccl"

    def __init__(self, group: Group, name: str, device: Device) -> None:
        self.rank, self.size, self.name = group.rank, group.size, name
        self._device = device
        self._global_ranks = group.ranks
        self._store = group.world.store
        self._sequence = 0
        self._told = False
        self._idle_events: list[int] = []
        _check_devices(group, name, device)
        identity = _identity(group, name)
        self._communicator = _connect(self.size, identity, self.rank, device, group.world.timeout_s)
        self._watchdog = Watchdog(group, name, self._communicator, lambda: cuda.choose(device))
        atexit.register(self._abandon)

    def prepared(self, collective: str, array: Array, **attributes: Any) -> Callable[[], None]:
        """A function that calls a collective of one array as often as it is called; what NCCL is told is settled now."""
        calls: dict[str, Callable[..., _Call]] = {"all_reduce": self._all_reduce, "broadcast": self._broadcast}
        return partial(self._enqueue, *calls[collective](array, **attributes))

    def all_reduce(self, array: Array, op: str) -> None:
        self._enqueue(*self._all_reduce(array, op))

    def broadcast(self, array: Array, src: int) -> None:
        self._enqueue(*self._broadcast(array, src))

    def all_gather(self, out: Array, array: Array) -> None:
        self._enqueue(
            f"all_gather({describe(array)})",
            self._communicator.allGather,
            (array.ptr, out.ptr, array.size, _type(array.dtype)),
        )

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        kind = _type(array.dtype)
        self._enqueue(
            f"reduce_scatter({describe(array)}, {op})",
            self._communicator.reduceScatter,
            (array.ptr, out.ptr, out.size, kind, _operation(op, array.dtype, self.size)),
        )

    def barrier(self, array: Array) -> None:
        self._enqueue(
            "barrier()",
            self._communicator.allReduce,
            (array.ptr, array.ptr, 1, _type(array.dtype), _operation("max", array.dtype, self.size)),
        )

    def send(self, array: Array, dst: int) -> None:
        self._enqueue(
            f"send({describe(array)}) to rank {self._global_ranks[dst]}",
            self._communicator.send,
            (array.ptr, array.size, _type(array.dtype), dst),
            of_all=False,
        )

    def recv(self, array: Array, src: int) -> None:
        self._enqueue(
            f"recv({describe(array)}) from rank {self._global_ranks[src]}",
            self._communicator.recv,
            (array.ptr, array.size, _type(array.dtype), src),
            of_all=False,
        )

    def check(self) -> None:
        failure = self._watchdog.failure
        if failure is not None:
            self._told = True
            raise type(failure)(f"group {self.name} cannot be used any more: {failure}")

    def close(self) -> None:
        self._watchdog.stop()
        atexit.unregister(self._abandon)
        if self._watchdog.failure is not None:
            # It was aborted. Who never heard of it hears of it now.
            if not self._told:
                raise self._watchdog.failure
            return
        # Destroying waits for the other ranks, if they do the same; where one does not, NCCL is left by force.
        key = f"{self.name}/closing"
        together = False
        try:
            self._watchdog.compare()
            self._store.add(key, 1)
            together = self._store.wait_for_count(key, self.size, _CLOSING_S)
            # Now all have said what they called.
            self._watchdog.compare()
        except CollectiveError:
            together = False
            raise
        except DistributedError:
            together = False  # rank 0 has ended, and the store with it
        finally:
            if together:
                self._communicator.destroy()
            else:
                self._communicator.abort()

    def _all_reduce(self, array: Array, op: str) -> _Call:
        what, *numbers = _all_reduce(array.layout, op, self.size)
        return what, self._communicator.allReduce, (array.ptr, array.ptr, *numbers)

    def _broadcast(self, array: Array, src: int) -> _Call:
        what = f"broadcast({describe(array)}, from rank {self._global_ranks[src]})"
        return what, self._communicator.broadcast, (array.ptr, array.ptr, array.size, _type(array.dtype), src)

    def _enqueue(self, what: str, call: Callable[..., object], arguments: tuple, *, of_all: bool = True) -> None:
        """Calls NCCL for the current stream; afterwards the watchdog is given an event to look at."""
        if self._watchdog.failure is not None:
            self.check()
        stream = cuda.stream_pointer(self._device)
        try:
            call(*arguments, stream)
        except RuntimeError as error:  # NCCL's own, which exists only where NCCL does
            self.check()
            raise CollectiveError(f"{what} of group {self.name} was refused by NCCL: {error}") from error
        if of_all:
            self._sequence += 1
        if not cuda.is_capturing(self._device):
            self._watchdog.watch(Flight(self._sequence if of_all else None, what, self._event(stream)))

    def _event(self, stream: int) -> _Event:
        runtime, idle = cuda.api(), self._idle_events
        event = idle.pop() if idle else runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        runtime.eventRecord(event, stream)
        return _Event(idle, event)

    def _abandon(self) -> None:
        """At the end of a process that did not destroy the group: NCCL's own way out would wait for other ranks."""
        self._watchdog.stop()
        if self._watchdog.failure is None:
            self._communicator.abort()


class _Event:
    """A CUDA event behind what was enqueued. When nobody asks for it any more, `idle` gets it."""

    __slots__ = ("_event", "_idle")

    def __init__(self, idle: list[int], event: int) -> None:
        self._idle, self._event = idle, event

    def __del__(self) -> None:
        self._idle.append(self._event)

    def has_passed(self) -> bool:
        return cuda.has_passed(self._event)


def why_not() -> str | None:
    """Why NCCL cannot be used, with the way out; None where it can."""
    try:
        _nccl()
    except (ImportError, OSError) as missing:
        return f"the nccl backend needs NCCL and CuPy ({missing}): `pip install 'flowbench[cuda13]'` brings both"
    return None


@lru_cache(maxsize=1)
def _nccl() -> Any:
    """CuPy's binding; the library is looked for where pip keeps it first."""
    from framework.kernels.cuda import library

    library.load("nccl")
    from cupy.cuda import nccl

    return nccl


def _check_devices(group: Group, name: str, device: Device) -> None:
    """All ranks come, each with a GPU of its own."""
    reason = why_not()
    if reason is not None:
        raise DistributedError(reason)
    world = group.world
    place = f"{world.members[world.rank].machine} {cuda.api().deviceGetPCIBusId(device.index)}"
    world.store.set(f"{name}/gpu/{group.rank}", place.encode())
    places = world.store.gather(f"{name}/gpu", group.ranks, world.timeout_s)
    sharing = [rank for rank, other in zip(group.ranks, places, strict=True) if other == place.encode()]
    if len(sharing) > 1:
        raise DistributedError(
            f"ranks {', '.join(map(str, sharing))} have the same GPU (of each {device}), which NCCL refuses: start at most one"
            ' rank per GPU, or take backend="shm", which goes through the host'
        )


def _identity(group: Group, name: str) -> bytes:
    """What NCCL's ranks find each other by: rank 0 makes it."""
    store, key = group.world.store, f"{name}/identity"
    if group.rank == 0:
        store.set(key, _nccl().get_unique_id())
    identity = store.get(key, group.world.timeout_s)
    if identity is None:
        raise DistributedError(f"rank {group.ranks[0]} did not start NCCL for group {name} in time")
    return identity


def _connect(size: int, identity: bytes, rank: int, device: Device, timeout_s: float) -> Any:
    """The communicator. NCCL would wait for ever, so it is made in a thread that may be left behind."""
    made: list[Any] = []
    failed: list[Exception] = []

    def connect() -> None:
        try:
            cuda.choose(device)
            made.append(_nccl().NcclCommunicator(size, identity, rank))
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=connect, name="flow-nccl-start", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise DistributedError(
            f"NCCL could not connect {size} ranks: {failed[0]}. NCCL_DEBUG=WARN in the environment lets NCCL say more"
        ) from failed[0]
    if not made:
        raise DistributedError(
            f"NCCL did not connect {size} ranks within {timeout_s:g} s. NCCL_DEBUG=WARN in the environment lets NCCL say more"
        )
    return made[0]


@lru_cache(maxsize=256)
def _all_reduce(layout: Layout, op: str, ranks: int) -> tuple[str, int, int, int]:
    """The words of an all-reduce, and what NCCL is told of it behind the addresses."""
    what = f"all_reduce({describe(layout)}, {op})"
    return what, layout.size, _type(layout.dtype), _operation(op, layout.dtype, ranks)


@lru_cache(maxsize=16)
def _type(dtype: DType) -> int:
    return int(getattr(_nccl(), _TYPES[dtype.name]))


@lru_cache(maxsize=32)
def _operation(op: str, dtype: DType, ranks: int) -> int:
    if dtype.name == "bool" and op == "sum":
        op = "max"  # of bytes that are 0 or 1, the largest is their "or"
    if ranks == 1 and op == "avg":
        op = "sum"  # the same, for which NCCL does nothing: for a mean it multiplies all elements by 1
    return int(getattr(_nccl(), f"NCCL_{op.upper()}"))
