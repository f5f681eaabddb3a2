"""Where the command line begins: the group of all commands, and the exit code of whatever they end with."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import NoReturn

import click

from flowbench import __version__
from flowbench.cli.github import comment, dispatch
from flowbench.cli.judge import aa, bisect, compare
from flowbench.cli.measure import doctor, run
from flowbench.cli.report import explain, parse, report, schema
from flowbench.cli.store import history, store
from flowbench.errors import FlowbenchError, Interrupted, used_up
from flowbench.output import drop_output, unwritten

# What looking for a file says where its name cannot be one, or its folder may not be entered.
_UNREACHABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)
# What writing says where a disk is full, a descriptor is closed or a device fails.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EBADF, errno.EIO, errno.EFBIG)


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
        if used_up(error):  # of whatever was to be started or opened
            status = _complain(f"{error.strerror}{used_up(error)}", 2)
        elif error.filename is not None and error.errno in _UNREACHABLE:  # of a path that is only asked for
            status = _complain(f"{error.filename}: {error.strerror}; give another path", 2)
        elif error.filename is not None or error.errno not in _UNWRITABLE:
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


for command in (run, compare, bisect, aa, report, explain, parse, schema, store, history, comment, dispatch, doctor):
    cli.add_command(command)


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
