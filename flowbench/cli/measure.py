"""The commands that measure: `flowbench run`, and `doctor`, which says what can be measured; they parse, call and print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from flowbench.cli.parameter_types import COUNT, Bytes, ImageShape, ManyValues, Seconds
from flowbench.output import say


@click.command(cls=ManyValues)
@click.option(
    "--preset", metavar="NAME", help="A named grid: smoke, cpu, gpu, seed, full. Default: what suits this machine."
)
@click.option("--engine", "engines", multiple=True, metavar="NAME …", help="The engines. Default: the preset's.")
@click.option("--reference", metavar="NAME",
              help="The engine that others are compared with. Default: torch-eager; none compares nothing.")  # fmt: skip
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="Where. Default: a GPU where one answers.")
@click.option("--model", "models", multiple=True, metavar="NAME …", help="The models. Default: the preset's.")
@click.option("--batch-size", "batch_sizes", multiple=True, type=COUNT, metavar="N …", help="Images per step.")
@click.option("--world-size", "world_sizes", multiple=True, type=click.IntRange(1, 4096), metavar="R …",
              help="How many ranks train together, by each engine's DDP. Default: the preset's.")  # fmt: skip
@click.option("--ddp", is_flag=True, default=None, help="A world size of 1 trains through DDP too: what it costs.")
@click.option("--broadcast-buffers/--no-broadcast-buffers", default=None, help="What DDP does before each forward.")
@click.option("--launcher", type=click.Choice(("torchrun", "mpirun", "srun")),
              help="What starts ranks, on several machines as well. Default: flowbench, on this one.")  # fmt: skip
@click.option("--launcher-option", "launcher_options", multiple=True, metavar="WORD …",
              help="An option of the launcher, for example --launcher-option=--host=a,b.")  # fmt: skip
@click.option("--input-shape", "image_shape", type=ImageShape(), help="The shape of one image, for example 3x224x224.")
@click.option("--steps", type=COUNT, help="Timed steps per process.")
@click.option("--warmup", type=click.IntRange(0, 1_000_000), help="Steps before them that are not counted.")
@click.option("--pairs", type=COUNT, help="Rounds in which each engine runs once, in a fresh process.")
@click.option(
    "--threads", type=click.IntRange(1, 10_000), help="CPU threads, the same for all. Default: the cores here."
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Of weights and data. Default: 0.")
@click.option("--gpu-memory-limit", "gpu_memory_limit_bytes", type=Bytes(), metavar="SIZE",
              help="What an engine's allocator may take of a GPU's memory, such as 8GiB. Default: all.")  # fmt: skip
@click.option("--timeout", "timeout_s", type=Seconds(), metavar="SECONDS",
              help="A process without progress for so long hangs. Default: derived from its steps.")  # fmt: skip
@click.option("--wall-cap", "wall_cap_s", type=Seconds(), metavar="SECONDS",
              help="Begin no further round after so long.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR",
              help="Where the run document and its reports are written. Default: reports/out.")  # fmt: skip
@click.option("--resume", type=click.Path(path_type=Path), metavar="DOC", help="Go on with a run that was stopped.")
@click.option("--dry-run", is_flag=True, help="List the cells and estimate the time; measure nothing.")
def run(out: Path | None, resume: Path | None, dry_run: bool, **asked: Any) -> int:
    """Measure the cells of a preset and report them.

    Exit codes: 0 every cell was measured, in two pairs at least unless one was asked for; 2 a cell failed, is void or, as time
    was up, was not measured so often.
    """
    from flowbench.commands import running

    request = running.Request(**asked)
    command = ("flowbench", *sys.argv[1:])
    if dry_run:
        say(running.dry_run(request, resume, command))
        return 0
    status, text = running.run(request, resume, out, command)
    say(text)
    return status


@click.command()
def doctor() -> int:
    """Say what this machine can measure, which engines are there and what disturbs measurements."""
    from flowbench.commands.doctor import examine, format_examination

    checks = examine()
    say(format_examination(checks))
    return 2 if any(check.level == "bad" for check in checks) else 0
