"""The text of the comment: its marker, what it can be trusted with, and the report with its verdict computed anew."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from flowbench.github.trust import Subject
from flowbench.judge.compare import judge_document
from flowbench.judge.limits import Limit, results_of
from flowbench.judge.verdict import ComparisonSet
from flowbench.record.run import RunDocument
from flowbench.report import profiles, render

MOST_CHARACTERS = 65_000  # GitHub refuses from 65,536 on
_MARKER = re.compile(r"<!-- flowbench run=(\d{1,20}) -->\n")
_TRUST = "<sub>Measured by code of this pull request, which can fake its own numbers; the verdict was computed from them.</sub>"


def text_of(subject: Subject, document: RunDocument, limits: Sequence[Limit] = ()) -> str:
    """The comment for `document`, judged here; the artifact's own words of a verdict are not asked for."""
    head = [f"<!-- flowbench run={subject.run_id} -->\n"]
    if subject.is_stale:
        head.append(
            f"**Stale:** measured at {subject.commit[:10]}; the pull request stands at {subject.head[:10]} since.\n\n"
        )
    tail = f"\n{_TRUST}\n"
    comparison = judged(document, limits)
    body = render(document, "markdown", comparison=comparison)
    room = MOST_CHARACTERS - len("".join(head)) - len(tail)
    changed = _what_changed(document, comparison) if comparison else ""
    if len(body) + len(changed) <= room:
        body = body.rstrip("\n") + "\n" + changed
    elif len(body) > room:
        cut = "\n\n… cut here: the report is longer than a comment may be.\n"
        body = body[: room - len(cut)] + cut
    return "".join(head) + body.rstrip("\n") + "\n" + tail


def run_of(body: str) -> int | None:
    """The run that wrote a comment; None where it is no comment of ours."""
    match = _MARKER.match(body.replace("\r\n", "\n"))
    return int(match[1]) if match else None


def judged(document: RunDocument, limits: Sequence[Limit] = ()) -> ComparisonSet | None:
    """The verdicts of a document of two sides, from its samples alone, and `limits`; None for one of a single side."""
    if document.comparison is None:
        return None
    comparison = judge_document(document)
    return dataclasses.replace(comparison, limits=results_of(limits, comparison))


def _what_changed(document: RunDocument, comparison: ComparisonSet) -> str:
    """Ops and tensors that moved in what became worse, folded; nothing where nothing was profiled."""
    lines = list(profiles.changes(document, comparison))
    if not lines:
        return ""
    text = "\n".join(lines).strip().replace("`", "ˋ")  # nothing in it can end the block
    return f"\n<details><summary>What changed</summary>\n\n```text\n{text}\n```\n\n</details>\n"
