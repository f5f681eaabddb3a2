"""The records of history: a point is what one run said of one cell, or what an old Speed stats comment said of one case."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from flowbench.cell import Count, Name
from flowbench.codec import CodecError, Limit
from flowbench.record.quantities import Bytes, Date, Milliseconds, Moment, Text, instant
from flowbench.record.run import Machine

Positive = Annotated[float, Limit(above=0)]
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """One cell in one run of one commit. `time_ms` is the median of its processes' medians, `low_ms` to `high_ms` their range.

    `relative_speed` is the reference's time over this cell's, paired; null for the reference, and where there was none. With
    `_low` and `_high` come the ends of its 95 % interval; null for one pair.
    `memory` has the largest peak of any rank and process in bytes, by kind. `machine` is what `machine_name` gives.
    """

    run_id: Name
    created: Moment
    commit: Name | None
    dirty: bool
    machine: Name
    cell: Text
    label: Text
    status: Literal["ok", "failed", "void", "not measured"]
    processes: Annotated[int, Limit(minimum=0)]
    time_ms: Milliseconds | None
    low_ms: Milliseconds | None
    high_ms: Milliseconds | None
    relative_speed: Positive | None
    relative_speed_low: Positive | None
    relative_speed_high: Positive | None
    memory: dict[str, Bytes]

    def __post_init__(self) -> None:
        if (self.time_ms is None) != (self.processes == 0):
            raise CodecError("$.time_ms", str(self.time_ms), "a time exactly where processes were measured")

    @property
    def relative_interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the relative speed; None for one pair."""
        low, high = self.relative_speed_low, self.relative_speed_high
        return None if low is None or high is None else (low, high)


@dataclass(frozen=True)
class ImportedPoint:
    """One time of an old Speed stats comment: what the text says, in ms. Nothing of it was measured by this tool.

    `source` is where it was read: a comment's address, or the file's name; `position` is its place among the times there.
    `date` is null where nothing told it; `cpu` names the machine where the text has no GPU.
    """

    source: Text
    position: Annotated[int, Limit(minimum=0)]
    author: Name | None
    date: Date | None
    gpu: Name | None
    framework: Name
    model: Name | None
    input_shape: tuple[int, ...] | None
    num_workers: Annotated[int, Limit(minimum=0)] | None
    backward: bool | None
    ddp: bool
    world_size: Count | None
    broadcast_buffers: bool
    time_ms: Positive
    times: Annotated[int, Limit(minimum=0)] | None
    relative_speed: Positive | None
    cpu: Name | None = None

    @property
    def instant(self) -> datetime:
        """The instant of its date, to sort by: before all others where there is none."""
        return instant(self.date) if self.date else datetime.min.replace(tzinfo=UTC)

    @property
    def machine(self) -> str:
        """What it was taken on, as far as the text tells."""
        return self.gpu or self.cpu or "unknown machine"

    @property
    def label(self) -> str:
        """The case in the words of measured ones, then the framework."""
        shape = f" [{', '.join(map(str, self.input_shape))}]" if self.input_shape else ""
        words = [f"{self.model or 'unnamed model'}{shape}"]
        words += [f"ddp, world size={self.world_size or '?'}"] if self.ddp or (self.world_size or 1) > 1 else []
        words += ["buffers not broadcast"] if not self.broadcast_buffers else []
        words += [f"num_workers={self.num_workers}"] if self.num_workers is not None else []
        words += ["forward only"] if self.backward is False else []
        return f"{', '.join(words)} {self.framework}"


def machine_name(machine: Machine) -> str:
    """What tells the machines of a history apart: the hardware, not its kernel or Python; six digits against like names."""
    cards = [gpu.name for gpu in machine.gpus]
    hardware = (
        machine.cpu_model,
        machine.architecture,
        machine.physical_cores,
        machine.usable_cores,
        round(machine.memory_bytes / GIB),
        [(gpu.name, round(gpu.memory_bytes / GIB)) for gpu in machine.gpus],
    )
    digest = hashlib.sha256(repr(hardware).encode()).hexdigest()[:6]
    processor = f"{machine.cpu_model}, {machine.usable_cores} cores"
    shown = f"{len(cards)} × {cards[0]}, {processor}" if cards else processor
    return f"{shown[:190]} #{digest}"
