"""Does head take more memory than base? Peaks are compared exactly, pair by pair, kind by kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowbench.judge.verdict import Margin, MemoryKind, Quantity, Verdict
from flowbench.record.sample import Memory, Sample

_MIB = 1024 * 1024

# What each kind is counted in: a change of one step is no change. An allocator hands out 512 bytes at a time and takes 2 MiB
# from the system, the driver counts in 2 MiB; resident pages differ by some MiB from start to start, and with what is imported.
STEPS: Mapping[MemoryKind, int] = {
    "peak allocated": 512,
    "peak reserved": 2 * _MIB,
    "peak on the GPU": 2 * _MIB,
    "peak resident": 4 * _MIB,
}

# Where pairs disagree about the direction, a median change of less than this is none.
_NO_CHANGE = 0.005


# What the system says of a process differs from start to start: one pair has no direction there.
_FROM_OUTSIDE: tuple[MemoryKind, ...] = ("peak on the GPU", "peak resident")


@dataclass(frozen=True)
class MemoryJudgement:
    """What the peaks of one kind say; `base` and `head` are medians over the pairs, in bytes."""

    verdict: Verdict
    reason: str
    base: float
    head: float
    margin: Margin


def peaks_of(sample: Sample) -> dict[Quantity, int]:
    """All peaks of a sample, in bytes, by kind, rank and GPU; ranks are told apart only where there are several."""
    several = len(sample.ranks) > 1
    return {
        Quantity(kind, rank.rank if several else None, gpu): size
        for rank in sample.ranks
        for kind, gpu, size in _peaks(rank.memory)
    }


def both_peaks(
    quantity: Quantity, one: Mapping[Quantity, int], other: Mapping[Quantity, int]
) -> tuple[int, int] | None:
    """The peaks of two samples, None where one does not tell. What the driver does not list on a GPU that a rank held is 0."""
    sizes = []
    for peaks in (one, other):
        on_gpu = quantity.name == "peak on the GPU" and any(
            (known.name, known.rank) == (quantity.name, quantity.rank) for known in peaks
        )
        sizes.append(peaks.get(quantity, 0 if on_gpu else None))
    ours, theirs = sizes
    return None if ours is None or theirs is None else (ours, theirs)


def judge_memory(
    kind: MemoryKind, base_bytes: Sequence[int], head_bytes: Sequence[int], pairs: int | None = None
) -> MemoryJudgement:
    """The judgement of one kind of peak, measured in pairs; ValueError where there are none.

    `larger` and `smaller` demand the same direction, by more than a step of granularity, in every pair; and two pairs, where
    the system measured and not the allocator. `pairs` is how many they count as, where processes were put beside several.
    """
    if not base_bytes or len(base_bytes) != len(head_bytes):
        raise ValueError(
            f"{len(base_bytes)} and {len(head_bytes)} peaks were given, expected equally many, at least one"
        )
    step = STEPS[kind]
    changes = [head - base for base, head in zip(base_bytes, head_bytes, strict=True)]
    base, head = statistics.median(base_bytes), statistics.median(head_bytes)
    pairs = len(changes) if pairs is None else pairs
    count = f"{pairs} pairs" if pairs > 1 else "the only pair"
    verdict, reason = Verdict.UNCLEAR, f"the pairs disagree: from {min(changes):+,d} to {max(changes):+,d} bytes"
    if pairs == 1 and kind in _FROM_OUTSIDE and max(map(abs, changes)) > step:
        reason = f"{max(changes, key=abs):+,d} bytes in the only pair, which may differ so from start to start"
    elif all(change > step for change in changes):
        verdict, reason = Verdict.LARGER, f"larger in {count}, by {_range(changes)}"
    elif all(change < -step for change in changes):
        verdict, reason = Verdict.SMALLER, f"smaller in {count}, by {_range([-change for change in changes])}"
    elif all(abs(change) <= step for change in changes):
        verdict, reason = Verdict.SAME, f"within a step of {step:,d} bytes in {count}"
    elif abs(statistics.median(changes)) <= max(step, _NO_CHANGE * min(base, head)):
        verdict, reason = Verdict.SAME, f"no direction: from {min(changes):+,d} to {max(changes):+,d} bytes"
    return MemoryJudgement(verdict, reason, base, head, Margin(step, "a step of granularity"))


def _range(changes: Sequence[int]) -> str:
    low, high = min(changes), max(changes)
    return f"{low:,d} bytes" if low == high else f"{low:,d} to {high:,d} bytes"


def _peaks(memory: Memory) -> Iterator[tuple[MemoryKind, int | None, int]]:
    if memory.allocated_peak_bytes is not None:
        yield "peak allocated", None, memory.allocated_peak_bytes
    if memory.reserved_peak_bytes is not None:
        yield "peak reserved", None, memory.reserved_peak_bytes
    for use in memory.gpu_uses:
        yield "peak on the GPU", use.gpu, use.held_bytes
    yield "peak resident", None, memory.resident_peak_bytes
