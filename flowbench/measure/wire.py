"""What parent and rank tell each other: one JSON line a message, over two pipes of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from flowbench.cell import Cell
from flowbench.codec import decode, encode
from flowbench.record.profile import Profile
from flowbench.record.run import RunDocument
from flowbench.record.sample import RankSample

Phase = Literal["start", "import", "data", "barrier", "open", "build", "warm-up", "steps", "end", "exit"]


@dataclass(frozen=True)
class Job:
    """What a rank is to do; the first line it reads. `go` follows each time that all ranks wait at the barrier.

    The rank waits when it has done all that takes no GPU, before it builds, after its first step, before the timed steps, and
    before it ends. With `steps_per_turn` it opens the GPU before the second of these, and waits after every so many timed steps
    too, while others have their turn; then each turn begins with `untimed_per_turn` steps that do not count, as others have
    emptied the caches.
    `side` names the side of a comparison that the cell's engine stands for: `NAME@SIDE`. The parent has put `import_path`, a
    folder of packages, before all others. `slowdown` makes each step longer by this fraction. `cores` are the only ones used;
    of a GPU's cell there is one per rank of a machine, where the thread that trains stays after its first step of warm-up.
    With `profile`, all ranks run one more step after the warm-up, op by op, and rank 0 tells what it saw.
    `local_rank` counts the ranks of one machine, and is the number of the rank's GPU. A `launcher` starts the ranks, which
    then meet at `master`, an address and a port.
    """

    cell: Cell
    rank: int
    steps: int
    warmup: int
    seed: int
    learning_rate: float
    momentum: float
    gpu_memory_limit_bytes: int | None = None
    steps_per_turn: int | None = None
    untimed_per_turn: int = 0
    side: str | None = None
    import_path: str | None = None
    slowdown: float = 0.0
    cores: tuple[int, ...] = ()
    profile: bool = False
    local_rank: int = 0
    master: str | None = None
    launcher: str | None = None
    launcher_options: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The registered name of the engine."""
        return self.cell.engine.removesuffix(f"@{self.side}") if self.side else self.cell.engine


@dataclass(frozen=True)
class RankState:
    """What has to be the same on all ranks after a run: a digest of each parameter, and the loss on a batch they all see."""

    parameters: dict[str, str]
    loss: float | None


@dataclass(frozen=True)
class Event:
    """What a rank says: it reached a phase, finished a step, failed, compared its state, or is done with a result.

    `origin` is the file and line that raised the `error`.
    """

    phase: Phase
    step: int | None = None
    error: str | None = None
    origin: str | None = None
    library_version: str | None = None
    note: str | None = None
    result: RankSample | None = None
    profile: Profile | None = None
    state: RankState | None = None


def job_of(document: RunDocument, cell: Cell) -> Job:
    """The job of one process of `cell` as the document's sitting ran it; where it imports from is the caller's to say."""
    protocol = document.protocol
    return Job(
        cell=cell,
        rank=0,
        steps=protocol.steps,
        warmup=protocol.warmup,
        seed=protocol.seed,
        learning_rate=protocol.learning_rate,
        momentum=protocol.momentum,
        gpu_memory_limit_bytes=protocol.gpu_memory_limit_bytes,
        side=document.engine(cell.engine).side,
    )


def job_line(job: Job) -> bytes:
    """The job as a line."""
    return json.dumps(encode(job)).encode() + b"\n"


def read_job(line: bytes) -> Job:
    """The job of a line; ValueError where it is none."""
    return decode(Job, json.loads(line))


def event_line(event: Event) -> bytes:
    """The event as a line; ValueError for a time that is not finite."""
    return json.dumps(encode(event), allow_nan=False).encode() + b"\n"


def read_event(line: bytes) -> Event:
    """The event of a line; ValueError where it is none."""
    try:
        return decode(Event, json.loads(line))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def event_limit(job: Job) -> int:
    """More bytes than an event of `job` can have."""
    return 1_000_000 + 200 * (job.steps + job.warmup)
