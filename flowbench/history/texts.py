"""A history as a table for people, and as JSON and CSV for other tools; imported points stand apart from measured ones."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence

from flowbench.judge.series import STEP_TIME, Series, SeriesPoint, Shift
from flowbench.report.words import counted, interval, mebibytes, milliseconds, one_line

_COMMIT_DIGITS = 10
# The kind of memory a table shows: the first that the series has.
_KINDS = ("peak allocated", "peak reserved", "peak resident")
_IMPORTED = "Imported from old Speed stats comments; not measured by flowbench, and not comparable with measured ones:"


def table(series: Sequence[Series]) -> str:
    """One block per cell and machine, a line per run, and a line where a level shifts."""
    blocks = ["\n".join(_block(one)) for one in series if not one.imported]
    imported = ["\n".join(_block(one)) for one in series if one.imported]
    if imported:
        blocks += [_IMPORTED, *imported]
    return "\n\n".join(blocks)


def as_json(series: Sequence[Series]) -> str:
    """All of it, for other tools."""
    trees = [dataclasses.asdict(one) for one in series]
    return json.dumps({"schema": "flowbench.history", "schema_version": 1, "series": trees}, indent=1, allow_nan=False)


def as_csv(series: Sequence[Series]) -> str:
    """One row per point; `shift` says where a level of the step time begins: `before > after` in ms."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    kinds = sorted({kind for one in series for point in one.points for kind in point.peaks})
    names = ["origin", "cell", "label", "machine", "when", "source", "commit", "dirty", "status", "time_ms", "low_ms"]
    names += ["high_ms", "relative_speed", "relative_speed_low", "relative_speed_high"]
    names += [*(f"{kind.replace(' ', '_')}_bytes" for kind in kinds), "shift"]
    writer.writerow(names)
    for one in series:
        shifts = {shift.index: f"{shift.before} > {shift.after}" for shift in one.shifts if shift.quantity == STEP_TIME}
        for index, point in enumerate(one.points):
            origin = "imported" if one.imported else "measured"
            row: list[object] = [origin, one.cell, one.label, one.machine, point.when, point.source, point.commit]
            row += (point.dirty, point.status, point.time_ms, point.low_ms, point.high_ms, point.relative_speed)
            row += point.relative_interval or (None, None)
            row += (*(point.peaks.get(kind) for kind in kinds), shifts.get(index))
            writer.writerow(map(_inert, row))
    return file.getvalue().rstrip("\n")


def _inert(cell: object) -> object:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell


def _block(one: Series) -> Iterator[str]:
    kind = next((kind for kind in _KINDS if any(kind in point.peaks for point in one.points)), None)
    yield one_line(one.label)
    yield f"  on {one_line(one.machine)}, {counted(len(one.points), 'point')}"
    header = f"  {'when':16}  {'ms':>9}  {'range':>19}  {'speed':>6}"
    header += "" if one.imported else f"  {'95 % interval':>13}"
    yield header + (f"  {kind:>14}" if kind else "") + f"  {'from' if one.imported else 'commit'}"
    for index, point in enumerate(one.points):
        yield from (_shift_line(shift) for shift in one.shifts if shift.index == index)
        yield _point_line(point, kind, imported=one.imported)


def _point_line(point: SeriesPoint, kind: str | None, *, imported: bool) -> str:
    when = one_line(point.when).replace("T", " ")[:16] if point.when else "date unknown"
    time = milliseconds(point.time_ms) if point.time_ms else point.status
    spread = f"{milliseconds(point.low_ms)} - {milliseconds(point.high_ms)}" if point.low_ms and point.high_ms else ""
    speed = f"{point.relative_speed:.2f}" if point.relative_speed else ""
    line = f"  {when:16}  {time:>9}  {spread:>19}  {speed:>6}"
    if not imported:  # a comment does not tell its pairs
        line += f"  {interval(point.relative_interval) if point.relative_speed else '':>13}"
    if kind:
        peak = point.peaks.get(kind)
        line += f"  {mebibytes(peak) if peak is not None else '':>14}"
    if point.commit:
        return line + f"  {one_line(point.commit)[:_COMMIT_DIGITS]}{' (dirty)' if point.dirty else ''}"
    return line + f"  {one_line(point.source, 90)}"


def _shift_line(shift: Shift) -> str:
    change = 100 * (shift.ratio - 1)
    word = milliseconds if shift.quantity == STEP_TIME else mebibytes
    unit = " ms" if shift.quantity == STEP_TIME else ""
    return f"  ---- {shift.quantity} {change:+.1f} % from here: {word(shift.before)} -> {word(shift.after)}{unit}"
