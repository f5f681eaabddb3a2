"""What is said where the machine cannot take a side of a comparison: the folder, how full its disk is, and the way out."""

from __future__ import annotations

import errno
import math
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flowbench.errors import FlowbenchError, room, used_up
from flowbench.git import machine_fault, reason

_OTHER_CACHE = "set XDG_CACHE_HOME to another folder"
_OTHER_CLONE = "run flowbench in a clone that can be written"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (*_NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM)
# Words of git's that are of a checkout's own files, which it names as the commit does.
_OF_A_FILE = re.compile(r"unable to (write|create) file |cannot create directory at ")


class PlaceError(FlowbenchError):
    """The machine cannot take a side, whichever commit that is of: a search is not to skip it, and can be gone on with."""


@dataclass(frozen=True)
class Needed:
    """What a commit's files take: bytes, and files with their folders."""

    size_bytes: int = 0
    files: int = 0


def unwritten(cache: Path, error: OSError) -> PlaceError:
    """The error for what cannot be written into `cache`."""
    return _error(cache, error, _OTHER_CACHE, Needed())


def checkout_fault(
    done: subprocess.CompletedProcess[str], what: str, root: Path, repository: Path, cache: Path, needed: Needed
) -> PlaceError | None:
    """The error for a git that failed to check out `what` into `cache`, where that is no fault of the commit's.

    It ran in `root`, and writes into the folder `repository` too: the state of the checkout.
    """
    fault = machine_fault(done.stderr, done.returncode)
    if fault is None and not _is_short(cache, needed):
        return None
    if fault is not None and fault.errno is not None and fault.errno not in (*_UNWRITABLE, errno.EFBIG):
        way_out = used_up(fault) or "; the system may be short of memory: run the command again"
        return PlaceError(f"{what} cannot be checked out: {fault.strerror}{way_out}")
    folder = _place(done.stderr, root, repository, cache)
    if fault is None or fault.errno is None:
        fault = _found(folder, needed) or OSError(f"{reason(done.stderr)}: its disk may be full, or a quota used up")
    if folder == cache:
        return _error(cache, fault, _OTHER_CACHE, needed, what)
    return _error(repository, fault, _OTHER_CLONE, Needed())


def _error(folder: Path, error: OSError, elsewhere: str, needed: Needed, what: str = "") -> PlaceError:
    if used_up(error):
        return PlaceError(f"cannot write {folder}: {error.strerror}{used_up(error)}")
    if error.errno == errno.EFBIG:
        return PlaceError(f"cannot write {folder}: {error.strerror}; raise ulimit -f, or {elsewhere}")
    full = error.errno in _NO_ROOM or error.errno is None
    return PlaceError(
        f"cannot write {folder}: {error.strerror or error}{_fullness(folder, needed, what) if full else ''};"
        f" {'free some space or ' if full else room(error)}{elsewhere}"
    )


def _place(said: str, root: Path, repository: Path, cache: Path) -> Path:
    """The folder that git could not write into: one it names, else that with less room."""
    said = "\n".join(line for line in said.splitlines() if "submodule path" not in line)  # where it would have come to
    named = [(root / name).resolve() for name in re.findall(r"'([^']+)'", said)]
    for folder in (repository, cache):
        if any(path.is_relative_to(folder) for path in named):
            return folder
    return cache if _OF_A_FILE.search(said) else min((cache, repository), key=_free_bytes)


def _found(folder: Path, needed: Needed) -> OSError | None:
    """Why nothing more can be written into a folder, asked of its file system; None where it can."""
    if _is_short(folder, needed):
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            probe.write(bytes(2**16))
            probe.flush()
    except OSError as error:
        return error
    return None


def _is_short(folder: Path, needed: Needed) -> bool:
    """Whether the disk of `folder` lacks room: git removes what it wrote of a checkout that failed, so it is full no more."""
    return _free_bytes(folder) < needed.size_bytes or _free_files(folder) < needed.files


def _free_bytes(folder: Path) -> int:
    state = _disk(folder)
    return state.f_bavail * state.f_frsize


def _free_files(folder: Path) -> float:
    state = _disk(folder)
    return state.f_favail if state.f_files else math.inf  # some file systems count none


def _disk(folder: Path) -> os.statvfs_result:
    """The state of the disk that `folder` is on, or would be."""
    return os.statvfs(next(place for place in (folder, *folder.parents) if os.path.exists(place)))


def _fullness(folder: Path, needed: Needed, what: str) -> str:
    if _free_files(folder) < max(1, needed.files):
        free, takes = f"{_free_files(folder)} of its disk's {_disk(folder).f_files} files", f"{needed.files}"
    else:
        whole = _disk(folder).f_blocks * _disk(folder).f_frsize
        free, takes = f"{_mib(_free_bytes(folder))} of its disk's {_mib(whole)} MiB", f"{_mib(needed.size_bytes)} MiB"
    return f" ({free} are free{f', {what} takes {takes}' if needed.files else ''})"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"
