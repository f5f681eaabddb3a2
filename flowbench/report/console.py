"""Writes a run as plain text for a terminal: what a person wants to know, within forty lines."""

from __future__ import annotations

from collections.abc import Iterator

from flowbench.report.facts import Comparison, Facts, Side
from flowbench.report.markdown import largest_peak
from flowbench.report.words import counted, details_of, milliseconds, one_line, spread

_MOST_ROWS = 14
_MOST_REASONS = 5
_WIDTH = 150
_ENDINGS = {
    "interrupted": "Incomplete: the sitting was interrupted.",
    "running": "Incomplete: the sitting ended without a word (killed?).",
    "wall_cap": "Incomplete: the sitting's time was up.",
}


def write(facts: Facts) -> str:
    """The text of `facts`; what is cut is said."""
    lines = [_ENDINGS[facts.document.ending.how]] if facts.document.ending.how in _ENDINGS else []
    lines += [*_table(facts), "", *_summary(facts)]
    if facts.left_out:
        lines.append("Not measured:")
        lines += _cut([f"  {item.what}: {item.reason}" for item in facts.left_out], _MOST_REASONS, "reasons")
    if facts.document.findings:
        lines.append("Disturbed by:")
        lines += _cut([f"  {item.kind}: {item.message}" for item in facts.document.findings], 2, "findings")
    protocol = facts.document.protocol
    wanted = {"run", "commit", "GPU" if facts.document.on_gpu else "CPU"}
    lines += _cut([f"{word}: {text}" for word, text in details_of(facts.document) if word in wanted], 4, "details")
    lines.append(
        f"{counted(protocol.pairs, 'pair')} of fresh processes, {protocol.warmup} warm-up and "
        f"{counted(protocol.steps, 'timed step')} each, {counted(protocol.threads, 'thread')} per rank"
    )
    return "\n".join(lines) + "\n"


def _table(facts: Facts) -> list[str]:
    heads = ["cell", "subject", "ms", "reference", "relative", "95 % interval", "memory"]
    rows = [_row(comparison) for comparison in facts.comparisons[:_MOST_ROWS]]
    if not rows:
        return ["No cells."]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width) for column, (cell, width) in enumerate(columns)
        )
        for columns in (list(zip(row, widths, strict=True)) for row in [heads, *rows])
    ]
    more = len(facts.comparisons) - _MOST_ROWS
    return [line.rstrip() for line in lines] + (
        [f"… and {counted(more, 'more cell')}: see the other formats"] if more > 0 else []
    )


def _row(comparison: Comparison) -> list[str]:
    subject, reference, ratio = comparison.subject, comparison.reference, comparison.ratio
    memory = comparison.memory_ratios.get("peak resident")
    peak = largest_peak(subject, "peak resident")
    return [
        one_line(comparison.label, 44),
        one_line(subject.name, 20),
        _median(subject),
        _median(reference),
        f"{ratio.geometric_mean:.2f}" if ratio else "-",
        spread(*ratio.interval) if ratio and ratio.interval else "-",
        f"{memory:.2f}" if memory else f"{peak / 1024**2:.0f} MiB" if peak else "-",
    ]


def _median(side: Side | None) -> str:
    if side is None:
        return "-"
    return milliseconds(side.times.median_ms) if side.times else side.status


def _summary(facts: Facts) -> Iterator[str]:
    if not facts.anything_measured:
        yield "Nothing was measured."
        return
    if facts.reference is None:
        yield "Times only: there is no reference to compare with."
        return
    reference = one_line(facts.reference, 20)
    for overall in facts.overall[:3]:
        name = one_line(overall.name, 20)
        if overall.geometric_mean is None:
            yield f"{name}: no relative speed to {reference}, none of {counted(overall.cells, 'cell')} has good pairs"
        else:
            alone = "" if overall.most_pairs > 1 else "; one pair only, no interval"
            yield (
                f"{name}: {overall.geometric_mean:.2f} times {reference}'s speed "
                f"(geometric mean of {overall.good} of {counted(overall.cells, 'cell')}{alone})"
            )
    yield "ms: median step. relative: reference / subject, above 1 the subject is faster."
    yield "memory: peak resident, subject / reference, below 1 the subject needs less."


def _cut(lines: list[str], most: int, what: str) -> list[str]:
    shown = [" " * (len(line) - len(line.lstrip())) + one_line(line, _WIDTH) for line in lines[:most]]
    return shown + ([f"  … and {len(lines) - most} more {what}"] if len(lines) > most else [])
