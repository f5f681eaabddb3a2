"""The commands that judge: `flowbench compare`, `bisect` and `aa`; they parse, call and print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flowbench.cli.parameter_types import COUNT, ImageShape, ManyValues, Pattern, Percent, Seconds
from flowbench.output import say


def _measuring(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of what is measured, which all three share."""
    for option in (
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where it is measured."),
        click.option("--threads", type=click.IntRange(1, 10_000), help="CPU threads. Default: the cores here."),
        click.option(
            "--pairs", type=COUNT, help="The most rounds of sampling, at least 6. Default: 20, within the wall cap."
        ),
        click.option("--warmup", type=click.IntRange(0, 1_000_000), help="Steps before them that are not counted."),
        click.option("--steps", type=COUNT, help="Timed steps per process."),
        click.option(
            "--input-shape", "image_shape", type=ImageShape(), help="The shape of one image, such as 3x224x224."
        ),
        click.option("--batch-size", "batch_sizes", multiple=True, type=COUNT, metavar="N …", help="Images per step."),
        click.option("--model", "models", multiple=True, metavar="NAME …", help="The models. Default: the preset's."),
        click.option("--preset", metavar="NAME", help="A named grid. Default: what suits this machine."),
    ):
        command = option(command)
    return command


@click.command(cls=ManyValues)
@click.argument("base", required=False)
@click.argument("head", required=False)
@_measuring
@click.option("--engine", "engines", multiple=True, metavar="NAME …", help="Engines of this repository. Default: all.")
@click.option("--reference", metavar="NAME", help="The framework that both sides stand beside. Default: torch-eager.")
@click.option("--wall-cap", "wall_cap_s", type=Seconds(), metavar="SECONDS",
              help="Begin no further round of sampling after so long.")  # fmt: skip
@click.option("--limits", type=click.Path(path_type=Path), metavar="FILE",
              help="Thresholds by cell. Default: flowbench.toml where you are, if there is one.")  # fmt: skip
@click.option(
    "--force",
    is_flag=True,
    help="Show documents of unlike machines or numbers of threads beside each other; what is unlike is not judged.",
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where the run document and its reports are written. Default: reports/out.")  # fmt: skip
@click.option("--resume", type=click.Path(path_type=Path), metavar="DOC",
              help="Go on with a comparison of refs that was stopped, where both are what they were.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="List the cells, their margins and the time; measure nothing.")
@click.option("--unclear-exit-code", type=click.IntRange(0, 125), default=2, show_default=True, metavar="CODE",
              help="Exit code where all was measured, nothing is worse, something unclear. A flagged canary is 2.")  # fmt: skip
def compare(
    base: str | None,
    head: str | None,
    limits: Path | None,
    force: bool,
    out: Path | None,
    resume: Path | None,
    dry_run: bool,
    unclear_exit_code: int,
    **asked: Any,
) -> int:
    """Compare BASE with HEAD: git refs of this repository, measured in one sitting, or run documents.

    Without HEAD, the working tree is compared with a ref; a document of an earlier comparison is judged anew. Exit codes: 0
    nothing is worse, 1 something is, 2 something could not be judged, and those of exceeded limits.
    """
    from flowbench.commands import comparing, planning
    from flowbench.measure.plan import Request

    command = ("flowbench", *sys.argv[1:])
    if dry_run:
        say(planning.dry_run(base, head, Request(**asked), command, limits=limits, resume=resume))
        return 0
    status, text = comparing.compare(
        base,
        head,
        Request(**asked),
        out,
        command,
        limits=limits,
        force=force,
        resume=resume,
        unclear_exit_code=unclear_exit_code,
    )
    say(text)
    return status


@click.command(cls=ManyValues)
@_measuring
@click.option("--sittings", type=COUNT, default=20, show_default=True, help="How many the file shall have in the end.")
@click.option("--slowdown", "slowdowns", multiple=True, type=Percent(), metavar="SHARE …",
              help="Also a side made slower by so much, such as 3%: is it found?")  # fmt: skip
@click.option("--load", is_flag=True, help="Start and stop a competing process at random times.")
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="The engine. Default: flow-eager.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports/out/aa.jsonl"), show_default=True,
              metavar="FILE", help="The sittings, one a line; an existing file is gone on with.")  # fmt: skip
def aa(sittings: int, slowdowns: tuple[float, ...], load: bool, out: Path, **asked: Any) -> None:
    """Measure one commit against itself: how often the verdict is wrong, and which changes would be found."""
    from flowbench.commands import false_alarms
    from flowbench.measure.plan import Request

    asked["engines"] = asked["engines"] or ("flow-eager",)
    say(false_alarms.aa(Request(**asked), sittings, slowdowns, load, out, ("flowbench", *sys.argv[1:])))


@click.command(cls=ManyValues)
@click.argument("good")
@click.argument("bad")
@click.option("--cell", "pattern", required=True, type=Pattern(), metavar="PATTERN",
              help="The one cell to measure: a part of its label or key, or * and ? as in a shell.")  # fmt: skip
@click.option("--what", type=click.Choice(["any", "time", "memory"]), default="any", show_default=True,
              help="What became worse; the worst of it at BAD is followed.")  # fmt: skip
@_measuring
@click.option("--engine", "engines", multiple=True, metavar="NAME …", help="Engines of this repository.")
@click.option("--wall-cap", "wall_cap_s", type=Seconds(), metavar="SECONDS", help="For each commit.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports/out"), show_default=True, metavar="DIR",
              help="Where each commit's run document is written.")  # fmt: skip
@click.option("--resume", is_flag=True, help="Go on with a search that was stopped: what it left in --out counts.")
def bisect(good: str, bad: str, pattern: str, what: Any, out: Path, resume: bool, **asked: Any) -> None:
    """Find the commit between GOOD and BAD that made a cell slower or larger.

    Each commit is compared with GOOD in a sitting of its own; what is unclear is measured again, then skipped. Your
    checkout is left as it is.
    """
    from flowbench.commands import bisecting
    from flowbench.measure.plan import Request

    command = ("flowbench", *sys.argv[1:])
    say(bisecting.search(good, bad, pattern, what, Request(**asked), out, command, resume=resume))
