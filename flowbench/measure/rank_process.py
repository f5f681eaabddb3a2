"""One rank process as its parent sees it: how it is started, and the pipes between the two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from flowbench.measure.processes import measuring_environment
from flowbench.measure.wire import Event, Job, RankState
from flowbench.record.sample import RankSample

# What is kept of what a process prints: its last words.
TAIL_BYTES = 4000


@dataclass(eq=False)
class RankProcess:
    """A rank, or the launcher that started it, with its pipes as descriptors and what was heard from it.

    `pending` is the beginning of a line that has not ended yet, `tail` what it printed last; `heard` is a time of
    `time.monotonic()`. `output` is None where another rank has the launcher's.
    """

    number: int
    process: subprocess.Popen[bytes]
    commands: int
    events: int
    output: int | None
    pending: bytes = b""
    tail: bytes = b""
    last: Event = field(default_factory=lambda: Event("start"))
    result: RankSample | None = None
    state: RankState | None = None
    heard: float = field(default_factory=time.monotonic)
    longest_step_s: float = 0.0
    waits: bool = False
    hung_up: bool = False

    @property
    def where(self) -> str:
        """How far it came, in words."""
        return f"in phase {self.last.phase}" + (f", after step {self.last.step}" if self.last.step is not None else "")


def start_rank(number: int, job: Job, mark: str, port: int) -> RankProcess:
    """A fresh process for rank `number`, which waits for its job on its pipe; all ranks meet at `port`.

    Raises OSError where the system has no process, or no open file, left.
    """
    pipes: list[tuple[int, int]] = []
    try:
        for _ in ("commands", "events", "output"):
            pipes.append(os.pipe())
        (command_read, command_write), (event_read, event_write), (output_read, output_write) = pipes
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowbench.measure.worker", str(command_read), str(event_write)],
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=(command_read, event_write),
            env=rank_environment(number, job, mark, port),
            start_new_session=True,
        )
    except OSError:  # too many processes, or open files: of these none may be lost to what comes later
        for descriptor in (one for pipe in pipes for one in pipe):
            os.close(descriptor)
        raise
    for descriptor in (command_read, event_write, output_write):
        os.close(descriptor)
    return RankProcess(number, process, command_write, event_read, output_read)


def rank_environment(number: int, job: Job, mark: str, port: int) -> dict[str, str]:
    """The environment of rank `number`, which finds the others at `port`."""
    cell, environment = job.cell, measuring_environment(mark, job.cell.threads)
    if job.import_path:
        environment["PYTHONPATH"] = os.pathsep.join([job.import_path, environment["PYTHONPATH"]])
    if cell.ddp or cell.world_size > 1:
        size = str(cell.world_size)
        environment |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment


def free_port() -> int:
    """A port of this machine at which nobody listens: for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chunks(descriptor: int) -> Iterator[bytes]:
    """What can be read now; an empty chunk where the other end is closed, or its machine can no longer be reached."""
    chunk = None
    while chunk != b"":
        try:
            chunk = os.read(descriptor, 65536)
        except BlockingIOError:
            return
        except OSError:  # of a connection: reset, timed out, no route; whose process it was is said by where it stood
            chunk = b""
        yield chunk
