"""What `flowbench run` does: plans or resumes a sitting, measures it, prints and writes its reports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from flowbench.errors import FlowbenchError, Interrupted
from flowbench.judge.verdict import ComparisonSet
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.progress import ProgressDisplay, duration
from flowbench.measure.resumption import check_resumable, resumed_protocol, whole_rounds
from flowbench.measure.schedule import estimate_s
from flowbench.measure.session import given_up, run_session
from flowbench.presets import PRESETS
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument
from flowbench.report.words import counted

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Where documents are written where nothing else is asked for.
OUT = Path("reports/out")

# Of fewer pairs, where more were planned, nothing can be told.
_LEAST_PAIRS = 2

# What is written beside the document: suffix and format.
REPORTS = ((".txt", "speed-stats"), (".md", "markdown"), (".html", "html"))


def run(request: Request, resume: Path | None, out: Path | None, command: Sequence[str]) -> tuple[int, str]:
    """Measure, write the reports beside the document; returns the exit status and the report for people.

    A new document lies in the folder `out` (None: the usual one); `resume` is gone on with where it lies.
    """
    path = None
    try:
        with interruptible():
            path, document, found = _prepare(request, resume, out, command)
            click.echo(f"run document: {path}", err=True)
            with ProgressDisplay(document) as display:
                document = run_session(path, document, display, found)
            text = "\n".join([write_reports(path, document), *_unreached(path, document)])
    except KeyboardInterrupt:
        if path is None:
            raise Interrupted("interrupted before anything was measured") from None
        if document.ending.how == "complete":
            raise Interrupted(f"interrupted; all was measured, see it with: flowbench report {path}") from None
        raise Interrupted(
            f"interrupted; what was measured is in {path}, go on with: flowbench run --resume {path}"
        ) from None
    except store.WriteError as error:
        if path is None:
            raise
        if document.ending.how == "complete":
            raise FlowbenchError(f"{error.what}; all was measured, see it with: flowbench report {path}") from None
        raise FlowbenchError(
            f"{error.what}; what was measured is in {path}, go on with: flowbench run --resume {path}"
        ) from None
    return exit_status(document), text


def dry_run(request: Request, resume: Path | None, command: Sequence[str]) -> str:
    """The cells and the estimated time, as text."""
    document = _resumed(request, resume)[1] if resume else plan_run(request, command)
    protocol = document.protocol
    steps = protocol.steps + protocol.warmup
    lines = [
        f"preset {document.preset}: {PRESETS[document.preset].summary}" if document.preset in PRESETS else "no preset"
    ]
    lines.append(
        f"{counted(protocol.pairs, 'pair')} x ({protocol.warmup} warm-up + {protocol.steps} timed) steps, "
        f"{counted(protocol.threads, 'thread')}, "
        f"reference: {document.reference or 'none'}"
    )
    done = {(sample.cell, sample.pair) for sample in document.samples}
    lost, total_s = given_up(document.samples), 0.0
    for cell in document.cells:
        missing = sum((cell.key, pair) not in done for pair in range(protocol.pairs)) if cell.key not in lost else 0
        total_s += missing * estimate_s(cell, steps)
        lines.append(
            f"  {cell.label}: {counted(missing, 'process', 'processes')}, about {duration(missing * estimate_s(cell, steps))}"
        )
    lines += remarks(document)
    lines.append(f"{counted(len(document.cells), 'cell')}, about {duration(total_s)} on a quiet machine")
    return "\n".join(lines)


def remarks(document: RunDocument) -> list[str]:
    """What the plan leaves out, and what else it has to say: indented lines."""
    lines = [f"  not measured: {left_out.what}: {left_out.reason}" for left_out in document.not_measured]
    return lines + [f"  note: {finding.message}" for finding in document.findings if finding.cell is None]


def exit_status(document: RunDocument) -> int:
    """0 where nothing failed or is void and every cell was measured, twice at least where several pairs were planned, else 2.

    As in a comparison, a cap that leaves fewer pairs is no failure; that it leaves too few to tell anything from is.
    """
    taken = Counter(sample.cell for sample in document.samples)
    least = min(_LEAST_PAIRS, document.protocol.pairs)
    whole = all(sample.status == "ok" for sample in document.samples)
    return 0 if whole and all(taken[cell.key] >= least for cell in document.cells) else 2


def write_reports(path: Path, document: RunDocument, comparison: ComparisonSet | None = None) -> str:
    """Write the reports beside the document at `path`; returns the one for people, with the names of the files."""
    from flowbench.commands.reporting import terminal_style
    from flowbench.report import grid, render, templating
    from flowbench.report.facts import facts_of

    missing = templating.unavailable()
    written = [path]
    for place, form in report_places(path).items():
        if form not in templating.FORMATS or missing is None:
            store.write_whole(place, render(document, form, comparison=comparison))
            written.append(place)
    said = [
        render(document, "console", comparison=comparison, style=terminal_style()).rstrip("\n"),
        *(["", grid.write(facts_of(document))] if document.preset == "seed" else []),
        "written: " + ", ".join(map(str, written)),
    ]
    return "\n".join([*said, *([f"no Markdown, no HTML: {missing}"] if missing else [])])


def report_places(path: Path) -> dict[Path, str]:
    """Where the reports of the document at `path` are written, with their formats: never in its own place."""
    name = path.stem if path.suffix == ".json" else path.name
    return {path.with_name(f"{name}{suffix}"): form for suffix, form in REPORTS}


def check_place(resume: Path, out: Path | None) -> None:
    """FlowbenchError where a document that is gone on with lies elsewhere than in the folder asked for."""
    if out is not None and os.path.realpath(out) != os.path.realpath(resume.parent):
        raise FlowbenchError(f"{resume} is gone on with where it lies: leave --out {out} out, or move it there first")


def _prepare(
    request: Request, resume: Path | None, out: Path | None, command: Sequence[str]
) -> tuple[Path, RunDocument, RunDocument | None]:
    if resume is not None:
        path, document, found = _resumed(request, resume)
        check_place(path, out)
        return path, document, found
    document = plan_run(request, command)
    return store.create(out or OUT, document), document, None


def _resumed(request: Request, path: Path) -> tuple[Path, RunDocument, RunDocument]:
    """The file itself, the document as it may be gone on with, and as it was found."""
    path = store.followed(path)
    document = found = read_document(path)
    if document.comparison is not None:
        raise FlowbenchError(f"{path} is of a comparison: go on with flowbench compare --resume {path}")
    if document.ending.how == "complete":
        raise FlowbenchError(f"{path} is complete: nothing is missing; see it with: flowbench report {path}")
    check_resumable(document, request, str(path))
    document = dataclasses.replace(document, protocol=resumed_protocol(document, request))
    return path, whole_rounds(document), found


def _unreached(path: Path, document: RunDocument) -> Iterator[str]:
    """A line that says what a cap kept from being measured and how to go on; none without a cap that did."""
    if document.ending.how != "wall_cap":
        return
    taken, pairs = Counter(sample.cell for sample in document.samples), document.protocol.pairs
    lost = given_up(document.samples)
    counts = [taken[cell.key] for cell in document.cells if cell.key not in lost]
    told = [f"{counts.count(0)} of {counted(len(document.cells), 'cell')} not measured"] if 0 in counts else []
    for few in sorted({count for count in counts if 0 < count < pairs}):
        told.append(f"{counted(counts.count(few), 'cell')} with {few} of {counted(pairs, 'pair')}")
    way_out = f"go on with: flowbench run --resume {path}"
    yield f"incomplete, as {document.ending.reason}: {', '.join(told)}; {way_out}"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal all raise KeyboardInterrupt, once. What is ignored stays so, as with nohup."""
    heeded = [number for number in _ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    for number in _ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the clearing up, which takes a second
    raise KeyboardInterrupt
