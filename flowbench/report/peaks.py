"""Peaks of memory, as reports compare them: by kind, rank by rank, the largest of all processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flowbench.record.sample import Memory, Sample

MIB = 1024 * 1024
# The kinds of memory peaks as reports name them, with their field of the run document.
MEMORY_KINDS = {
    "peak resident": "resident_peak_bytes",
    "peak resident above start": "resident_above_bytes",
    "peak allocated": "allocated_peak_bytes",
    "peak reserved": "reserved_peak_bytes",
    "GPU used": "gpu_used_bytes",
}
# What says most of a step's memory, first the best.
TELLING_KINDS = ("peak allocated", "peak resident")


@dataclass(frozen=True)
class RankPeaks:
    """The largest peaks of one rank over its processes, in bytes by kind (`MEMORY_KINDS`); unknown kinds are left out.

    `on_gpus` is what the driver says its process held on each GPU, by the GPU's number.
    """

    rank: int
    peaks: dict[str, int]
    on_gpus: dict[int, int] = field(default_factory=dict)


def peaks_of_ranks(samples: Sequence[Sample], world_size: int) -> tuple[RankPeaks, ...]:
    """The peaks of each rank over the processes that were it."""
    memories = [[sample.ranks[rank].memory for sample in samples] for rank in range(world_size)]
    return tuple(RankPeaks(rank, _largest_peaks(own), _largest_uses(own)) for rank, own in enumerate(memories))


def largest_peak(ranks: Sequence[RankPeaks], kind: str) -> int | None:
    """The peak in bytes of the largest rank, None where this kind is unknown."""
    return max((rank.peaks[kind] for rank in ranks if kind in rank.peaks), default=None)


def memory_ratios(reference: Sequence[RankPeaks], subject: Sequence[RankPeaks]) -> dict[str, float]:
    """Subject's peak / reference's by kind, each of its largest rank; only kinds that both have."""
    ratios = {}
    for kind in MEMORY_KINDS:
        theirs, ours = largest_peak(reference, kind), largest_peak(subject, kind)
        if theirs and ours:
            ratios[kind] = ours / theirs
    return ratios


def _largest_peaks(memories: Sequence[Memory]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for memory in memories:
        for kind, name in MEMORY_KINDS.items():
            size = getattr(memory, name)
            if size is not None:
                peaks[kind] = max(size, peaks.get(kind, 0))
    return peaks


def _largest_uses(memories: Sequence[Memory]) -> dict[int, int]:
    uses: dict[int, int] = {}
    for use in (use for memory in memories for use in memory.gpu_uses):
        uses[use.gpu] = max(use.held_bytes, uses.get(use.gpu, 0))
    return uses
