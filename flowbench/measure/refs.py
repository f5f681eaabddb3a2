"""The two sides of a comparison as folders to import from: git refs checked out beside, or the working tree as it is now."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flowbench.errors import FlowbenchError, used_up
from flowbench.git import git_environment, reason, why_unread
from flowbench.measure.places import Needed, PlaceError, checkout_fault, unwritten
from flowbench.measure.processes import child_environment
from flowbench.record.machine import read_git
from flowbench.record.run import Git, Side

# What a side is of: the package that is measured. The harness is always the one that runs.
PACKAGE = "framework"
WORKING_TREE = "working tree"

_OR_DOCUMENT = ", or a run document's file"
_LOCK = "lock"
# A process makes the lock right after its folder: one that has none for so long belongs to nobody.
_LOCKLESS_S = 600.0
# From asking git to end, when we are ended, to ending it.
_GRACE_S = 5.0
# What most file systems give to a file that is not empty, at least.
_BLOCK_BYTES = 4096


class SideError(FlowbenchError):
    """A commit that is there, and cannot be measured: it has no framework, or one that does not import."""

    def __init__(self, asked: str, message: str) -> None:
        super().__init__(message)
        self.asked = asked


@dataclass(frozen=True)
class PlacedSide:
    """A side, and the folder that its package is imported from."""

    side: Side
    import_path: str


@contextlib.contextmanager
def placed_sides(repository: Path, base: str, head: str | None) -> Iterator[tuple[PlacedSide, PlacedSide]]:
    """Both sides, for as long as the context lasts: `base` is a git ref of `repository`, `head` one or None, the working tree.

    They lie in a folder of their own in the user's cache, which is removed at the end; one that a killed process left is
    removed by the next. Raises FlowbenchError for a ref that is unknown, SideError for one that has no framework, or whose
    framework does not import, and PlaceError where the machine has no room for it.
    """
    root = _root(repository)
    asked = [(ref, None if ref is None else resolve(root, ref, _OR_DOCUMENT)) for ref in (base, head)]
    with pruned(root), held_folder() as folder:
        placed = []
        with _placing(folder):
            for (ref, commit), role in zip(asked, ("base", "head"), strict=True):
                if ref is None or commit is None:
                    source, side = _copy(root, folder / role), Side(WORKING_TREE, read_git(root))
                else:
                    source, side = _check_out(root, ref, commit, folder / role), Side(ref, Git(commit, None, False))
                placed.append(PlacedSide(side, str(_linked(source, folder / f"{role}-path", side.asked))))
        yield placed[0], placed[1]


@contextlib.contextmanager
def placed_copy(root: Path) -> Iterator[PlacedSide]:
    """The package in the folder `root` as it is now, for as long as the context lasts; needs no git."""
    if not (root / PACKAGE).is_dir():
        raise FlowbenchError(f"{root} has no {PACKAGE}/: there is nothing in it to measure")
    with held_folder() as folder:
        with _placing(folder):
            names = [path.relative_to(root) for path in sorted((root / PACKAGE).rglob("*"))]
            _copy_files(root, folder / "copy", [name for name in names if "__pycache__" not in name.parts])
            path = _linked(folder / "copy", folder / "path", WORKING_TREE)
        yield PlacedSide(Side(WORKING_TREE, read_git(root)), str(path))


def resolve(root: Path, ref: str, or_else: str = "") -> str:
    """The commit of a ref; FlowbenchError, with the way out in a shallow clone, where there is none.

    `or_else` is what else might have been given in its place.
    """
    if ref.startswith("-"):
        done = None
    else:
        done = _run(root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    if done is None or done.returncode != 0:
        git_says = f" (git: {reason(done.stderr)})" if done and done.stderr.strip() else ""
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        way_out = (
            "this clone is shallow: git fetch --unshallow (in a workflow: fetch-depth: 0)"
            if shallow
            else "see git branch --all, git tag; a remote's branch may have to be fetched first"
        )
        raise FlowbenchError(
            f"unknown ref {ref!r}, expected a branch, tag or commit of {root.resolve()}{or_else}{git_says}: {way_out}"
        )
    return done.stdout.strip()


@contextlib.contextmanager
def pruned(root: Path) -> Iterator[None]:
    """At the end of the context git forgets the worktrees whose folders are gone, also those of processes that were killed."""
    try:
        yield
    finally:
        # A `git worktree add` that was killed leaves its worktree locked, and prune spares what is locked.
        listed = _git(root, "worktree", "list", "--porcelain") or ""
        for line in listed.splitlines():
            word, _, place = line.partition(" ")
            if word == "worktree" and Path(place).is_relative_to(_cache()) and not Path(place).exists():
                _git(root, "worktree", "unlock", place)
        _git(root, "worktree", "prune")


def _root(repository: Path) -> Path:
    done = _run(repository, "rev-parse", "--show-toplevel")
    if done.returncode != 0:
        raise unread(
            repository,
            done.stderr,
            "there are no refs to compare: run flowbench in a clone, or compare two run documents",
        )
    return Path(done.stdout.strip())


def unread(directory: Path, said: str, therefore: str) -> FlowbenchError:
    """The error for a folder in which git reads no repository, from what it said: there is none, or it refuses it."""
    why = why_unread(said)
    if why is None:
        return FlowbenchError(f"{directory} is in no git repository, so {therefore}")
    return FlowbenchError(f"git does not read the repository of {directory}: {why}")


@contextlib.contextmanager
def held_folder() -> Iterator[Path]:
    """A new folder in the cache, held by a lock, and removed with the worktrees in it; at the latest by the next process."""
    cache = _cache()
    folder, lock = _new_folder(cache)
    try:
        _sweep(cache, folder)
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _new_folder(cache: Path) -> tuple[Path, int]:
    """A folder and its lock, held; one that another process swept away before it was held is left to it."""
    while True:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=cache))
            lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR)
        except OSError as error:
            raise unwritten(cache, error) from None
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)


@contextlib.contextmanager
def _placing(folder: Path) -> Iterator[None]:
    """Where a side cannot be written into `folder`, of the cache, that is said with the way out."""
    try:
        yield
    except OSError as error:
        raise unwritten(folder.parent, error) from None


def _cache() -> Path:
    """Resolved, as git writes it."""
    return (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowbench" / "sides").resolve()


def _sweep(cache: Path, own: Path) -> None:
    """Remove the folders of processes that are gone: nobody holds their locks, or there has been none for long."""
    for folder in cache.iterdir():
        if folder == own:
            continue
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            with contextlib.suppress(FileNotFoundError):  # another process may be sweeping too
                if time.time() - folder.stat().st_mtime > _LOCKLESS_S:
                    _remove(folder)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _check_out(root: Path, ref: str, commit: str, where: Path) -> Path:
    done = _run(root, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(where), commit)
    if done.returncode != 0:
        what = f"ref {ref!r}"
        raise unplaced(root, done, what, commit) or SideError(
            ref, f"{what} cannot be checked out: {reason(done.stderr)}"
        )
    if (where / ".gitmodules").exists():
        done = _run(where, "submodule", "update", "--init", "--recursive", "--quiet")
        if done.returncode != 0:
            what = f"the submodules of ref {ref!r}"
            raise unplaced(where, done, what) or SideError(ref, f"{what} cannot be checked out: {reason(done.stderr)}")
    return where


def unplaced(
    root: Path, done: subprocess.CompletedProcess[str], what: str, commit: str | None = None
) -> PlaceError | None:
    """The error for `what` that git, run in `root`, failed to check out into the cache; None where it is the commit's fault."""
    repository = (root / (_git(root, "rev-parse", "--git-common-dir") or ".git")).resolve()
    return checkout_fault(done, what, root, repository, _cache(), _needed(root, commit) if commit else Needed())


