"""The history of what was measured: reads a store, finds where levels shifted, and takes in old comments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowbench.archive.folder import Archive, Contents
from flowbench.errors import FlowbenchError
from flowbench.history import imported, texts
from flowbench.judge.change_points import unavailable
from flowbench.judge.series import Series, chosen, imported_series, measured_series, with_shifts
from flowbench.report.words import counted

FORMATS = {"table": texts.table, "json": texts.as_json, "csv": texts.as_csv}


def read(folder: Path, cell: str | None = None, machine: str | None = None) -> tuple[Series, ...]:
    """The series of the store at `folder`, measured ones first; with their shifts where ruptures is installed."""
    return _series(Archive(folder).contents(), cell, machine)


def show(folder: Path, cell: str | None, machine: str | None, form: str) -> tuple[str, list[str]]:
    """The history as text, and what has to be said beside it; raises FlowbenchError where there is none."""
    contents = Archive(folder).contents()
    notes = [f"{stranger.path}: left alone: {stranger.reason}" for stranger in contents.strangers]
    if not contents.entries and not contents.imported:
        aside = f" ({counted(len(notes), 'file')} there could not be read, the first: {notes[0]})" if notes else ""
        raise FlowbenchError(
            f"{folder} holds no run and nothing imported{aside}; put runs there with flowbench store add DOCUMENT…,"
            " or take them from a git branch with flowbench store pull"
        )
    series = _series(contents, cell, machine)
    if not series:
        asked = " and ".join(f"--{name} {given!r}" for name, given in (("cell", cell), ("machine", machine)) if given)
        known = sorted({one.label for one in _series(contents, None, None)})
        raise FlowbenchError(
            f"nothing in {folder} fits {asked}; it has {'; '.join(known[:5])}, {len(known)} cells in all"
        )
    reason = unavailable()
    if reason is not None:
        notes.append(f"change points are not shown: {reason}")
    return FORMATS[form](series), notes


def import_files(
    folder: Path, files: Sequence[tuple[str, str]], date: str | None, gpu: str | None
) -> tuple[str, list[str]]:
    """Take in files (name, text); returns what was taken, and remarks. All of them are read before one is kept."""
    read_ones = [(name, imported.read(text, name, date, gpu)) for name, text in files]
    archive = Archive(folder)
    lines: list[str] = []
    remarks: list[str] = []
    for name, one in read_ones:
        remarks += [remark if remark.startswith(name) else f"{name}: {remark}" for remark in one.remarks]
        if not one.points:
            lines.append(f"{name}: nothing to import")
            continue
        is_new = archive.add_imported(one.digest, one.points)
        cells = len({(point.label, point.machine) for point in one.points})
        what = f"{counted(len(one.points), 'point')} of {counted(cells, 'cell')} from {counted(one.comments, 'text')}"
        lines.append(f"{name}: {what}" + ("" if is_new else "; they were there already"))
    return "\n".join(lines), remarks


def _series(contents: Contents, cell: str | None, machine: str | None) -> tuple[Series, ...]:
    series = (*measured_series(contents.points), *imported_series(contents.imported))
    found = chosen(series, cell, machine)
    return tuple(map(with_shifts, found)) if unavailable() is None else found
