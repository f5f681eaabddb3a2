"""Writes a run as GitHub Markdown: relative speeds with their spread, then, folded, everything else; no verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flowbench.report import speed_stats
from flowbench.report.facts import MEMORY_KINDS, Comparison, Facts, Side
from flowbench.report.words import details_of, markdown, mebibytes, milliseconds, spread

_ENDINGS = {
    "interrupted": "the sitting was interrupted",
    "running": "the sitting ended without a word (killed?)",
    "wall_cap": "the sitting's time was up",
}


def write(facts: Facts) -> str:
    """The Markdown of `facts`. Names and reasons from the document are escaped."""
    lines = [*_headline(facts), "", *_speed_table(facts), ""]
    memory = list(_memory_rows(facts))
    if memory:
        lines += ["Peak memory, largest rank (subject / reference below 1: the subject needs less):", "", *memory, ""]
    if facts.left_out:
        lines += ["Not measured:", ""]
        lines += [f"- {markdown(item.what)}: {markdown(item.reason, 400)}" for item in facts.left_out]
        lines.append("")
    lines += _folded("Speed stats", ["```text", *speed_stats.write(facts).splitlines(), "```"])
    if facts.document.findings:
        lines += _folded("What disturbed the measurement", _findings(facts))
    rows = [f"- {word}: {markdown(text, 400)}" for word, text in details_of(facts.document)]
    lines += _folded("Machine, versions, and how it was measured", rows)
    return "\n".join(lines).rstrip("\n") + "\n"


def _headline(facts: Facts) -> Iterator[str]:
    document = facts.document
    if document.ending.how != "complete":
        reason = f": {markdown(document.ending.reason)}" if document.ending.reason else ""
        yield f"**Incomplete: {_ENDINGS[document.ending.how]}{reason}.** What was measured until then follows."
        yield ""
    if not facts.anything_measured:
        yield "**Nothing was measured.** The reasons stand below."
        return
    if facts.reference is None:
        yield "**Times only: there is no reference to compare with.**"
        return
    for overall in facts.overall:
        name, reference = markdown(overall.name), markdown(facts.reference)
        if overall.geometric_mean is None:
            yield f"**{name}: no relative speed to {reference}**, as none of its {_cells(overall.cells)} has good pairs."
        else:
            mean = f"geometric mean of {overall.good} of {_cells(overall.cells)}"
            yield f"**{name}: {overall.geometric_mean:.2f} times {reference}'s speed** ({mean})."
        yield ""
    yield "Relative speed is reference time / subject time, above 1 the subject is faster. No verdict is given here."


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"


def _speed_table(facts: Facts) -> Iterator[str]:
    if not facts.comparisons:
        return
    yield "| cell | subject | median ms | reference's | relative speed | 95 % interval | lowest - highest | pairs |"
    yield "|---|---|--:|--:|--:|:-:|:-:|--:|"
    for comparison in facts.comparisons:
        subject, reference, ratio = comparison.subject, comparison.reference, comparison.ratio
        cells = [markdown(comparison.label), markdown(subject.name), _median(subject), _median(reference)]
        if ratio is None:
            cells += [f"none: {markdown(comparison.no_ratio or '?')}", "", "", ""]
        else:
            interval = spread(*ratio.interval) if ratio.interval else "one pair only"
            cells += [f"{ratio.geometric_mean:.3f}", interval, spread(ratio.lowest, ratio.highest), str(ratio.pairs)]
        yield _row(cells)


def _median(side: Side | None) -> str:
    if side is None:
        return ""
    return milliseconds(side.times.median_ms) if side.times else side.status


def _memory_rows(facts: Facts) -> Iterator[str]:
    rows = [row for comparison in facts.comparisons for row in _memory_of(comparison)]
    if rows:
        yield "| cell | subject | kind | subject's peak | reference's peak | subject / reference |"
        yield "|---|---|---|--:|--:|--:|"
        yield from rows


def _memory_of(comparison: Comparison) -> Iterator[str]:
    for kind in MEMORY_KINDS:
        subject, reference = largest_peak(comparison.subject, kind), largest_peak(comparison.reference, kind)
        if subject is not None:
            ratio = comparison.memory_ratios.get(kind)
            yield _row(
                [
                    markdown(comparison.label),
                    markdown(comparison.subject.name),
                    kind,
                    mebibytes(subject),
                    "" if reference is None else mebibytes(reference),
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )


def largest_peak(side: Side | None, kind: str) -> int | None:
    """The peak in bytes of the side's largest rank, None where this kind is unknown."""
    return max((rank.peaks[kind] for rank in side.memory if kind in rank.peaks), default=None) if side else None


def _findings(facts: Facts) -> list[str]:
    return [f"- {markdown(finding.kind)}: {markdown(finding.message, 400)}" for finding in facts.document.findings]


def _folded(title: str, body: Iterable[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *body, "", "</details>", ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
