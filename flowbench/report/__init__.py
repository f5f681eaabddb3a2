"""Reports: a run document as text for people and for other tools. Pure: the same document always gives the same text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowbench.errors import unknown_name
from flowbench.judge.series import Series
from flowbench.judge.verdict import ComparisonSet
from flowbench.record.run import RunDocument
from flowbench.report import (
    as_json,
    console,
    junit,
    markdown,
    openmetrics,
    page,
    samples,
    speed_stats,
    speed_stats_reader,
)
from flowbench.report.facts import Facts, facts_of
from flowbench.report.style import Style

# A format is a function of the facts; adding one is a line here and a module beside.
FORMATS: dict[str, Callable[[Facts], str]] = {
    "speed-stats": speed_stats.write,
    "json": as_json.write,
    "junit": junit.write,
    "csv": samples.write_csv,
    "openmetrics": openmetrics.write,
}
# Those whose looks the reader has a say in, and the one that is no text.
STYLED: dict[str, Callable[[Facts, Style], str]] = {
    "console": console.write,
    "markdown": markdown.write,
    "html": page.write,
}
BINARY: dict[str, Callable[[Facts], bytes]] = {"parquet": samples.write_parquet}


def render(
    document: RunDocument,
    format: str = "console",
    *,
    comparison: ComparisonSet | None = None,
    history: Sequence[Series] = (),
    style: Style | None = None,
) -> str:
    """The report of `document`, of what it was compared with and of its cells' history, as text that ends with a line break.

    Raises FlowbenchError for an unknown format, for a library that is missing, and for a user's template that does not work.
    """
    if format not in FORMATS and format not in STYLED:
        raise unknown_name("format", format, [*STYLED, *FORMATS])
    facts = facts_of(document, comparison, history)
    return STYLED[format](facts, style or Style()) if format in STYLED else FORMATS[format](facts)


def render_bytes(
    document: RunDocument,
    format: str,
    *,
    comparison: ComparisonSet | None = None,
    history: Sequence[Series] = (),
    style: Style | None = None,
) -> bytes:
    """The report in any format, those that are no text too, as a file holds it; raises as `render` does."""
    if format in BINARY:
        return BINARY[format](facts_of(document, comparison))
    return render(document, format, comparison=comparison, history=history, style=style).encode()


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """Read a Speed stats text in any dialect: `{"gpu_name": …, "entries": […]}` and warnings about contradictions."""
    return speed_stats_reader.parse(text)
