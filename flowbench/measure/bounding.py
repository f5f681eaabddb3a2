"""What is kept of a profiled step: the largest ops and tensors, and its memory at no more than so many moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flowbench.engine import HeldTensor, OpCall, StepProfile
from flowbench.record.profile import (
    MOST_OPS,
    MOST_POINTS,
    MOST_TENSORS,
    MemoryPoint,
    Profile,
    ProfiledOp,
    ProfiledTensor,
)

_LONGEST = 300


def bounded(cell: str, step: StepProfile) -> Profile:
    """What is kept of a step: the largest ops and tensors, and its memory at no more than MOST_POINTS moments."""
    ops = _ops(step.calls)
    return Profile(
        cell=cell,
        step_ms=step.step_ms,
        ops_ms=sum(op.total_ms for op in ops),
        ops=tuple(ops[:MOST_OPS]),
        peak_bytes=step.peak_bytes,
        peak_at_ms=step.peak_at_ms,
        tensors=tuple(_tensors(step.held)[:MOST_TENSORS]),
        timeline=tuple(_thinned([MemoryPoint(max(0.0, at_ms), held) for at_ms, held in step.timeline])),
        missing=tuple(text[:200] for text in step.missing),
    )


def _ops(calls: Sequence[OpCall]) -> list[ProfiledOp]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for call in calls:
        times[call.op[:_LONGEST], call.shape[:_LONGEST], call.module[:_LONGEST]].append(call.time_ms)
    ops = [ProfiledOp(*what, calls=len(spent), total_ms=sum(spent)) for what, spent in times.items()]
    return sorted(ops, key=lambda op: -op.total_ms)


def _tensors(held: Sequence[HeldTensor]) -> list[ProfiledTensor]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in held:
        sizes[one.op[:_LONGEST], one.shape[:_LONGEST], one.module[:_LONGEST]].append(one.nbytes)
    tensors = [ProfiledTensor(*what, count=len(each), total_bytes=sum(each)) for what, each in sizes.items()]
    return sorted(tensors, key=lambda tensor: -tensor.total_bytes)


def _thinned(points: list[MemoryPoint]) -> list[MemoryPoint]:
    """At most MOST_POINTS of the points: the first, the last, and the highest of each of equally many in between."""
    points.sort(key=lambda point: point.at_ms)
    if len(points) <= MOST_POINTS:
        return points
    inner, parts = points[1:-1], MOST_POINTS - 2
    groups = [inner[index * len(inner) // parts : (index + 1) * len(inner) // parts] for index in range(parts)]
    return [points[0], *(max(group, key=lambda point: point.allocated_bytes) for group in groups), points[-1]]
