"""Reports: a run document as text for people and for other tools. Pure: the same document always gives the same text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowbench.errors import unknown_name
from flowbench.record.run import RunDocument
from flowbench.report import as_json, console, markdown, speed_stats, speed_stats_reader
from flowbench.report.facts import Facts, facts_of

# A format is a function of the facts; adding one is a line here and a module beside.
FORMATS: dict[str, Callable[[Facts], str]] = {
    "console": console.write,
    "speed-stats": speed_stats.write,
    "markdown": markdown.write,
    "json": as_json.write,
}


def render(document: RunDocument, format: str = "console") -> str:
    """The report of `document` in one of `FORMATS`, ending with a line break; FlowbenchError for an unknown format."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    return FORMATS[format](facts_of(document))


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """Read a Speed stats text in any dialect: `{"gpu_name": …, "entries": […]}` and warnings about contradictions."""
    return speed_stats_reader.parse(text)
