"""The environment that git is run in: about the repository that is named, in words that can be read."""

from __future__ import annotations

import os

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
