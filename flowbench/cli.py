"""The command line: parses, calls, prints. Nothing heavy is imported before it is known what is asked for."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from flowbench import __version__
from flowbench.cli_compare import aa, bisect, compare
from flowbench.cli_github import comment, dispatch
from flowbench.cli_store import explain, history, store
from flowbench.cli_types import COUNT, Bytes, ImageShape, ManyValues, Seconds
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.output import drop_output, read_text, say, unwritten

# What writing says where a disk is full, a descriptor is closed or a device fails.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO, errno.EFBIG)

FORMATS = ("console", "speed-stats", "markdown", "html", "json", "junit", "csv", "parquet", "openmetrics")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 fine, 1 a regression was found, 2 could not run or judge, 130 interrupted."""
    try:
        _check_working_directory()
        status = cli(arguments, prog_name="flowbench", standalone_mode=False)
    except click.exceptions.Exit as stop:
        status = stop.exit_code
    except click.ClickException as error:
        status = _complain(error.format_message(), 2)
    except FlowbenchError as error:
        status = _complain(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        status = _complain("interrupted", Interrupted.exit_code)
    except SystemExit:
        status = 0  # click's way out when help's reader has gone; its status 1 would read as "a regression was found"
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            status = _report_fault()
        else:  # click prints help and version by itself
            drop_output()
            status = _complain(unwritten(error), 2)
    except Exception:  # noqa: BLE001 - a fault of ours: Python's own status 1 would read as "a regression was found"
        status = _report_fault()
    sys.exit(status or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> int:
    """Measures deep-learning frameworks against each other, and reports what it measured.

    Exit codes: 0 fine, 1 a regression was found, 2 could not run or could not judge, 130 interrupted.
    """
    if ctx.invoked_subcommand is not None:
        return 0
    click.echo(ctx.get_help(), err=True)  # by hand, since versions of click differ in what they make of no arguments
    return 2


@cli.command(cls=ManyValues)
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
@click.option("--out", type=click.Path(path_type=Path), default=Path("reports/out"), show_default=True, metavar="DIR",
              help="Where the run document and its reports are written.")  # fmt: skip
@click.option("--resume", type=click.Path(path_type=Path), metavar="DOC", help="Go on with a run that was stopped.")
@click.option("--dry-run", is_flag=True, help="List the cells and estimate the time; measure nothing.")
def run(out: Path, resume: Path | None, dry_run: bool, **asked: Any) -> int:
    """Measure the cells of a preset and report them."""
    from flowbench import sitting

    request = sitting.Request(**asked)
    command = ("flowbench", *sys.argv[1:])
    if dry_run:
        say(sitting.dry_run(request, resume, command))
        return 0
    status, text = sitting.run(request, resume, out, command)
    say(text)
    return status


@cli.command()
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
    from flowbench import reporting

    text = reporting.report(document, base, form, templates, store, out)
    if text is not None:
        say(text.rstrip("\n"))


@cli.command()
@click.argument("file", type=click.Path(allow_dash=True, path_type=Path))
def parse(file: Path) -> None:
    """Read a "Speed stats" text of any dialect (- reads standard input) and print what it says as JSON."""
    import json

    from flowbench.report import parse as parse_text

    entries, warnings = parse_text(read_text(file))
    say(json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False))
    if not entries["entries"]:
        click.echo(f"flowbench: {file}: no Speed stats line was found in it", err=True)
    for warning in warnings:
        click.echo(f"flowbench: {file}: {warning}", err=True)


@cli.command()
def schema() -> None:
    """Print the JSON schema of the run document."""
    import json

    from flowbench.record.document import document_schema

    say(json.dumps(document_schema(), indent=2))


@cli.command()
def doctor() -> int:
    """Say what this machine can measure, which engines are there and what disturbs measurements."""
    from flowbench.doctor import examine, format_examination

    checks = examine()
    say(format_examination(checks))
    return 2 if any(check.level == "bad" for check in checks) else 0


cli.add_command(compare)
cli.add_command(bisect)
cli.add_command(aa)
cli.add_command(store)
cli.add_command(history)
cli.add_command(explain)
cli.add_command(comment)
cli.add_command(dispatch)


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise FlowbenchError(
            f"the working directory cannot be used: {error.strerror}; it was deleted, it seems: change to another"
        ) from None


def _report_fault() -> int:
    traceback.print_exc()
    return _complain("this is a fault in flowbench: please report it with the lines above", 2)


def _complain(message: str, status: int) -> int:
    click.echo(f"flowbench: {' '.join(message.split())}", err=True)
    return status
