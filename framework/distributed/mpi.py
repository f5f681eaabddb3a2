"""The mpi backend: collectives of CPU tensors by MPI, through mpi4py, on one machine or many."""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from framework.distributed.board import Board
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError
from framework.distributed.words import describe
from framework.vm.array import Array

if TYPE_CHECKING:
    from framework.distributed.groups import Group

# How long MPI is asked without a pause in between, and the longest pause.
_BUSY_S = 0.0002
_PAUSE_S = 0.001
# From then on a waiting rank says on the board where it waits.
_POST_S = 0.5
_TEXT_BYTES = 192
# MPI_THREAD_MULTIPLE of Open MPI, of MPICH and of those that are made from it: collectives have a thread of their own.
_ANY_THREAD = 3


def why_not() -> str | None:
    """Why MPI cannot be used, with the way out; None where it can."""
    try:
        _mpi()
    except (ImportError, RuntimeError) as missing:
        return (
            f"the mpi backend needs mpi4py and an MPI library ({missing}): `pip install 'flowbench[mpi]'`, and Open MPI or"
            " MPICH from the system"
        )
    return None


class MpiGroup:
    """The ranks of a group, over an MPI communicator of their own. Raises DistributedError unless MPI started the ranks."""

    backend = "mpi"

    def __init__(self, group: Group, name: str) -> None:
        reason = why_not()
        if reason is not None:
            raise DistributedError(reason)
        mpi, world = _mpi(), group.world
        everyone = mpi.COMM_WORLD
        if (everyone.Get_size(), everyone.Get_rank()) != (world.size, world.rank):
            raise DistributedError(
                f"MPI takes this process for rank {everyone.Get_rank()} of {everyone.Get_size()}, where it is {world.rank} of"
                f' {world.size}: for backend="mpi" start the ranks by `mpirun -n {world.size} python script.py` or by srun'
            )
        self.rank, self.size, self.name = group.rank, group.size, name
        self._timeout_s = world.timeout_s
        self._communicator = everyone.Create_group(everyone.Get_group().Incl(list(group.ranks)))
        self._board = Board(world.store, name, group.rank, group.ranks)
        self._global_ranks = group.ranks
        self._sequence = 0
        self._what = ""
        self._failure: str | None = None

    def all_reduce(self, array: Array, op: str) -> None:
        self._enter(f"all_reduce({describe(array)}, {op})")
        values = _numbers(array)
        self._wait(self._communicator.Iallreduce(_mpi().IN_PLACE, values, _operation(op, values)))
        _store(array, values, op, self.size)

    def broadcast(self, array: Array, src: int) -> None:
        self._enter(f"broadcast({describe(array)}, from rank {self._global_ranks[src]})")
        self._wait(self._communicator.Ibcast(_bytes(array), src))

    def all_gather(self, out: Array, array: Array) -> None:
        self._enter(f"all_gather({describe(array)})")
        self._wait(self._communicator.Iallgather(_bytes(array), _bytes(out)))

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        self._enter(f"reduce_scatter({describe(array)}, {op})")
        values = _numbers(array)
        result = np.empty(out.size, values.dtype)
        self._wait(self._communicator.Ireduce_scatter_block(values, result, _operation(op, values)))
        _store(out, result, op, self.size)

    def barrier(self, array: Array) -> None:
        # The comparison is a barrier by itself.
        self._enter("barrier()")

    def send(self, array: Array, dst: int) -> None:
        self.check()
        self._what = f"send({describe(array)}) to rank {self._global_ranks[dst]}"
        self._wait(self._communicator.Isend(_bytes(array), dst), between_two=True)

    def recv(self, array: Array, src: int) -> None:
        self.check()
        self._what = f"recv({describe(array)}) from rank {self._global_ranks[src]}"
        mpi = _mpi()
        status = mpi.Status()
        try:
            self._wait(self._communicator.Irecv(_bytes(array), src), between_two=True, status=status)
        except mpi.Exception as error:
            self._fail(f"{self._what}: what it sends does not fit ({error})")
        if status.Get_count(mpi.BYTE) != array.nbytes:
            self._fail(f"{self._what}: it sends {status.Get_count(mpi.BYTE)} bytes, not {array.nbytes}")

    def check(self) -> None:
        if self._failure is not None:
            raise CollectiveError(f"group {self.name} cannot be used any more: {self._failure}")

    def close(self) -> None:
        # Freeing the communicator would wait for the others; MPI does it at the end of the process.
        self._failure = self._failure or f"group {self.name} was destroyed"

    def _enter(self, what: str) -> None:
        """Begins a collective: all ranks tell each other what they call, since MPI itself would mix up different calls."""
        self.check()
        self._sequence += 1
        self._what = what
        mine = np.zeros(_TEXT_BYTES, np.uint8)
        encoded = np.frombuffer(what.encode()[:_TEXT_BYTES], np.uint8)
        mine[: encoded.size] = encoded
        all_of_them = np.empty((self.size, _TEXT_BYTES), np.uint8)
        self._wait(self._communicator.Iallgather(mine, all_of_them))
        if (all_of_them != mine).any():
            calls = "; ".join(
                f"rank {number} calls {text.tobytes().rstrip(bytes(1)).decode(errors='replace')}"
                for number, text in zip(self._global_ranks, all_of_them, strict=True)
            )
            self._fail(f"the ranks of group {self.name} do not call the same collective: {calls}")

    def _wait(self, request: Any, *, between_two: bool = False, status: Any = None) -> None:
        """Until MPI is done. It only gets on while it is asked, and asking must leave the processor to others."""
        began = time.monotonic()
        posted = between_two
        while not request.Test(status):
            waited = time.monotonic() - began
            if waited > _BUSY_S:
                time.sleep(min(waited / 8, _PAUSE_S))
            if waited > _POST_S and not posted:
                posted = True
                self._board.note(self._sequence, self._what)
                self._board.post()
            if waited > self._timeout_s:
                where = self._what if between_two else self._board.missing(self._sequence, self._what)
                self._fail(f"{where} within {self._timeout_s:g} s", CollectiveTimeoutError)

    def _fail(self, what: str, kind: type[CollectiveError] = CollectiveError) -> None:
        self._failure = what
        raise kind(what)


