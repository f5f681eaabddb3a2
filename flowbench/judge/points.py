"""What a run document says of each of its cells, as points of history. Pure."""

from __future__ import annotations

import statistics

from flowbench.cell import Cell
from flowbench.judge.pairs import ratio_to_reference
from flowbench.judge.stats import process_median
from flowbench.record.points import Point, machine_name
from flowbench.record.run import Git, RunDocument
from flowbench.record.sample import Sample

# Of Memory: the peaks that have a history, by the names reports use.
_PEAKS = {
    "peak resident": "resident_peak_bytes",
    "peak allocated": "allocated_peak_bytes",
    "peak reserved": "reserved_peak_bytes",
}


def points_of(document: RunDocument) -> tuple[Point, ...]:
    """One point for each cell of `document`, in its order; a failed or void cell has one without a time.

    The sides of a comparison are points of two commits, of the engine that both stand for; its canary is none.
    """
    sides = {None, "base", "head"}
    return tuple(_point(document, cell) for cell in document.cells if document.engine(cell.engine).side in sides)


def _point(document: RunDocument, cell: Cell) -> Point:
    samples = document.samples_of(cell)
    good = [sample for sample in samples if sample.status == "ok"]
    spoiled = [sample.status for sample in samples if sample.status != "ok"]
    # A cell that failed once is not known to work: its times of before are no point of its series.
    medians = [] if spoiled else [process_median(sample.steps_ms) for sample in good]
    named = Cell.of(cell.case, document.engine(cell.engine).registered_name)
    git = _git(document, cell)
    ratio = ratio_to_reference(document, cell)
    low, high = (ratio and ratio.interval) or (None, None)
    return Point(
        run_id=document.run_id,
        created=document.created,
        commit=git.commit if git else None,
        dirty=git.dirty if git else False,
        machine=machine_name(document.machine),
        cell=named.key,
        label=named.label,
        status=spoiled[0] if spoiled else "ok" if medians else "not measured",
        processes=len(medians),
        time_ms=statistics.median(medians) if medians else None,
        low_ms=min(medians, default=None),
        high_ms=max(medians, default=None),
        relative_speed=ratio.geometric_mean if ratio else None,
        relative_speed_low=low,
        relative_speed_high=high,
        memory=_peaks(good) if medians else {},
    )


def _git(document: RunDocument, cell: Cell) -> Git | None:
    side = document.engine(cell.engine).side
    if document.comparison is None or side is None:
        return document.git
    return (document.comparison.base if side == "base" else document.comparison.head).git


def _peaks(samples: list[Sample]) -> dict[str, int]:
    peaks: dict[str, int] = {}
    for kind, field in _PEAKS.items():
        values = [getattr(rank.memory, field) for sample in samples for rank in sample.ranks]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            peaks[kind] = max(known)
    return peaks
