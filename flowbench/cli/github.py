"""The commands for GitHub's workflows: `flowbench comment` and `flowbench dispatch`; they parse, call and print."""

from __future__ import annotations

from pathlib import Path

import click

from flowbench.cli.parameter_types import Repository
from flowbench.output import say

_REPO = click.option("--repo", "repository", type=Repository(), required=True, metavar="OWNER/NAME",
                     help="The repository.")  # fmt: skip


@click.command()
@click.option("--artifact", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="The run's artifact: a zip with one JSON file, or the file.")  # fmt: skip
@_REPO
@click.option("--run-id", type=click.IntRange(min=1), required=True, help="The workflow run that made the artifact.")
@click.option("--author", default="github-actions[bot]", show_default=True, help="Whose comments are ours.")
@click.option("--limits", type=click.Path(path_type=Path), metavar="FILE",
              help="Thresholds by cell. Default: flowbench.toml where you are, if there is one.")  # fmt: skip
@click.option("--check", is_flag=True, help="Also write a check: failed where something is worse, or a limit exceeded.")
@click.option("--dry-run", is_flag=True, help="Print the comment; post nothing.")
def comment(
    artifact: Path, repository: str, run_id: int, author: str, limits: Path | None, check: bool, dry_run: bool
) -> None:
    """Post a run's report on the pull request it belongs to, as the one comment that is kept up to date."""
    from flowbench.commands import commenting

    say(commenting.comment(artifact, repository, run_id, author=author, limits=limits, check=check, dry_run=dry_run))


@click.command()
@click.option("--event", type=click.Path(path_type=Path), required=True, metavar="FILE",
              help="The payload of issue_comment, as GITHUB_EVENT_PATH names it.")  # fmt: skip
@_REPO
@click.option("--workflow", default="bench.yml", show_default=True, help="What to start.")
def dispatch(event: Path, repository: str, workflow: str) -> None:
    """Start the bench for a /bench comment by someone who may write to the repository."""
    from flowbench.commands import commenting

    say(commenting.dispatch(event, repository, workflow))
