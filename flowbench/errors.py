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


_USED_UP = {
    errno.EMFILE: "raise ulimit -n, or take fewer ranks",
    errno.ENFILE: "the whole system has no open file left: end other programs, or take fewer ranks",
    errno.EAGAIN: "raise ulimit -u (or pids.max of a container), or take fewer ranks",
    errno.ENOMEM: "free some memory, or take fewer ranks",
}


def used_up(error: OSError) -> str:
    """The way out where the system has no process, open file or memory left; nothing for other errors."""
    return f": {_USED_UP[error.errno]}" if error.errno in _USED_UP else ""


def room(error: Exception) -> str:
    """How a way out begins where `error` is that the disk is full; nothing for other errors."""
    return "free some space or " if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ""
