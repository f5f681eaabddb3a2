"""The records of a profiled pass: which ops took the time of one step, and which tensors were alive at its memory peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from flowbench.cell import Count, Name
from flowbench.codec import CodecError, Limit, describe

MOST_OPS = 20
MOST_TENSORS = 20
MOST_POINTS = 500

Label = Annotated[str, Limit(max_length=300)]
Milliseconds = Annotated[float, Limit(minimum=0, maximum=1e9)]
Bytes = Annotated[int, Limit(minimum=0)]


@dataclass(frozen=True)
class ProfiledOp:
    """All calls of one op in one step that came from one module with one shape; `total_ms` over its `calls`.

    `shape` is that of the first tensor it writes (Flow) or reads (PyTorch), as `float32[4, 64, 56, 56]`, or how many it writes,
    as `161 tensors`, where it works on a group; `module` is the path of the module, empty where the engine does not know it.
    """

    op: Label
    shape: Label
    module: Label
    calls: Count
    total_ms: Milliseconds


@dataclass(frozen=True)
class ProfiledTensor:
    """Memory that was held at the peak: `count` blocks alike, `total_bytes` in all, and the op and module that asked for it."""

    op: Label
    shape: Label
    module: Label
    count: Count
    total_bytes: Bytes


@dataclass(frozen=True)
class MemoryPoint:
    """What the engine's allocator had handed out `at_ms` after the step began."""

    at_ms: Milliseconds
    allocated_bytes: Bytes


@dataclass(frozen=True)
class Profile:
    """One step of one cell, observed op by op: slower than a timed step, so that its times only compare with one another.

    `ops` and `tensors` are the largest, largest first; `ops_ms` and `peak_bytes` are what all of them amount to. `timeline`
    is the step's memory from its begin to its end, with its peak. `missing` says what this engine cannot tell, and why.
    """

    cell: Annotated[str, Limit(max_length=20_000)]
    step_ms: Milliseconds
    ops_ms: Milliseconds
    ops: Annotated[tuple[ProfiledOp, ...], Limit(max_length=MOST_OPS)]
    peak_bytes: Bytes | None
    peak_at_ms: Milliseconds | None
    tensors: Annotated[tuple[ProfiledTensor, ...], Limit(max_length=MOST_TENSORS)]
    timeline: Annotated[tuple[MemoryPoint, ...], Limit(max_length=MOST_POINTS)]
    missing: tuple[Name, ...]

    def __post_init__(self) -> None:
        if (self.peak_bytes is None) != (self.peak_at_ms is None):
            raise CodecError("$.peak_at_ms", describe(self.peak_at_ms), "a time exactly where there is a peak")
        times = [point.at_ms for point in self.timeline]
        if times != sorted(times):
            raise CodecError("$.timeline", "points out of order", "points by their time")

    @property
    def outside_ms(self) -> float | None:
        """The step's time outside all of its ops, listed or not; None where they overlap, and add up to more than the step."""
        return self.step_ms - self.ops_ms if self.ops_ms <= self.step_ms else None
