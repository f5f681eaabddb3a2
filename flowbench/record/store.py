"""Where run documents are kept: one file a run, never overwritten by another, whole at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from flowbench.errors import FlowbenchError, room
from flowbench.record.document import document_text
from flowbench.record.run import RunDocument

# The bytes of a file's name up to which names made from it have room too: a file system takes 255, some of them 143.
_LONGEST_NAME = 100


class WriteError(FlowbenchError):
    """A file that cannot be written: `what` says which and why, without the way out for a new one.

    `first` is how any way out begins: that space is to be freed, or nothing.
    """

    def __init__(self, what: str, way_out: str, first: str = "") -> None:
        super().__init__(f"{what}; {first}{way_out}")
        self.what = what
        self.first = first


@contextlib.contextmanager
def way_out(words: str) -> Iterator[None]:
    """What is said, meanwhile, to do about a file that cannot be written where --out does not choose its folder."""
    try:
        yield
    except WriteError as error:
        raise WriteError(error.what, words, error.first) from None


def new_run_id(created: datetime) -> str:
    """A name for a run: its time, so that files sort, and six digits against two runs in one second."""
    return f"{created:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def create(directory: Path, document: RunDocument) -> Path:
    """Write a new document as DIRECTORY/RUN_ID.json; raises FlowbenchError where that cannot be."""
    path = directory / f"{document.run_id}.json"
    with _explained(path):
        directory.mkdir(parents=True, exist_ok=True)
        path.open("x").close()
    try:
        replace(path, document)
    except BaseException:
        path.unlink(missing_ok=True)  # an empty file is no document
        raise
    return path


def replace(path: Path, document: RunDocument) -> None:
    """Write the document's next state: a reader, or a kill at any moment, finds the one before or this one, whole."""
    write_whole(followed(path), document_text(document))


def followed(path: Path) -> Path:
    """The file itself where `path` is a link to it: a document has one lock and one place, whatever names lead there."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, by whatever spelling or link; also where it is not there yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file by way of a temporary one beside it; raises FlowbenchError (no space, no permission, …)."""
    with _explained(path):
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=hidden_name(path))
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        _sync_directory(path.parent)


def hidden_name(path: Path) -> str:
    """How the names of hidden files beside `path` begin that are about it: its whole name, or a digest of a long one."""
    name = os.fsencode(path.name)
    return f".{path.name}." if len(name) <= _LONGEST_NAME else f".{hashlib.sha256(name).hexdigest()[:32]}."


def lock_path(path: Path) -> Path:
    """The file that is there while another is held. No other program has files of such a name: at the end it is removed."""
    path = followed(path)
    return path.parent / f"{hidden_name(path)}flowbench.lock"


@contextlib.contextmanager
def held(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold a file against other writers; FlowbenchError where another process still writes it after `patience_s`."""
    name, until = lock_path(path), time.monotonic() + patience_s
    while True:
        lock = _locked(name)
        if lock is not None and _is_there(name, lock):
            break
        if lock is not None:
            # Its last holder took the file away between our opening and our locking it: another may hold a new one.
            os.close(lock)
            continue
        if time.monotonic() < until:
            time.sleep(0.01)
            continue
        raise FlowbenchError(f"{path}: another process is writing this run: wait for it to end")
    try:
        yield
    finally:
        if not os.fstat(lock).st_size:  # what is written in is somebody's after all
            name.unlink(missing_ok=True)
        os.close(lock)


def _locked(name: Path) -> int | None:
    """The opened file, locked; None where another process has locked it."""
    with _explained(name):
        lock = os.open(name, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if isinstance(error, BlockingIOError):
                return None
            raise
    return lock


def _is_there(name: Path, opened: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(name), os.fstat(opened))
    return False


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        raise WriteError(what, "choose another folder with --out", room(error)) from None
