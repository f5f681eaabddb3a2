"""What `flowbench explain` does: shows a cell's profile, and what changed between its two sides; profiles where need be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from flowbench.cell import Cell
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.explanation import explain
from flowbench.judge.series import fits
from flowbench.judge.verdict import Comparison
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument, SidesCompared
from flowbench.report.profiles import changed, profile_lines
from flowbench.report.words import one_line


def show(path: Path, pattern: str, keep: bool) -> str:
    """The text for one cell of the document at `path`; profiled now, on this machine, where the document has no profile of it.

    With `keep` the new profile is written into the document, which is held against other writers as long as that takes. Raises
    FlowbenchError for a pattern that fits no cell, or several.
    """
    from flowbench.record import store

    document = read_document(path)
    cells = _sides(document, pattern, str(path))
    if any(document.profile_of(cell) is None for cell in cells):
        without = "leave --keep out to see the profile alone"
        with store.way_out(without), store.held(path) if keep else nullcontext():
            document = read_document(path)  # as it is now that it is held
            missing = [cell for cell in cells if document.profile_of(cell) is None]
            document = _profiled(document, missing, str(path))
            if keep:
                store.replace(path, document)
    profiles = [profile for cell in cells if (profile := document.profile_of(cell)) is not None]
    lines = [line for cell, profile in zip(cells, profiles, strict=True) for line in profile_lines(cell, profile)]
    if len(profiles) == 2:
        lines += ["", *changed(explain(*profiles), _time_of(document, cells[0]))]
    return "\n".join(lines)


def _time_of(document: RunDocument, cell: Cell) -> Comparison | None:
    """What was judged of the time of a cell's two sides."""
    if document.comparison is None:
        return None
    return judge_document(document).time_of(cell.case, document.engine(cell.engine).registered_name)


def _sides(document: RunDocument, pattern: str, source: str) -> list[Cell]:
    """The cell that fits, or base's and head's where the document compares two sides, also where the reference fits too."""
    found = [cell for cell in document.cells if fits(pattern, cell.key, cell.label)]
    exact = [cell for cell in found if pattern in (cell.key, cell.label)]
    fitting = exact or [cell for cell in found if document.engine(cell.engine).side] or found
    by_side = {document.engine(cell.engine).side: cell for cell in fitting}
    if len({(cell.case, document.engine(cell.engine).registered_name) for cell in fitting}) == 1:
        sides = [by_side[side] for side in ("base", "head") if side in by_side]
        return sides or [*by_side.values()]
    labels = dict.fromkeys(
        Cell.of(cell.case, document.engine(cell.engine).registered_name).label for cell in found or document.cells
    )
    known = "; ".join(map(one_line, [*labels][:8]))
    what = "several cells fit" if found else "no cell fits"
    raise FlowbenchError(f"{source}: {what} {pattern!r}: {known}; give one of these labels")


def _profiled(document: RunDocument, cells: list[Cell], source: str) -> RunDocument:
    """The document with profiles of `cells`, taken now; FlowbenchError where they would be of something else."""
    from flowbench.measure.plan import Request
    from flowbench.measure.profiling import profile_cell
    from flowbench.measure.resumption import check_resumable
    from flowbench.measure.wire import job_of
    from flowbench.record.machine import read_machine

    jobs = [job_of(document, cell) for cell in cells]
    if document.comparison is None:
        check_resumable(document, Request(), source, "profiled")
        profiles = [profile_cell(job, document.run_id) for job in jobs]
    else:
        differences = document.machine.differences(read_machine())
        if differences:
            raise FlowbenchError(f"{source} cannot be profiled here (then / now): {'; '.join(differences)}")
        with _sides_of(document.comparison, source) as import_paths:
            placed = [replace(job, import_path=import_paths.get(job.side or "")) for job in jobs]
            profiles = [profile_cell(job, document.run_id) for job in placed]
    return replace(document, profiles=(*document.profiles, *profiles))


@contextmanager
def _sides_of(comparison: SidesCompared, source: str) -> Iterator[dict[str, str]]:
    """Both sides, checked out as they were measured; FlowbenchError where one was a working tree with changes of its own."""
    import flowbench
    from flowbench.measure.refs import placed_sides

    commits = []
    for side in (comparison.base, comparison.head):
        if side.git is None or side.git.dirty:
            raise FlowbenchError(f"{source} cannot be profiled: {side.asked} had uncommitted changes, and is gone")
        commits.append(side.git.commit)
    with placed_sides(Path(flowbench.__file__).parent, *commits) as (base, head):
        yield {"base": base.import_path, "canary": base.import_path, "head": head.import_path}
