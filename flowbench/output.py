"""Text in and out of the command line: what is printed to a reader that may have gone, what is read from a file or a pipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from flowbench.errors import FlowbenchError, room


def say(text: str) -> None:
    """Print to standard output. That its reader has seen enough (`| head`) is no failure, and changes no exit code."""
    if sys.stdout is None:  # closed before Python started
        raise FlowbenchError(unwritten(ValueError("it is closed")))
    try:
        click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
    except (OSError, ValueError) as error:
        drop_output()
        raise FlowbenchError(unwritten(error)) from None


def drop_output() -> None:
    """Let what is still buffered go nowhere: Python would fail once more when it writes it at its end."""
    if not sys.stdout.closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unwritten(error: OSError | ValueError) -> str:
    """That standard output could not be written, why, and the way out."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"cannot write to standard output: {reason}; {room(error)}send it elsewhere"


def read_text(file: Path, expected: str = "a Speed stats text") -> str:
    """The text of a file, or of standard input for `-`; raises FlowbenchError in one line where there is none."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise FlowbenchError(f"{file}: {error.strerror}, expected {expected}") from None
    except UnicodeDecodeError as error:
        raise FlowbenchError(f"{file}: not UTF-8 text (byte {error.start}), expected {expected}") from None
