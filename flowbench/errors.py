"""Errors that a user can do something about: the command line prints them in one line and exits with their code."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable


class FlowbenchError(Exception):
    """What was given, what was expected and the way out, in one line."""

    exit_code = 2


class Interrupted(FlowbenchError):
    """Ctrl-C or SIGTERM ended the sitting; what was measured until then is in the document."""

    exit_code = 130


def unknown_name(kind: str, given: str, known: Iterable[str]) -> FlowbenchError:
    """The error for a name nobody knows, with the nearest known one where there is a near one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return FlowbenchError(f"unknown {kind} {given!r}: {hint}known are {', '.join(names) or 'none'}")


def room(error: Exception) -> str:
    """How a way out begins where `error` is that the disk is full; nothing for other errors."""
    return "free some space or " if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ""
