"""Git as a program that is run: its environment, about the repository that is named, and what its words mean."""

from __future__ import annotations

import errno
import os
import re
import signal

# What git tells its hooks about the repository that they belong to (git rev-parse --local-env-vars): another one that is named
# by its folder would be mistaken for it, and what is checked out elsewhere written into its index. Settings may stay.
_OF_ONE_REPOSITORY = frozenset(
    f"GIT_{name}"
    for name in (
        "ALTERNATE_OBJECT_DIRECTORIES", "COMMON_DIR", "DIR", "GRAFT_FILE", "IMPLICIT_WORK_TREE", "INDEX_FILE", "NAMESPACE",
        "NO_REPLACE_OBJECTS", "OBJECT_DIRECTORY", "PREFIX", "REPLACE_REF_BASE", "SHALLOW_FILE", "WORK_TREE",
    )
)  # fmt: skip

# What the system says where the machine fails git, and not the repository.
_OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN,
)  # fmt: skip
# Git drops the system's words where a write fails: "error: unable to write file X" is all it says of a full disk.
_WRITE_FAILED = re.compile(r"(unable to|could not|couldn't|cannot|failed to) write\b|Out of diskspace")
_OUT_OF_MEMORY = "Out of memory, "


def git_environment() -> dict[str, str]:
    """The variables of this process without those of one repository; git's words are not translated."""
    return {name: value for name, value in os.environ.items() if name not in _OF_ONE_REPOSITORY} | {"LC_ALL": "C"}


def reason(said: str) -> str:
    """Why git failed, from what it said to standard error: the first of its reasons, with the command that it advises."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    words = next(
        (line for line in lines if line.startswith(("fatal: ", "error: "))), lines[-1] if lines else "it says nothing"
    )
    return words[:500] + advice(said)


def advice(said: str) -> str:
    """How what git refuses is allowed, where it says so: a repository of another owner."""
    command = re.search(r"^\s+(git config \S.* safe\.directory .+)$", said, re.MULTILINE)
    return f"; to allow it: {command[1].strip()}" if command else ""


def why_unread(said: str) -> str | None:
    """Why git reads no repository though one is there, from what it said; None where there is none."""
    return None if "fatal: not a git repository (or any " in said else reason(said)


def machine_fault(said: str, status: int) -> OSError | None:
    """What the machine failed git in, from what it said and its exit status; None where the repository did.

    Of a write that failed for an unknown reason the error has no number.
    """
    for number in _OF_THE_MACHINE:
        if os.strerror(number).lower() in said.lower():  # a filter may write it small
            return OSError(number, os.strerror(number))
    if _OUT_OF_MEMORY in said:
        return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    died = re.search(r"died of signal (\d+)", said)
    ended_by = int(died[1]) if died else -status
    if ended_by == signal.SIGXFSZ:
        return OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    if ended_by in (signal.SIGKILL, signal.SIGTERM, signal.SIGXCPU):  # from outside, such as where memory runs out
        return OSError(errno.EINTR, f"git was ended by {signal.Signals(ended_by).name}")
    return OSError("a write failed") if _WRITE_FAILED.search(said) else None
