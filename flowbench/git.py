"""Git as a program that is run: its environment, about the repository that is named, and what its words mean."""

from __future__ import annotations

import os
import re

# What git tells its hooks about the repository that they belong to (git rev-parse --local-env-vars): another one that is named
# by its folder would be mistaken for it, and what is checked out elsewhere written into its index. Settings may stay.
_OF_ONE_REPOSITORY = frozenset(
    f"GIT_{name}"
    for name in (
        "ALTERNATE_OBJECT_DIRECTORIES", "COMMON_DIR", "DIR", "GRAFT_FILE", "IMPLICIT_WORK_TREE", "INDEX_FILE", "NAMESPACE",
        "NO_REPLACE_OBJECTS", "OBJECT_DIRECTORY", "PREFIX", "REPLACE_REF_BASE", "SHALLOW_FILE", "WORK_TREE",
    )
)  # fmt: skip


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
