"""The records of GPUs: what they are, how they ran during a sample, and what the driver says processes held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowbench.cell import Count, Name
from flowbench.codec import CodecError, Limit, describe
from flowbench.record.quantities import Bytes, Index

# The kind of finding that a rank holds memory on a GPU which is not its own.
FOREIGN_MEMORY = "memory on another's GPU"

Figure = Annotated[float, Limit(minimum=-1e9, maximum=1e9)]
Share = Annotated[float, Limit(minimum=0, maximum=1)]


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver names it, with its highest clocks and its limit of power; null where the driver does not tell."""

    name: Name
    memory_bytes: Bytes
    sm_clock_max_mhz: Count | None = None
    memory_clock_max_mhz: Count | None = None
    power_limit_w: Figure | None = None


@dataclass(frozen=True)
class Range:
    """The lowest, the median and the highest of some readings."""

    lowest: Figure
    median: Figure
    highest: Figure

    def __post_init__(self) -> None:
        if not self.lowest <= self.median <= self.highest:
            raise CodecError("$.median", describe(self.median), f"a figure from {self.lowest} to {self.highest}")


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU that is not part of the measurement, under the id the driver gives it."""

    pid: Index
    memory_bytes: Bytes | None
    name: Name | None


@dataclass(frozen=True)
class GpuConditions:
    """How one GPU ran from the warm-up to the last timed step of a sample, by readings of its driver; null was not told.

    `slowed_by` has the share of the readings in which clocks were lowered, by reason. `others` were on the GPU before or
    after the sample's own processes; `used_before_bytes` and `used_after_bytes` were in use then.
    """

    gpu: Index
    readings: Index
    sm_clock_mhz: Range | None
    memory_clock_mhz: Range | None
    temperature_c: Range | None
    power_w: Range | None
    slowed_by: dict[str, Share]
    others: tuple[GpuProcess, ...]
    used_before_bytes: Bytes | None
    used_after_bytes: Bytes | None


@dataclass(frozen=True)
class GpuUse:
    """What the driver says that one rank's process held on one GPU at the end of its steps: tensors, context, libraries."""

    gpu: Index
    held_bytes: Bytes