@lru_cache(maxsize=1)
def _mpi() -> Any:
    """mpi4py's module, with MPI started; from then on a rank that fails has to end the others' waiting."""
    finish = _start()
    from mpi4py import MPI

    if finish is not None:
        atexit.register(lambda: None if MPI.Is_finalized() else finish())

    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    print_exception = sys.excepthook

    def end_all(*error: Any) -> None:
        print_exception(*error)
        sys.stderr.flush()
        # Leaving MPI in order would wait for ranks that wait for this one.
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = end_all
    return MPI


def _start() -> Callable[[], int] | None:
    """Starts MPI where nobody has; returns what ends it, None where that is not for us to do.

    Importing mpi4py's module would do it too, but keep the interpreter until all ranks have started MPI: the store, a thread
    of rank 0, could not answer those that still ask it something first. A function of ctypes lets other threads run.
    """
    if "mpi4py.MPI" in sys.modules:
        return None
    module = importlib.util.find_spec("mpi4py.MPI")
    if module is None or module.origin is None:
        return None
    try:
        library = ctypes.CDLL(module.origin, ctypes.RTLD_GLOBAL)  # for Open MPI's plugins
        library.MPI_Init_thread(None, None, _ANY_THREAD, ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):
        return None  # importing it says what is missing
    return library.MPI_Finalize


def _operation(op: str, values: np.ndarray) -> Any:
    mpi = _mpi()
    if values.dtype == np.bool_:
        return {"sum": mpi.LOR, "max": mpi.LOR, "min": mpi.LAND}[op]
    return {"sum": mpi.SUM, "avg": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}[op]


def _numbers(array: Array) -> np.ndarray:
    """The elements to reduce: a view, or where MPI does not know the type a copy as float32."""
    bits = array.host_view().reshape(-1)
    return array.dtype.decode(bits) if array.dtype.numpy is None else bits


def _store(array: Array, values: np.ndarray, op: str, size: int) -> None:
    if op == "avg":
        np.divide(values, size, out=values)
    bits = array.host_view().reshape(-1)
    if values is not bits:
        np.copyto(bits, array.dtype.encode(values))


def _bytes(array: Array) -> np.ndarray:
    return array.host_view().reshape(-1).view(np.uint8)
