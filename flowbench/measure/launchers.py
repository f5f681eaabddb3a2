"""Ranks that an existing launcher starts (torchrun, mpirun, srun), here or on other machines: they call back over a socket."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flowbench.errors import FlowbenchError
from flowbench.measure.rank_process import TAIL_BYTES, chunks

LAUNCHERS = ("torchrun", "mpirun", "srun")

# How a rank finds its parent: not on the command line, which other users of a machine can read.
PARENT, TOKEN = "FLOWBENCH_PARENT", "FLOWBENCH_TOKEN"

# From the start of the launcher until the last rank has called: a queue of jobs may come in between.
CALL_S = 600.0
# Anyone on the network may call: how much and for how long a caller may talk before it is known, and how many at a time.
_HELLO_BYTES = 4096
_HELLO_S = 30.0
_MOST_CALLERS = 64
_ENDING_S = 5.0

# Where each launcher says which rank a process is: rank, ranks, rank on its machine.
_PLACES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
)


@dataclass(frozen=True)
class Call:
    """A rank that has called: its connection, its place, and a free port of its machine."""

    connection: socket.socket
    rank: int
    local_rank: int
    address: str
    port: int


class _Caller:
    """Someone who has connected and may be a rank."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.until = time.monotonic() + _HELLO_S
        self._line = b""

    def hello(self) -> bytes | None:
        """The line that it opens with; None where that is not all here yet. ConnectionError where none will come."""
        try:
            chunk = self.connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return None
        self._line += chunk
        if self._line.endswith(b"\n"):
            return self._line
        if not chunk or len(self._line) >= _HELLO_BYTES:
            raise ConnectionError("it hung up, or talks without end")
        return None


class _Callers:
    """All that are not known yet, in the order in which they came; `selector` tells when one of them has said something."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._all: list[_Caller] = []

    def admit(self, server: socket.socket) -> None:
        """Let one in; of too many, the one that came first goes."""
        try:
            connection, (address, *_) = server.accept()
        except OSError:  # it has left again
            return
        if len(self._all) >= _MOST_CALLERS:
            self.hang_up(self._all[0])
        caller = _Caller(connection, address)
        self._selector.register(connection, selectors.EVENT_READ, caller)
        self._all.append(caller)

    def __contains__(self, caller: _Caller) -> bool:
        return caller in self._all

    def release(self, caller: _Caller) -> socket.socket:
        """The connection of one that is known now."""
        self._all.remove(caller)
        self._selector.unregister(caller.connection)
        return caller.connection

    def hang_up(self, caller: _Caller) -> None:
        """One that is no rank, or has not said so in time."""
        self.release(caller).close()

    def hang_up_on(self, moment: float) -> None:
        """All whose time is up at `moment`."""
        for caller in [caller for caller in self._all if caller.until <= moment]:
            self.hang_up(caller)


class Launched:
    """One run of a launcher, as a process that its ranks' parent can watch and end."""

    def __init__(self, launcher: str, options: Sequence[str], world_size: int, environment: Mapping[str, str]) -> None:
        self._world_size = world_size
        self._token = secrets.token_hex(16)
        # torchrun starts ranks on this machine alone.
        host = "127.0.0.1" if launcher == "torchrun" else ""
        self._server = socket.create_server((host, 0))
        self._server.setblocking(False)
        address = host or socket.gethostname()
        called = {PARENT: f"{address}:{self._server.getsockname()[1]}", TOKEN: self._token}
        known = {**environment, **called}
        # torchrun's own place must not be taken for that of its ranks.
        known = {name: value for name, value in known.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        ours = sorted(name for name, value in known.items() if os.environ.get(name) != value)
        read, write = os.pipe()
        try:
            self.process = subprocess.Popen(
                launch_command(launcher, options, world_size, ours),
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env=known,
                start_new_session=True,
            )
        except OSError as error:
            os.close(read)
            raise FlowbenchError(f"launcher {launcher} does not start: {error}") from error
        finally:
            os.close(write)
        os.set_blocking(read, False)
        self.output, self.tail = read, b""

    def calls(self, on_wait: Callable[[], None], wait_s: float | None = None) -> list[Call] | str:
        """The ranks in their order when all have called, or why they do not come. `on_wait` is called now and then.

        `wait_s` is how long that may take where no queue comes in between.
        """
        found: dict[int, Call] = {}
        wait_s = wait_s or CALL_S
        until = time.monotonic() + wait_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._server, selectors.EVENT_READ)
            selector.register(self.output, selectors.EVENT_READ)
            callers = _Callers(selector)
            try:
                while len(found) < self._world_size:
                    on_wait()
                    for key, _ in selector.select(timeout=0.1):
                        if key.fileobj is self._server:
                            callers.admit(self._server)
                        elif key.fileobj is self.output:
                            if self._listen():
                                selector.unregister(self.output)
                        elif (call := self._heard(key.data, callers)) is not None:
                            found[call.rank] = call
                    callers.hang_up_on(time.monotonic())
                    missing = sorted(set(range(self._world_size)) - set(found))
                    if missing and self.process.poll() is not None:
                        self._listen()
                        return (
                            f"the launcher ended with status {self.process.returncode} before rank {missing[0]} called"
                        )
                    if missing and time.monotonic() > until:
                        return f"rank {missing[0]} has not called within {wait_s:g} s of the launcher's start"
                return [found.pop(rank) for rank in range(self._world_size)]
            finally:
                callers.hang_up_on(math.inf)
                for call in found.values():  # whose company has not come
                    call.connection.close()

    def end(self) -> None:
        """Ends the launcher, which ends its ranks: those on other machines are out of reach for anyone else."""
        self._server.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_ENDING_S)
                break

    def _listen(self) -> bool:
        """Take what the launcher has printed, which would wait for a full pipe; whether it has closed its output."""
        chunk = None
        for chunk in chunks(self.output):
            self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        return chunk == b""

    def _heard(self, caller: _Caller, callers: _Callers) -> Call | None:
        """The rank that a caller says it is; None where it has not said so yet, and for whoever does not know the token."""
        if caller not in callers:  # it had to make room a moment ago
            return None
        try:
            line = caller.hello()
            if line is None:
                return None
            rank, local_rank, port = self._place(line)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            callers.hang_up(caller)  # it may be anyone on the network: nobody to believe
            return None
        connection = callers.release(caller)
        connection.setblocking(True)
        return Call(connection, rank, local_rank, caller.address, port)

    def _place(self, line: bytes) -> tuple[int, int, int]:
        """Rank, rank on its machine and a free port there, as a rank says them. Whatever else a stranger sends raises."""
        hello = json.loads(line)
        if not secrets.compare_digest(str(hello["token"]), self._token):
            raise ValueError("wrong token")
        rank = int(hello["rank"])
        if not 0 <= rank < self._world_size or int(hello["world_size"]) != self._world_size:
            raise ValueError(f"rank {rank} of {hello['world_size']}")
        return rank, int(hello["local_rank"]), int(hello["port"])


