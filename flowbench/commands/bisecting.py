"""What `flowbench bisect` does: one cell, measured at commit after commit as `flowbench compare` does, until one is found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import click

import flowbench
from flowbench.cell import Cell
from flowbench.commands import comparing
from flowbench.commands.bisection import Judged, Step, bisect, describe
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.judge.series import fits
from flowbench.judge.verdict import Comparison, ComparisonSet, Quantity, Verdict
from flowbench.measure.places import PlaceError
from flowbench.measure.plan import NO_REFERENCE, Request, plan_run
from flowbench.measure.refs import PACKAGE, SideError
from flowbench.measure.resumption import differences
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument
from flowbench.report.words import counted, one_line

What = Literal["any", "time", "memory"]
Measure = Callable[[str, str], ComparisonSet]


def search(
    good: str, bad: str, pattern: str, what: What, request: Request, out: Path, command: Sequence[str], *, resume: bool
) -> str:
    """Find the commit that made the one cell that fits `pattern` slower or larger; returns the result in words.

    With `resume` what an earlier search for it left in the folder `out` is not measured again.
    """
    cell = _one_cell(pattern, request, command)
    alone = replace(
        request,
        engines=(cell.engine,),
        reference=NO_REFERENCE,
        models=(cell.model,),
        batch_sizes=(cell.input_shape[0],),
        image_shape=(cell.input_shape[1], cell.input_shape[2], cell.input_shape[3]),
    )
    click.echo(f"searching with {cell.label}; each commit is compared with {good}", err=True)

    measure = Sittings(alone, out, command, resume)
    repository = Path(flowbench.__file__).parent
    try:
        found = bisect(
            repository, good, bad, OneQuantity(measure, what), _told, lambda text: click.echo(text, err=True)
        )
    except Interrupted:
        raise Interrupted(f"interrupted; {_goes_on(out)}") from None
    except PlaceError as error:
        raise PlaceError(f"{error}; {_goes_on(out)}") from None
    where = measure.kept.get(found.suspects[0]) if len(found.suspects) == 1 else None
    return describe(repository, found) + (
        f"measured in {where}: flowbench report or explain shows it\n" if where else ""
    )


def _goes_on(out: Path) -> str:
    return f"what was measured is in {out}: the same command with --resume goes on"


class Sittings:
    """Measures two commits in a sitting kept in the folder `out`; with `resume`, takes first what is there of them."""

    def __init__(self, request: Request, out: Path, command: Sequence[str], resume: bool) -> None:
        self._request, self._out, self._command = request, out, command
        self._waiting = dict(_comparisons(out)) if resume else {}
        self.kept: dict[str, Path] = {}  # the latest document of each commit that was compared

    def __call__(self, base: str, head: str) -> ComparisonSet:
        path = next((path for path, document in self._waiting.items() if self._is_of(document, base, head)), None)
        if path is not None:
            document = self._waiting.pop(path)  # one that is unclear is measured again, not looked at again
            if document.ending.how in ("complete", "wall_cap"):
                click.echo(f"measured before: {path}", err=True)
                self.kept[head] = path
                return comparing.judged(document)
        self.kept[head], document = comparing.measured(base, head, self._request, self._out, self._command, resume=path)
        return comparing.judged(document)

    def _is_of(self, document: RunDocument, base: str, head: str) -> bool:
        sides = document.comparison
        commits = [side.git and side.git.commit for side in (sides.base, sides.head)] if sides else []
        return commits == [base, head] and not differences(document, self._request)


def _comparisons(folder: Path) -> Iterator[tuple[Path, RunDocument]]:
    """The comparisons in `folder`, oldest first; other files there are none of our business."""
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(FlowbenchError):
            document = read_document(path)
            if document.comparison is not None:
                yield path, document


class OneQuantity:
    """Judges commits by one quantity: the one that is worst at BAD, which is looked at first.

    Other quantities may change in between for reasons of their own, and would lead the search astray. What is unclear against
    the margin still counts where its interval lies wholly below, or wholly above, half of the change that is searched for.
    """

    def __init__(self, measure: Measure, what: What = "any") -> None:
        self._measure, self._what = measure, what
        self._quantity: Quantity | None = None
        self._halfway = math.inf

    def __call__(self, good: str, commit: str) -> Judged:
        try:
            found = self._measure(good, commit)
        except SideError as error:
            if error.asked == good:
                raise
            return Judged(Verdict.FAILED, str(error))
        comparisons = [one for one in found.comparisons if self._asked_for(one)]
        if not comparisons:
            return Judged(Verdict.FAILED, "nothing was measured")
        worse = [one for one in comparisons if one.verdict.is_regression]
        if self._quantity is None and worse:
            worst = max(worse, key=lambda one: one.change.ratio if one.change else 0.0)
            self._quantity = worst.quantity
            self._halfway = math.sqrt(worst.change.ratio) if worst.change else math.inf
            return _judged(worst)
        judged = _judged(min(comparisons, key=lambda one: one.verdict.is_judged))  # what is open decides, where any is
        return judged if found.canary.state == "flagged" else self._told_apart(comparisons, judged)

    def _told_apart(self, comparisons: list[Comparison], judged: Judged) -> Judged:
        if len(comparisons) != 1 or judged.verdict is not Verdict.UNCLEAR or math.isinf(self._halfway):
            return judged
        (one,) = comparisons
        change = one.change
        if one.quantity.unit != "ms" or change is None or change.low is None or change.high is None:
            return judged
        if change.high < self._halfway:
            return Judged(Verdict.SAME, f"{judged.words}; but far from the change that is searched for")
        if change.low > self._halfway:
            return Judged(Verdict.SLOWER, f"{judged.words}; but more than half of the change that is searched for")
        return judged

    def _asked_for(self, one: Comparison) -> bool:
        if self._quantity is not None:
            return one.quantity == self._quantity
        return self._what == "any" or (one.quantity.unit == "ms") == (self._what == "time")


def _judged(one: Comparison) -> Judged:
    change = f" ({100 * (one.change.ratio - 1):+.1f} %)" if one.change else ""
    return Judged(one.verdict, one_line(f"{one.quantity.label} {one.verdict}{change}: {one.reason}", 300))


def _told(step: Step) -> None:
    for number, judged in enumerate(step.tries[:-1], 1):
        click.echo(f"{step.commit[:10]} try {number}, measured again: {judged.words}", err=True)
    tries = f" after {counted(len(step.tries), 'try', 'tries')}" if len(step.tries) > 1 else ""
    word = {"bad": "worse", "good": "not worse", "skip": "skipped"}[step.taken_for]
    click.echo(f"{step.commit[:10]} {one_line(step.subject, 60)}: {word}{tries}: {step.tries[-1].words}", err=True)


def _one_cell(pattern: str, request: Request, command: Sequence[str]) -> Cell:
    """The cell of the request that fits `pattern`; FlowbenchError where none or several do."""
    plan = plan_run(request, command)
    ours = {engine.name for engine in plan.engines if engine.library == PACKAGE}
    cells = [cell for cell in plan.cells if cell.engine in ours]
    if not cells:
        names = ", ".join(engine.name for engine in plan.engines)
        raise FlowbenchError(
            f"commits of this repository do not differ in {names}: give an --engine that imports {PACKAGE}"
        )
    found = [cell for cell in cells if fits(pattern, cell.key, cell.label)]
    exact = [cell for cell in found if pattern in (cell.key, cell.label)]
    if len(exact or found) == 1:
        return (exact or found)[0]
    known = "; ".join(cell.label for cell in (found or cells)[:6])
    raise FlowbenchError(
        f"--cell {pattern!r} fits {counted(len(found), 'cell')}, expected one: {known}; --preset, --model, --batch-size and"
        " --engine choose among others"
    )
