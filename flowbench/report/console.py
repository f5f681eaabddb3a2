"""Writes a run as plain text for a terminal: what a person wants to know, within forty lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from flowbench.judge.verdict import Change, Verdict
from flowbench.report.changes import ABOUT, SIGNS, Row, legend_of, rows_of
from flowbench.report.facts import Comparison, Disturbance, Facts, Side
from flowbench.report.headline import Tone, headline_of, spoken
from flowbench.report.style import Colour, Style
from flowbench.report.words import (
    counted,
    details_of,
    interval,
    mebibytes,
    memory_ratio,
    milliseconds,
    one_line,
    pairs_of,
    threads_of,
)

MOST_LINES = 40
_MOST_NOTES = 4
_MOST_REASONS = 5
_MOST_KINDS = 6
_WIDTH = 150
_TONES: Mapping[Tone, Colour] = {
    "worse": "red",
    "better": "green",
    "same": "bold",
    "unknown": "yellow",
    "plain": "bold",
}
_COLOURS: Mapping[Verdict, Colour] = {
    Verdict.SLOWER: "red", Verdict.LARGER: "red", Verdict.FAILED: "red", Verdict.VOID: "red", Verdict.LOST: "red",
    Verdict.FASTER: "green", Verdict.SMALLER: "green", Verdict.UNCLEAR: "yellow",
}  # fmt: skip
_STATES: Mapping[str, Colour] = {"failed": "red", "void": "red", "not measured": "yellow"}

# The cells of a line of a table, and the colour of the line's state.
_Line = tuple[list[str], Colour | None]


def write(facts: Facts, style: Style | None = None) -> str:
    """The text of `facts`; what is cut is said."""
    style = style or Style()
    headline = headline_of(facts)
    notes = _cut([spoken(note, one_line) for note in headline.notes], _MOST_NOTES, "note")
    above = [style.paint(one_line(spoken(headline.verdict, one_line), 300), _TONES[headline.tone]), *notes, ""]
    below = ["", *_below(facts)]
    table = list(_changes_lines(facts) if facts.changes else _speed_lines(facts))
    room = MOST_LINES - len(above) - len(below)
    lines = [*above, *_table(table, room, style), *below]
    return style.shown("\n".join(lines)) + "\n"


def _below(facts: Facts) -> Iterator[str]:
    if facts.changes is not None:
        rows = rows_of(facts)
        if rows:
            yield f"signs: {legend_of(rows)}."
        yield "time: median step; ratios are of pairs, not of these times. head / base above 1: head takes more."
        if facts.reference is not None:
            about = f" {ABOUT}: base had too few pairs." if any(row.has_weak_base for row in rows) else ""
            yield f"relative: reference / the side, above 1 the side is faster; in brackets head's 95 % interval.{about}"
    elif facts.reference is not None and facts.anything_measured:
        yield "ms: median step. relative: reference / subject, above 1 the subject is faster."
        yield "memory: largest peak, subject / reference, below 1 the subject needs less."
    if facts.left_out:
        yield "Not measured:"
        yield from _cut([f"  {item.what}: {item.reason}" for item in facts.left_out], _MOST_REASONS, "reason")
    if facts.disturbances:
        yield "Disturbed by:"
        yield from _cut(list(map(_disturbance_line, facts.disturbances)), _MOST_KINDS, "kind")
    protocol = facts.document.protocol
    if facts.changes is not None:
        yield from (
            one_line(f"{side}: {name.label}", _WIDTH)
            for side, name in (("base", facts.changes.base), ("head", facts.changes.head))
        )
    wanted = {"run", "commit", "flowbench's commit", "GPU" if facts.document.on_gpu else "CPU"}
    details = [(word, f"{word}: {text}") for word, text in details_of(facts.document)]
    yield from _cut([line for word, line in details if word in wanted], 4, "detail")
    yield from (line for word, line in details if word == "false alarms")
    yield (
        f"{pairs_of(facts.document)} of fresh processes, {protocol.warmup} warm-up and "
        f"{counted(protocol.steps, 'timed step')} each, {threads_of(facts.document)}"
    )


def _disturbance_line(found: Disturbance) -> str:
    more = len(found.messages) - 1
    start, end = f"  {found.kind}: ", f", and {more} more like it" if more else ""
    return f"{start}{one_line(found.messages[0], _WIDTH - len(start) - len(end))}{end}"


def _speed_lines(facts: Facts) -> Iterator[_Line]:
    host = facts.has_host_times
    heads = [
        "cell",
        "subject",
        "ms",
        *(["host ms"] if host else []),
        "reference",
        "relative",
        "95 % interval",
        "memory",
    ]
    yield heads, None
    for comparison in facts.comparisons:
        subject, ratio = comparison.subject, comparison.ratio
        states = [side.status for side in (subject, comparison.reference) if side is not None]
        yield (
            [
                one_line(comparison.label, 44),
                one_line(subject.name, 20),
                _median(subject),
                *([_host(subject)] if host else []),
                _median(comparison.reference),
                f"{ratio.geometric_mean:.2f}" if ratio else "-",
                interval(ratio.interval) if ratio else "-",
                _memory(comparison),
            ],
            next((_STATES[state] for state in states if state in _STATES), None),
        )


def _changes_lines(facts: Facts) -> Iterator[_Line]:
    yield ["", "cell", "verdict", "time, ms", "head / base", "memory, head / base", "relative"], None
    for row in rows_of(facts):
        yield (
            [
                SIGNS[row.worst],
                f"{one_line(row.label, 52)} {one_line(row.name, 20)}",
                row.words,
                _ends(row.time.base, row.time.head) if row.time else "-",
                _change(row.time.change if row.time else None),
                _memory_change(row),
                f"{row.speeds} ({row.speeds_interval})" if row.speeds else "-",
            ],
            _COLOURS.get(row.worst),
        )


def _table(lines: Sequence[_Line], room: int, style: Style) -> list[str]:
    """The lines that have room, in columns: texts to the left, from the first figure on to the right."""
    if len(lines) < 2:
        return ["No cells."]
    shown = lines if len(lines) <= room else lines[: room - 1]
    left = 3 if lines[0][0][0] == "" else 2
    widths = [max(len(cells[column]) for cells, _ in shown) for column in range(len(lines[0][0]))]
    written = []
    for cells, colour in shown:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        written.append(style.paint("  ".join(padded).rstrip(), colour))
    more = len(lines) - len(shown)
    return [*written, f"… and {counted(more, 'more cell')}: see the other formats"] if more else written


def _memory(comparison: Comparison) -> str:
    ratio, peak = comparison.telling_memory
    return f"{ratio:.2f}" if ratio else mebibytes(peak) if peak is not None else "-"


def _median(side: Side | None) -> str:
    if side is None:
        return "-"
    return milliseconds(side.times.median_ms) if side.times else side.status


def _host(side: Side) -> str:
    return milliseconds(side.times.host_ms) if side.times and side.times.host_ms else "-"


def _ends(base: float | None, head: float | None) -> str:
    return " → ".join("-" if value is None else milliseconds(value) for value in (base, head))


def _change(change: Change | None) -> str:
    if change is None:
        return "-"
    return f"{change.ratio:.3f} ({interval(change.interval)})"


def _memory_change(row: Row) -> str:
    if not row.memory or row.memory[0].base is None or row.memory[0].head is None:
        return "-"
    one = row.memory[0]
    return memory_ratio(one.change.ratio) if one.change else row.sizes


def _cut(lines: list[str], most: int, what: str) -> list[str]:
    shown = [" " * (len(line) - len(line.lstrip())) + one_line(line, _WIDTH) for line in lines[:most]]
    return shown + ([f"  … and {counted(len(lines) - most, f'more {what}')}"] if len(lines) > most else [])
