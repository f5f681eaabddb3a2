"""What `flowbench compare` does: measures two refs in one sitting, or reads two documents, and reports the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

import flowbench
from flowbench.commands.limits import limits_text as read_limits
from flowbench.commands.noise import sure_floors, sure_shifts
from flowbench.commands.running import OUT, check_place, interruptible, report_places, write_reports
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.judge.compare import judge_document, matched_sides
from flowbench.judge.documents import judge_documents
from flowbench.judge.explanation import worse_cells
from flowbench.judge.limits import check_limits, check_patterns, parse_limits
from flowbench.judge.verdict import ComparisonSet
from flowbench.measure.comparison_session import Place, run_comparison
from flowbench.measure.plan import Request
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.profiling import profile_cells
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.refs import WORKING_TREE, placed_sides
from flowbench.measure.resumption import check_resumable, check_same_sides, resumed_protocol, whole_pairs
from flowbench.measure.wire import job_of
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.machine import read_machine
from flowbench.record.noise import NoiseFloor, read_floors
from flowbench.record.run import RunDocument, Side
from flowbench.report import profiles
from flowbench.report.words import counted, one_line

_MOST_REASONS = 5

NO_BASE = (
    "no BASE was given, expected a git ref or a run document before all options (some take several values), or --resume"
)

# The repository whose refs are compared: the one this harness is part of.
REPOSITORY = Path(flowbench.__file__).parent.parent


def compare(
    base: str | None,
    head: str | None,
    request: Request,
    out: Path | None,
    command: Sequence[str],
    *,
    limits: Path | None = None,
    force: bool = False,
    resume: Path | None = None,
    unclear_exit_code: int = 2,
) -> tuple[int, str]:
    """Compare two refs (head None: the working tree) or two documents; returns the exit status and the report for people.

    Refs are measured into the folder `out` (None: the usual one). `resume` is the document of a comparison of refs that was
    stopped: it is gone on with. `unclear_exit_code` is the status
    where nothing but an `unclear` keeps it from 0.
    """
    limits_text = read_limits(limits)
    if limits_text is not None:  # before anything is measured
        _check_apart(Path(limits_text[1]), resume)
        taken = {limit.exit_code for limit in parse_limits(*limits_text)}
        if unclear_exit_code in taken - {1}:
            raise FlowbenchError(
                f"exit code {unclear_exit_code} was given for what is unclear, but a limit of {limits_text[1]} has it too:"
                " give another one"
            )
    comparison, text = _compared(base, head, request, out, command, limits_text, force, resume)
    return unclear_exit_code if comparison.is_only_unclear else comparison.exit_code, text


def stopped_comparison(path: Path, base: str | None = None, head: str | None = None) -> tuple[str, str | None]:
    """The two refs of the comparison at `path` (None: the working tree); FlowbenchError where it is over."""
    document = read_document(path)
    plan = document.comparison
    if plan is None:
        raise FlowbenchError(f"{path} is of a run with one side: go on with flowbench run --resume {path}")
    asked = (plan.base.asked, None if plan.head.asked == WORKING_TREE else plan.head.asked)
    if base is not None and (base, head) != asked:
        raise FlowbenchError(
            f"{path} compares {plan.base.asked!r} with {plan.head.asked!r}, asked for {base!r} with {head or WORKING_TREE!r}:"
            " leave BASE and HEAD out, or start a new comparison without --resume"
        )
    if document.ending.how in ("complete", "wall_cap"):
        state = "is complete" if document.ending.how == "complete" else f"has ended ({document.ending.reason})"
        # To go on until a verdict pleases would raise the rate of false alarms.
        raise FlowbenchError(
            f"{path} {state}, and its verdicts stand: flowbench compare {path} shows them; a longer one is a new comparison"
        )
    return asked


def why(comparison: ComparisonSet) -> list[str]:
    """Why sampling ended, and the reasons of the first times that are not judged: lines under a report."""
    open_ones = [time for time in comparison.times if not time.verdict.is_judged]
    lines = [f"sampling: {comparison.stopping}"]
    lines += [f"{time.verdict}: {time.label} {time.engine}: {time.reason}" for time in open_ones[:_MOST_REASONS]]
    if len(open_ones) > _MOST_REASONS:
        lines.append(f"… and {len(open_ones) - _MOST_REASONS} more that are not judged")
    return [one_line(line, 400) for line in lines]


def judged(document: RunDocument, limits_text: tuple[str, str] | None = None) -> ComparisonSet:
    """The verdicts of a sitting of two sides, with the limits checked where there are any."""
    return _limited(judge_document(document), limits_text)


def measured(
    base: str,
    head: str | None,
    request: Request,
    out: Path | None,
    command: Sequence[str],
    limits_text: tuple[str, str] | None = None,
    resume: Path | None = None,
) -> tuple[Path, RunDocument]:
    """Measure both sides in one sitting, and profile what is worse; returns the document and where it is kept.

    `resume` is the document of such a sitting that was stopped, of the same sides. FlowbenchError, before anything is
    measured, where it is of others, and for limits whose patterns match no cell.
    """
    path = found = None
    if resume is not None:
        resume = store.followed(resume)
        check_place(resume, out)
    try:
        with interruptible(), placed_sides(REPOSITORY, base, head) as (base_side, head_side):
            document, found = begun(resume, request, command, base_side.side, head_side.side, limits_text)
            places = {
                "base": Place(base_side.import_path),
                "canary": Place(base_side.import_path),
                "head": Place(head_side.import_path),
            }
            path = resume or store.create(out or OUT, document)
            click.echo(f"run document: {path}", err=True)
            with ProgressDisplay(document) as display:
                document = run_comparison(path, document, places, display, found)
            return path, _profiled(path, document, places)
    except store.WriteError as error:
        if path is None:
            raise
        if document.ending.how != "running":
            raise FlowbenchError(f"{error.what}; all was measured: flowbench compare {path} judges it") from None
        raise FlowbenchError(
            f"{error.what}; what was measured is in {path}: flowbench compare --resume {path} goes on"
        ) from None
    except KeyboardInterrupt:
        if path is None:
            raise Interrupted("interrupted before anything was measured") from None
        if document.ending.how != "running":
            raise Interrupted(
                f"interrupted; all was measured, only profiles are missing: flowbench compare {path} judges it"
            ) from None
        raise Interrupted(
            f"interrupted; what was measured is in {path}: flowbench compare {path} judges it,"
            f" flowbench compare --resume {path} goes on"
        ) from None


def _check_apart(limits: Path, resume: Path | None) -> None:
    """FlowbenchError where a report of the document that is gone on with would take the place of the limits."""
    for place in report_places(store.followed(resume)) if resume is not None else ():
        if store.is_same_file(limits, place):
            raise FlowbenchError(
                f"{limits} has the limits, and a report of {resume} would take its place: give it another name"
            )


def _compared(
    base: str | None,
    head: str | None,
    request: Request,
    out: Path | None,
    command: Sequence[str],
    limits_text: tuple[str, str] | None,
    force: bool,
    resume: Path | None,
) -> tuple[ComparisonSet, str]:
    if resume is not None:
        begun = stopped_comparison(resume, base, head)
        return _reported(*measured(*begun, request, out, command, limits_text, resume), limits_text)
    if base is None:
        raise FlowbenchError(NO_BASE)
    if Path(base).is_file() and (head is None or Path(head).is_file()):
        if request != Request():
            raise FlowbenchError("two documents are compared as they are: options of a measurement have no place here")
        if out is not None:
            raise FlowbenchError(
                f"documents are compared without writing anything: leave --out {out} out; flowbench report --out FILE writes"
            )
        return _compare_documents(Path(base), Path(head) if head else None, limits_text, force)
    for given, other in ((base, head), (head, base)):
        if given and Path(given).is_file():
            raise FlowbenchError(f"{given} is a file and {other!r} is none: give two run documents, or two git refs")
    return _reported(*measured(base, head, request, out, command, limits_text), limits_text)


def begun(
    resume: Path | None,
    request: Request,
    command: Sequence[str],
    base: Side,
    head: Side,
    limits_text: tuple[str, str] | None,
) -> tuple[RunDocument, RunDocument | None]:
    """The document that a sitting begins with, and what `resume` holds, where that is gone on with."""
    found = None
    if resume is None:
        document = _planned(request, command, base, head)
    else:
        found = read_document(resume)
        document = _resumed(found, resume, request, base, head)
    if limits_text is not None:
        names = [match.name for match in matched_sides(document)]
        check_patterns(parse_limits(*limits_text), names, limits_text[1])
    return document, found


def _planned(request: Request, command: Sequence[str], base: Side, head: Side) -> RunDocument:
    known = read_floors(read_machine())
    document = plan_comparison(request, command, base, head, sure_floors(known), sitting_shifts=sure_shifts(known))
    return with_false_alarms(document, known.values())


def _resumed(document: RunDocument, path: Path, request: Request, base: Side, head: Side) -> RunDocument:
    check_same_sides(document, base, head, str(path))
    check_resumable(document, request, str(path))
    return whole_pairs(replace(document, protocol=resumed_protocol(document, request)))


def _reported(path: Path, document: RunDocument, limits_text: tuple[str, str] | None) -> tuple[ComparisonSet, str]:
    comparison = judged(document, limits_text)
    try:
        text = write_reports(path, document, comparison)
    except store.WriteError as error:
        raise FlowbenchError(f"{error.what}; all was measured: flowbench compare {path} judges it") from None
    return comparison, "\n".join([text, *why(comparison), *profiles.changes(document, comparison)])


def _profiled(path: Path, document: RunDocument, places: Mapping[str, Place]) -> RunDocument:
    """The document with profiles of both sides of what is worse, the worst first; a pass of its own, after all samples."""
    cells = worse_cells(document)
    if not cells:
        return document
    compared = counted(len({(cell.case, document.engine(cell.engine).registered_name) for cell in cells}), "cell")
    click.echo(f"profiling {compared} on both sides: what changed in what is slower or larger", err=True)
    jobs = [
        replace(job_of(document, cell), import_path=places[document.engine(cell.engine).side or "base"].import_path)
        for cell in cells
    ]
    profiles, missing = profile_cells(jobs, document.run_id)
    document = replace(document, profiles=profiles, not_measured=(*document.not_measured, *missing))
    with store.held(path):
        store.replace(path, document)
    return document


def with_false_alarms(document: RunDocument, floors: Iterable[NoiseFloor]) -> RunDocument:
    """The document with how often the machine called one commit changed, so that whoever reads it alone can say so."""
    plan, known = document.comparison, list(floors)
    if plan is None:
        return document
    sittings, alarms = sum(floor.sittings for floor in known), sum(floor.alarms for floor in known)
    return replace(document, comparison=replace(plan, aa_sittings=sittings, aa_alarms=alarms))


def _compare_documents(
    base: Path, head: Path | None, limits_text: tuple[str, str] | None, force: bool
) -> tuple[ComparisonSet, str]:
    from flowbench.commands.reporting import terminal_style
    from flowbench.report import render

    one, style = read_document(base), terminal_style()
    if head is None:
        if one.comparison is None:
            raise FlowbenchError(
                f"{base} is of a run with one side: give a second document to compare it with, or two git refs"
            )
        comparison = judged(one, limits_text)
        text = render(one, "console", comparison=comparison, style=style).rstrip("\n")
        return comparison, "\n".join([text, *why(comparison)])
    other = read_document(head)
    comparison = judge_documents(one, other, force=force, noise_floors=sure_floors(read_floors(one.machine)))
    if comparison.differences and not force:
        raise FlowbenchError(
            f"{base} and {head} were measured on unlike machines ({'; '.join(comparison.differences)}): measure both sides in"
            " one sitting (flowbench compare BASE HEAD), or look at them side by side with --force"
        )
    comparison = _limited(comparison, limits_text)
    text = render(other, "console", comparison=comparison, style=style).rstrip("\n")
    return comparison, "\n".join([text, *why(comparison)])


def _limited(comparison: ComparisonSet, limits_text: tuple[str, str] | None) -> ComparisonSet:
    if limits_text is None:
        return comparison
    limits = parse_limits(*limits_text)
    return replace(comparison, limits=check_limits(limits, comparison, limits_text[1]))
