"""The commands that show what was measured: `flowbench report`, `explain`, `parse` and `schema`; they parse, call and print."""

from __future__ import annotations

import json
from pathlib import Path

import click

from flowbench.cli.parameter_types import Pattern
from flowbench.output import read_text, say

FORMATS = ("console", "speed-stats", "markdown", "html", "json", "junit", "csv", "parquet", "openmetrics")


@click.command()
@click.argument("document", type=click.Path(path_type=Path))
@click.argument("base", type=click.Path(path_type=Path), required=False)
@click.option("--format", "form", type=click.Choice(FORMATS), default="console", show_default=True)
@click.option("--templates", type=click.Path(path_type=Path), metavar="DIR",
              help="Jinja templates to use in place of flowbench's own, for Markdown and HTML.")  # fmt: skip
@click.option("--store", type=click.Path(path_type=Path), metavar="DIR",
              help="A store of runs: its history of these cells is shown in HTML.")  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="Write it there instead of printing it."
)
def report(
    document: Path, base: Path | None, form: str, templates: Path | None, store: Path | None, out: Path | None
) -> None:
    """Print the report of a run document, or write it to a file; with BASE, of what changed since that run."""
    from flowbench.commands import reporting

    text = reporting.report(document, base, form, templates, store, out)
    if text is not None:
        say(text.rstrip("\n"))


@click.command()
@click.argument("document", type=click.Path(path_type=Path))
@click.argument("cell", type=Pattern())
@click.option("--keep", is_flag=True, help="Write a profile that is taken now into the document.")
def explain(document: Path, cell: str, keep: bool) -> None:
    """Show where a cell's time and memory go, op by op; and what changed, where a document compares two sides."""
    from flowbench.commands import explaining

    say(explaining.show(document, cell, keep))


@click.command()
@click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
def parse(file: Path) -> None:
    """Read a "Speed stats" text of any dialect (- reads standard input) and print what it says as JSON."""
    from flowbench.report import parse as parse_text

    entries, warnings = parse_text(read_text(file))
    say(json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False))
    if not entries["entries"]:
        click.echo(f"flowbench: {file}: no Speed stats line was found in it", err=True)
    for warning in warnings:
        click.echo(f"flowbench: {file}: {warning}", err=True)


@click.command()
def schema() -> None:
    """Print the JSON schema of the run document."""
    from flowbench.record.document import document_schema

    say(json.dumps(document_schema(), indent=2))
