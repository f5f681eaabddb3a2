"""Which samples of a run document may be compared, good ones of two cells that were measured in the same round; and how."""

from __future__ import annotations

from flowbench.cell import Cell
from flowbench.judge.stats import Ratio, paired_ratio, process_median
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample


def matched_samples(document: RunDocument, reference: Cell, subject: Cell) -> tuple[tuple[Sample, Sample], ...]:
    """The pairs (reference's sample, subject's sample) of the rounds in which both are ok, in the order of the rounds."""
    good = {sample.pair: sample for sample in document.samples_of(reference) if sample.status == "ok"}
    return tuple(
        (good[sample.pair], sample)
        for sample in document.samples_of(subject)
        if sample.status == "ok" and sample.pair in good
    )


def ratio_to_reference(document: RunDocument, cell: Cell | None) -> Ratio | None:
    """How many times the reference's speed `cell` runs at: reference time / the cell's time over the rounds that both are in.

    None without a cell or a reference, for the reference itself, and where either has a sample that is not ok: figures of
    the rest would hide it.
    """
    if cell is None or document.reference is None or cell.engine == document.reference:
        return None
    reference = document.by_key.get(Cell.of(cell.case, document.reference).key)
    if reference is None:
        return None
    if any(sample.status != "ok" for side in (reference, cell) for sample in document.samples_of(side)):
        return None
    pairs = matched_samples(document, reference, cell)
    return ratio_of(pairs) if pairs else None


def ratio_of(pairs: tuple[tuple[Sample, Sample], ...]) -> Ratio:
    """Reference time / subject time over matched samples, from each process group's median step (its slowest rank's)."""
    return paired_ratio(
        [process_median(reference.steps_ms) for reference, _ in pairs],
        [process_median(subject.steps_ms) for _, subject in pairs],
    )