def _needed(root: Path, commit: str) -> Needed:
    """What the files of a commit take where nothing is put in their place, with the folders that they lie in."""
    rows = [row.partition("\t") for row in (_git(root, "ls-tree", "-r", "-z", "--long", commit) or "").split("\0")]
    sizes = [words.split()[-1] for words, _, _ in rows if words]
    folders = {parent for _, _, name in rows if name for parent in Path(name).parents}
    blocks = sum(-(-int(size) // _BLOCK_BYTES) for size in sizes if size.isdigit())
    return Needed(blocks * _BLOCK_BYTES, len(sizes) + len(folders) + 1)  # git writes one of its own


def _copy(root: Path, where: Path) -> Path:
    """The package of the working tree as it is now: edits made during the sitting change nothing."""
    dirty = [line.split()[-1] for line in _said(root, "status", "--porcelain=v2").splitlines() if _is_dirty(line)]
    if dirty:
        raise FlowbenchError(
            f"submodule {dirty[0]!r} of the working tree has changes of its own, which no commit here tells:"
            " commit them there, or give head as a ref"
        )
    names = _said(root, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", PACKAGE)
    _copy_files(root, where, map(Path, filter(None, names.split("\0"))))
    return where


def _copy_files(root: Path, where: Path, names: Iterable[Path]) -> None:
    for name in names:
        if (root / name).is_file():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, where / name)


def _is_dirty(line: str) -> bool:
    """Whether a line of `git status --porcelain=v2` is of a submodule with changes inside (git-status(1), field <sub>)."""
    words = line.split()
    return len(words) > 2 and words[0] in "12u" and words[2].startswith("S") and ("M" in words[2] or "U" in words[2])


def _linked(source: Path, where: Path, asked: str) -> Path:
    """A folder with nothing but a link to the package of `source`, so that the harness beside it is not imported too."""
    if not (source / PACKAGE / "__init__.py").exists():
        raise SideError(asked, f"{asked!r} has no {PACKAGE}/ with an __init__.py: there is nothing in it to measure")
    where.mkdir()
    (where / PACKAGE).symlink_to(source / PACKAGE)
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(where), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import {PACKAGE}"],
        env=environment, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = _last_line(done.stderr) + _raised_at(done.stderr)
        raise SideError(asked, f"the {PACKAGE} of {asked!r} does not import: {said}")
    return where


def _raised_at(said: str) -> str:
    """The file and line of the last frame of a traceback, in words; empty where it has none."""
    frames = re.findall(r'^  File "([^"\n]+)", line (\d+)', said, re.MULTILINE)
    if not frames:
        return ""
    path, line = frames[-1]
    _, package, rest = path.rpartition(f"/{PACKAGE}/")
    return f" ({package[1:] + rest if package else path}, line {line})"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it says nothing"


def _said(directory: Path, *arguments: str) -> str:
    done = _run(directory, *arguments)
    if done.returncode != 0:
        raise FlowbenchError(f"git {arguments[0]} failed in {directory}: {reason(done.stderr)}")
    return done.stdout


def _git(directory: Path, *arguments: str) -> str | None:
    done = _run(directory, *arguments)
    return done.stdout.strip() if done.returncode == 0 else None


def _run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(directory), *arguments]
    pipe = subprocess.PIPE
    try:
        # A session of its own: what git has started can be ended with it.
        git = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True,
            env=git_environment(),
        )  # fmt: skip
    except OSError as error:
        way_out = used_up(error) or "; install it, or compare two documents"
        raise FlowbenchError(f"git does not run: {error.strerror or error}{way_out}") from None
    with git:
        try:
            stdout, stderr = git.communicate()
        except BaseException:
            _end(git)
            raise
    return subprocess.CompletedProcess(command, git.returncode, stdout, stderr)


def _end(git: subprocess.Popen[str]) -> None:
    """End git and what it has started, which would go on to check out and so make a folder again that we remove."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(git.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            git.communicate(timeout=_GRACE_S)  # to the end of its pipes, which the others hold too
            return
