"""What one fresh group of rank processes measured: times, losses and memory of each rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

from flowbench.cell import Count, Name
from flowbench.codec import CodecError, Limit
from flowbench.record.gpu import GpuConditions, GpuUse
from flowbench.record.quantities import Bytes, Index, Milliseconds, Moment, Text


@dataclass(frozen=True)
class Memory:
    """Peaks of one rank in bytes: of the engine's allocator (null where it has none) and of its process tree.

    `resident_before_bytes` was held just before the model was built: interpreter, libraries, data. `gpu_uses` is what the
    driver says the process held on each GPU; `gpu_uses_how` says how it was found there, or why not.
    """

    allocated_peak_bytes: Bytes | None
    reserved_peak_bytes: Bytes | None
    resident_peak_bytes: Bytes
    resident_before_bytes: Bytes
    gpu_uses: tuple[GpuUse, ...] = ()
    gpu_uses_how: Text | None = None

    @property
    def gpu_used_bytes(self) -> int | None:
        """What the process held on all GPUs, as the driver says; None where that is not known."""
        return sum(use.held_bytes for use in self.gpu_uses) if self.gpu_uses else None

    @property
    def resident_above_bytes(self) -> int:
        """Peak resident memory above what was held before the model was built."""
        return max(0, self.resident_peak_bytes - self.resident_before_bytes)


@dataclass(frozen=True)
class RankSample:
    """What one rank of one process group measured; times in ms, in the order of the steps, device synchronised.

    `losses` has one entry per step, warm-up first, untimed ones too; null where the loss was not finite. Where steps were
    timed by events on the device, `host_ms` has the times until the call that issued a step returned, of a few further steps
    that each found the device idle.
    """

    rank: Index
    threads: Count
    device: Name
    warmup_ms: tuple[Milliseconds, ...]
    steps_ms: tuple[Milliseconds, ...]
    losses: tuple[float | None, ...]
    memory: Memory
    host_ms: Annotated[tuple[Milliseconds, ...], Limit(max_length=1000)] | None = None


@dataclass(frozen=True)
class Sample:
    """One fresh process group of one cell. `pair` counts the rounds, `position` the place within the round's order.

    `ok` has all ranks; `failed` raised, hung or died; `void` ran, but its losses differ from the reference's.
    """

    cell: Text
    pair: Index
    position: Index
    started: Moment
    wall_s: Annotated[float, Limit(minimum=0)]
    status: Literal["ok", "failed", "void"]
    error: Text | None
    loss_difference: Annotated[float, Limit(minimum=0)] | None
    ranks: tuple[RankSample, ...]
    gpus: tuple[GpuConditions, ...] = ()

    def __post_init__(self) -> None:
        if (self.error is None) != (self.status == "ok"):
            raise CodecError(
                "$.error",
                repr(self.error),
                f"{'null' if self.status == 'ok' else 'a reason'} for status {self.status!r}",
            )
        if self.status != "failed" and not self.ranks:
            raise CodecError("$.ranks", "no rank", f"at least one for status {self.status!r}")
        counts = {len(rank.steps_ms) for rank in self.ranks}
        if len(counts) > 1 or 0 in counts:
            raise CodecError("$.ranks", f"{sorted(counts)} step times", "the same number in all ranks, at least one")

    @functools.cached_property
    def steps_ms(self) -> tuple[float, ...]:
        """Each step's time: its slowest rank's."""
        return tuple(max(times) for times in zip(*(rank.steps_ms for rank in self.ranks), strict=True))
