"""Writes a run as JUnit XML, which CI systems show: a test per cell, which fails where it got worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from flowbench.judge.verdict import ComparisonSet, Verdict
from flowbench.report.changes import Row, rows_of
from flowbench.report.facts import Facts
from flowbench.report.headline import headline_of, spoken
from flowbench.report.words import details_of, one_line

Outcome = Literal["passed", "failure", "error", "skipped"]
_OF_STATUS: dict[str, Outcome] = {"measured": "passed", "not measured": "skipped", "void": "error", "failed": "error"}
_OF_CANARY: dict[str, Outcome] = {"clear": "passed", "flagged": "error", "not measured": "skipped"}
_OF_LIMIT: dict[bool | None, Outcome] = {True: "passed", False: "failure", None: "skipped"}
_OF_VERDICT: dict[Verdict, Outcome] = {
    Verdict.SLOWER: "failure", Verdict.LARGER: "failure", Verdict.FAILED: "error", Verdict.VOID: "error",
    Verdict.LOST: "error", Verdict.UNCLEAR: "skipped",
}  # fmt: skip


@dataclass(frozen=True)
class _Test:
    group: str
    name: str
    seconds: float | None
    outcome: Outcome
    kind: str = ""
    message: str = ""


def write(facts: Facts) -> str:
    """The XML of `facts`. A test's `time` is its median step in seconds."""
    tests = list(_tests(facts))
    counts = {f"{what}s" if what != "skipped" else what: str(sum(test.outcome == what for test in tests))
              for what in ("failure", "error", "skipped")}  # fmt: skip
    totals = {"name": "flowbench", "tests": str(len(tests)), **counts}
    root = ET.Element("testsuites", totals)
    suite = ET.SubElement(root, "testsuite", totals | {"timestamp": one_line(facts.document.created)})
    properties = ET.SubElement(suite, "properties")
    headline = headline_of(facts)
    told = [
        ("verdict", spoken(headline.verdict, one_line)),
        *([("base", facts.changes.base.label), ("head", facts.changes.head.label)] if facts.changes else []),
        *((word, text) for word, text in details_of(facts.document)),
    ]
    for word, text in told:
        ET.SubElement(properties, "property", {"name": word, "value": one_line(text, 400)})
    for test in tests:
        about = {"classname": one_line(test.group) or "?", "name": one_line(test.name) or "?"}
        if test.seconds is not None:
            about["time"] = f"{test.seconds:.6f}"
        element = ET.SubElement(suite, "testcase", about)
        if test.outcome != "passed":
            reason = {"message": one_line(test.message, 400)} | (
                {"type": one_line(test.kind)} if test.outcome != "skipped" else {}
            )
            ET.SubElement(element, test.outcome, reason)
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _tests(facts: Facts) -> Iterator[_Test]:
    if facts.changes is not None:
        yield from _judged(facts, facts.changes)
    else:
        for comparison in facts.comparisons:
            side, seconds = comparison.subject, None
            if side.times is not None:
                seconds = side.times.median_ms / 1000
            yield _Test(side.name, comparison.label, seconds, _OF_STATUS[side.status], side.status, side.reason or "")
    for missing in facts.left_out:
        yield _Test("not measured", missing.what, None, "skipped", "not measured", missing.reason)


def _judged(facts: Facts, changes: ComparisonSet) -> Iterator[_Test]:
    for row in rows_of(facts):
        head = row.time.head if row.time else None
        outcome = _OF_VERDICT.get(row.worst, "passed")
        yield _Test(row.name, row.label, None if head is None else head / 1000, outcome, str(row.worst), _message(row))
    state = _OF_CANARY[changes.canary.state]
    yield _Test("canary", "base against itself", None, state, changes.canary.state, changes.canary.reason)
    for limit in changes.limits:
        kept = _OF_LIMIT[limit.kept]
        yield _Test("limits", f"{limit.name} {limit.pattern}: {limit.label}", None, kept, limit.name, limit.line)


def _message(row: Row) -> str:
    change = row.time.change if row.time and row.time.verdict is row.worst else None
    figures = f"{row.words}, head / base {change.ratio:.3f}" if change else row.words
    return f"{figures}: {row.why}"
