"""The commands that keep runs and follow them over time: `flowbench store` and `history`; they parse, call and print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flowbench.cli.parameter_types import Days, Pattern
from flowbench.output import read_text, say

_STORE = click.option(
    "--store", type=click.Path(path_type=Path), default=Path("reports/store"), show_default=True, metavar="DIR",
    help="The folder of run documents.",
)  # fmt: skip
_REPOSITORY = click.option("--repository", type=click.Path(path_type=Path), default=Path(), metavar="DIR",
                           help="A clone of the repository that has the branch. Default: where you are.")  # fmt: skip
_REMOTE = click.option("--remote", default="origin", show_default=True, help="A remote's name or address.")
_BRANCH = click.option("--branch", default="flowbench-runs", show_default=True, help="The branch of its own.")


@click.group()
def store() -> None:
    """Keep run documents in a folder, and on a git branch of its own."""


@store.command()
@click.argument("documents", nargs=-1, required=True, type=click.Path(path_type=Path))
@_STORE
def add(store: Path, documents: tuple[Path, ...]) -> None:
    """Keep run documents; they are copied, and never change."""
    from flowbench.commands import storing

    _tell(storing.add(store, documents))


@store.command()
@_STORE
@_REPOSITORY
@_REMOTE
@_BRANCH
def push(**place: Any) -> None:
    """Add to the git branch what it lacks; where another was quicker, on top of what that one left."""
    from flowbench.commands import storing

    _tell(storing.push(**place))


@store.command()
@_STORE
@_REPOSITORY
@_REMOTE
@_BRANCH
def pull(**place: Any) -> None:
    """Take from the git branch what the store lacks."""
    from flowbench.commands import storing

    _tell(storing.pull(**place))


@store.command()
@_STORE
@click.option("--older-than", "days", type=Days(), required=True, metavar="DAYS",
              help="Only runs older than so many days.")  # fmt: skip
@click.option("--referred-in", "referring", multiple=True, type=click.Path(path_type=Path), default=(Path("reports"),),
              show_default=True, metavar="PATH",
              help="Runs named in texts there, its folder out/ aside, are kept; repeatable.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
def prune(store: Path, days: float, referring: tuple[Path, ...], dry_run: bool) -> None:
    """Remove old runs that no report, and no run that stays, refers to."""
    from flowbench.commands import storing

    _tell(storing.prune(store, days, referring, dry_run))


@store.command()
@_STORE
def reindex(store: Path) -> None:
    """Make the index anew from the documents."""
    from flowbench.commands import storing

    _tell(storing.reindex(store))


@click.group(invoke_without_command=True)
@click.option("--cell", type=Pattern(), metavar="PATTERN", help="Cells with this in their name; * and ? as in a shell.")
@click.option("--machine", type=Pattern(), metavar="PATTERN", help="Machines with this in their name.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@_STORE
@click.pass_context
def history(ctx: click.Context, store: Path, cell: str | None, machine: str | None, form: str) -> None:
    """Show each cell's series on each machine, with the places where its level shifts."""
    ctx.obj = store
    if ctx.invoked_subcommand is None:
        from flowbench import history as series

        _tell(series.show(store, cell, machine, form))


@history.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(allow_dash=True, path_type=Path))
@click.option("--date", metavar="DATE", help="Of texts that do not say it themselves, for example 2022-03-31.")
@click.option("--gpu", metavar="NAME", help="The GPU of texts that do not say it themselves.")
@click.option("--store", "own_store", type=click.Path(path_type=Path), metavar="DIR", help="As before the word import.")
@click.pass_obj
def import_(store: Path, own_store: Path | None, files: tuple[Path, ...], date: str | None, gpu: str | None) -> None:
    """Take in old Speed stats comments: texts, or JSON exports of GitHub's issue comments."""
    from flowbench import history as series

    expected = "Speed stats comments, as text or as JSON from GitHub's API"
    _tell(
        series.import_files(own_store or store, [(str(file), read_text(file, expected)) for file in files], date, gpu)
    )


def _tell(said: tuple[str, list[str]]) -> None:
    text, beside = said
    say(text)
    for remark in beside:
        click.echo(f"flowbench: {' '.join(remark.split())}", err=True)
