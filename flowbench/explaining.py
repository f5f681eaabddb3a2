"""What `flowbench explain` does: shows a cell's profile, and what changed between its two sides; profiles where need be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flowbench.cell import Cell
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.explanation import MOST_SHOWN, Explanation, Moved, explain
from flowbench.judge.series import fits
from flowbench.record.document import read_document
from flowbench.record.profile import Profile
from flowbench.record.run import RunDocument, SidesCompared
from flowbench.report.words import milliseconds, one_line

# Of more cells that are slower or larger only the worst are looked into: each costs two processes.
_MOST_PROFILED = 4


def show(path: Path, pattern: str, keep: bool) -> str:
    """The text for one cell of the document at `path`; profiled now, on this machine, where the document has no profile of it.

    With `keep` the new profile is written into the document. Raises FlowbenchError for a pattern that fits no cell, or several.
    """
    document = read_document(path)
    cells = _sides(document, pattern, str(path))
    missing = [cell for cell in cells if document.profile_of(cell) is None]
    if missing:
        document = _profiled(document, missing, str(path))
        if keep:
            from flowbench.record import store

            with store.held(path):
                store.replace(path, document)
    profiles = [profile for cell in cells if (profile := document.profile_of(cell)) is not None]
    lines = [line for cell, profile in zip(cells, profiles, strict=True) for line in _one(cell, profile)]
    if len(profiles) == 2:
        lines += ["", *changed(explain(*profiles))]
    return "\n".join(lines)


def worse_cells(document: RunDocument) -> list[Cell]:
    """Base's and head's cells of what is slower or larger in a document of two sides, the worst first, a few at most."""
    comparisons = [one for one in judge_document(document).comparisons if one.verdict.is_regression]
    comparisons.sort(key=lambda one: -(one.change.ratio if one.change else 1.0))
    wanted = [*dict.fromkeys((one.case, one.engine) for one in comparisons)][:_MOST_PROFILED]
    found = []
    for case, engine in wanted:
        for side in ("base", "head"):
            found += [cell for cell in document.cells_of(case) if _stands_for(document, cell) == (engine, side)]
    return found


def changes(document: RunDocument) -> Iterator[str]:
    """What changed in each cell that has profiles of both sides, in words."""
    for case in document.cases:
        sides = {_stands_for(document, cell): document.profile_of(cell) for cell in document.cells_of(case)}
        for (engine, side), head in sides.items():
            base = sides.get((engine, "base"))
            if side == "head" and head is not None and base is not None:
                yield f"\n{one_line(case.label)} {one_line(engine)}"
                yield from changed(explain(base, head))


def _stands_for(document: RunDocument, cell: Cell) -> tuple[str, str | None]:
    engine = document.engine(cell.engine)
    return engine.registered_name, engine.side


def changed(explanation: Explanation) -> Iterator[str]:
    """What changed, in words."""
    base_ms, head_ms = explanation.step_ms
    yield f"what changed from base to head (profiled step: {milliseconds(base_ms)} -> {milliseconds(head_ms)} ms):"
    yield from _moves("ops whose time moved most, ms", explanation.ops, milliseconds)
    if explanation.peak_bytes is not None:
        base, head = explanation.peak_bytes
        yield f"peak: {_size(base)} -> {_size(head)}"
        yield from _moves("tensors alive at the peak that differ", explanation.tensors, _size)


def _moves(title: str, moves: tuple[Moved, ...], word: Callable[[float], str]) -> Iterator[str]:
    yield f"  {title}:" if moves else f"  {title}: none"
    for one in moves:
        unlisted = f"< {word(one.unlisted_below)}" if one.unlisted_below is not None else "none"
        base, head = (unlisted if side is None else word(side) for side in (one.base, one.head))
        sign = "+" if one.least_change > 0 else "-"
        yield f"    {base:>12} -> {head:>12}  {sign}{word(abs(one.least_change))}  {_name(one.op, one.shape, one.module)}"


def _one(cell: Cell, profile: Profile) -> Iterator[str]:
    yield f"{one_line(cell.label)}: one step op by op, {milliseconds(profile.step_ms)} ms (slower than a timed step)"
    for op in profile.ops[:MOST_SHOWN]:
        share = 100 * op.total_ms / profile.ops_ms if profile.ops_ms else 0.0
        name = _name(op.op, op.shape, op.module)
        yield f"  {milliseconds(op.total_ms):>9} ms  {share:4.1f} %  {op.calls:>3} x  {name}"
    if profile.peak_bytes is not None:
        yield f"peak: {_size(profile.peak_bytes)}, {milliseconds(profile.peak_at_ms or 0.0)} ms into the step"
    for tensor in profile.tensors[:MOST_SHOWN]:
        name = _name(tensor.op, tensor.shape, tensor.module)
        yield f"  {_size(tensor.total_bytes):>9}  {tensor.count:>4} x  {name}"
    for text in profile.missing:
        yield f"not available: {one_line(text)}"


def _size(nbytes: float) -> str:
    """Bytes as people write them."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.1f} {units[0]}"


def _name(op: str, shape: str, module: str) -> str:
    return one_line(f"{op} {shape}".strip() + (f" in {module}" if module else ""))


def _sides(document: RunDocument, pattern: str, source: str) -> list[Cell]:
    """The cell that fits, or base's and head's where the document compares two sides."""
    found = [cell for cell in document.cells if fits(pattern, cell.key, cell.label)]
    exact = [cell for cell in found if pattern in (cell.key, cell.label)]
    by_side = {document.engine(cell.engine).side: cell for cell in exact or found}
    if len({(cell.case, document.engine(cell.engine).registered_name) for cell in exact or found}) == 1:
        sides = [by_side[side] for side in ("base", "head") if side in by_side]
        return sides or [*by_side.values()]
    known = "; ".join(one_line(cell.label) for cell in [*(found or document.cells)][:8])
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
        check_resumable(document, Request(), source)
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
