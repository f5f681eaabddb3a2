"""The classic table: batch sizes across, `7.1 / 17.9 → 2.49-2.55` in each cell: subject and reference in ms, relative speed."""

from __future__ import annotations

from flowbench.cell import Case
from flowbench.judge.stats import untold
from flowbench.report.facts import Comparison, Facts
from flowbench.report.words import one_line


def write(facts: Facts) -> str:
    """One table for all cases: a row per subject and kind of case, the batch sizes in the order of the document."""
    compared = [comparison for comparison in facts.comparisons if comparison.reference is not None]
    if not compared:
        return "No table: nothing is compared with a reference.\n"
    sizes = list(dict.fromkeys(comparison.case.input_shape[0] for comparison in compared))
    rows: dict[str, dict[int, str]] = {}
    for comparison in compared:
        rows.setdefault(_row_name(comparison), {})[comparison.case.input_shape[0]] = _cell(comparison)
    lines = [
        ["N", *map(str, sizes)],
        *([name, *(cells.get(size, "") for size in sizes)] for name, cells in rows.items()),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(sizes) + 1)]
    table = [_line([text.ljust(width) for text, width in zip(line, widths, strict=True)]) for line in lines]
    table.insert(1, _line(["-" * width for width in widths]))
    reference = one_line(facts.reference or "reference", 40)
    head = f"Mean ms of a step, subject / {reference} → relative speed (lowest-highest pair):"
    return "\n".join([head, "", *table]) + "\n"


def _row_name(comparison: Comparison) -> str:
    case = comparison.case
    kinds = [comparison.subject.name, case.model, "x".join(map(str, case.input_shape[1:])), _where(case)]
    kinds += [case.precision] if case.precision != "float32" else []
    kinds += [case.mode] if case.mode != "eager" else []
    return one_line(", ".join(kinds), 80).replace("|", "/")


def _where(case: Case) -> str:
    unit, units = ("GPU", "GPUs") if case.device == "cuda" else ("process", "processes")
    where = f"one {unit}" if case.world_size == 1 else f"{case.world_size} {units}"
    return f"{where}, DDP" if case.ddp else where


def _cell(comparison: Comparison) -> str:
    subject, reference, ratio = comparison.subject, comparison.reference, comparison.ratio
    if ratio is None or reference is None or subject.times is None or reference.times is None:
        return f"none: {one_line(comparison.no_ratio or '?', 60)}".replace("|", "/")
    span = f"{ratio.lowest:.2f}-{ratio.highest:.2f}" if ratio.pairs > 1 else f"{ratio.geometric_mean:.2f}"
    few = untold(ratio.interval)
    span += f" ({few})" if few else ""
    return f"{subject.times.mean_ms:.1f} / {reference.times.mean_ms:.1f} → {span}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