def find_launcher(launcher: str) -> str:
    """The program that starts the ranks; raises FlowbenchError where it is not there."""
    if launcher == "torchrun":
        program = sys.executable if importlib.util.find_spec("torch") else None  # it is a module of torch
    else:
        program = shutil.which(launcher)
    if program is None:
        raise FlowbenchError(
            f"launcher {launcher} is not installed here, or not on the PATH: install it, or leave --launcher out"
        )
    return program


def launch_command(launcher: str, options: Sequence[str], world_size: int, names: Sequence[str]) -> list[str]:
    """The command that starts the ranks; `names` are variables of the environment that they need."""
    rank = [sys.executable, "-P", "-m", "flowbench.measure.worker"]
    if launcher == "torchrun":
        torchrun = [find_launcher(launcher), "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
        return [*torchrun, "--no-python", *(options or ("--standalone",)), *rank]
    program = find_launcher(launcher)
    if launcher == "srun":
        return [program, f"--ntasks={world_size}", *options, *rank]  # it passes the whole environment on
    exported = [word for name in names for word in ("-x", name)] if _is_open_mpi(program) else []
    return [program, "-np", str(world_size), *exported, *options, *rank]


def call_parent() -> tuple[int, int]:
    """A rank's descriptors to read from and to write to its parent, having told it which one it is."""
    address, _, port = os.environ[PARENT].rpartition(":")
    connection = socket.create_connection((address, int(port)), timeout=60)
    connection.settimeout(None)
    rank, world_size, local_rank = read_place(os.environ)
    with socket.socket() as probe:
        probe.bind(("", 0))
        free = probe.getsockname()[1]
    hello = {
        "token": os.environ.pop(TOKEN),
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "port": free,
    }
    connection.sendall(json.dumps(hello).encode() + b"\n")
    descriptor = connection.detach()
    return descriptor, os.dup(descriptor)


def meet(master: str, environment: dict[str, str] | os._Environ[str]) -> None:
    """Puts where the ranks meet, and this rank's place, under the names that frameworks read; a launcher's own ways go."""
    rank, world_size, local_rank = read_place(environment)
    address, _, port = master.rpartition(":")
    for name in [n for n in environment if n.startswith(("TORCHELASTIC_", "OMPI_COMM_", "PMI_", "SLURM_"))]:
        environment.pop(name)
    environment |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}


def read_place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on its machine, as the launcher says them."""
    for names in _PLACES:
        rank, world_size, local_rank = (environment.get(name) for name in names)
        if rank is not None and world_size is not None and local_rank is not None:
            return int(rank), int(world_size), int(local_rank)
    known = "; ".join(", ".join(names) for names in _PLACES)
    raise RuntimeError(f"the launcher does not say which rank this is: none of these is set in full: {known}")


def _is_open_mpi(program: str) -> bool:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return bool(re.search(r"open.?mpi|openrte", said.stdout, re.IGNORECASE))
