"""A folder of immutable run documents: its index is made from them, and can be made again from them at any time.

    STORE/runs/RUN_ID.json     one document a run, written once
    STORE/imported/DIGEST.json what old comments said
    STORE/index.json           what each run said of each cell, so that a history need not read every document
    STORE/pruned.txt           ids of runs that were left to go

A document appears under its name in one step, and whoever reads the index first compares it with the folder: so two writers
at once, or one that is killed at any moment, lose nothing. What else lies in the folder is named and left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowbench.codec import CodecError, decode, encode
from flowbench.errors import FlowbenchError, room
from flowbench.judge.points import points_of
from flowbench.record.document import DocumentError, document_text, parse_document
from flowbench.record.points import ImportedPoint, Point
from flowbench.record.quantities import Moment, instant
from flowbench.record.run import RunDocument
from flowbench.record.store import WriteError, way_out, write_whole

INDEX_SCHEMA = "flowbench.store_index"
IMPORTED_SCHEMA = "flowbench.imported"
VERSION = 1
_WAY_OUT = "take a store in a folder that can be written"
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,150}\.json")


@dataclass(frozen=True)
class Entry:
    """A document as the index knows it: its file's size and time of change tell whether it is still the same."""

    run_id: str
    created: Moment
    nbytes: int
    changed_ns: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Stranger:
    """A file in the store that is none of its documents, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Contents:
    """What a store holds: its runs by their time, what was imported, and what does not belong there."""

    entries: tuple[Entry, ...]
    imported: tuple[ImportedPoint, ...]
    strangers: tuple[Stranger, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """All measured points, by the time of their run."""
        return tuple(point for entry in self.entries for point in entry.points)


class Archive:
    """A store at `folder`; it is made when something is first added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.imports = folder / "imported"

    def files(self) -> Iterator[Path]:
        """All files that reading the store reads, and whatever else lies among them."""
        yield from (self.folder / "index.json", self.folder / "pruned.txt")
        for folder in (self.runs, self.imports):
            yield from _files(folder)

    def add(self, document: RunDocument) -> bool:
        """Keep `document`; False where the store has it already. Raises FlowbenchError for one that may still change."""
        if document.ending.how == "running":
            raise FlowbenchError(
                f"run {document.run_id} has no ending: it still runs or was killed, and a store keeps what changes no more;"
                f" finish it with flowbench {'run' if document.comparison is None else 'compare'} --resume, then add it"
            )
        name = f"{document.run_id}.json"
        if not FILE_NAME.fullmatch(name):
            raise FlowbenchError(
                f"run id {document.run_id[:80]!r} cannot be a file's name, expected letters, digits, '.', '_' and '-'"
            )
        return self.add_text(self.runs / name, document_text(document))

    def add_imported(self, name: str, points: tuple[ImportedPoint, ...]) -> bool:
        """Keep imported points under `name`, a digest of where they come from; False where the store has them already."""
        tree = {"schema": IMPORTED_SCHEMA, "schema_version": VERSION, "points": encode(points)}
        return self.add_text(self.imports / f"{name}.json", json.dumps(tree, indent=1, ensure_ascii=False) + "\n")

    def add_text(self, path: Path, text: str) -> bool:
        """Write a new file in one step; False where it is there and the same, FlowbenchError where it is another."""
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(temporary, 0o644)
                os.link(temporary, path)  # unlike a renaming, it never replaces what is there
            except FileExistsError:
                if path.read_text(encoding="utf-8", errors="replace") == text:
                    return False
                raise FlowbenchError(
                    f"{path} is there with other content, and a stored document never changes: give one of the two another"
                    " run id, or move the file away"
                ) from None
            finally:
                os.unlink(temporary)
        return True

    def document(self, run_id: str) -> RunDocument:
        """The stored document `run_id`; raises FlowbenchError where there is none."""
        path = self.runs / f"{run_id}.json"
        if not FILE_NAME.fullmatch(path.name) or not path.is_file():
            raise FlowbenchError(f"no run {run_id[:80]!r} is in {self.folder}; flowbench history lists its runs")
        return parse_document(_bytes_of(path), str(path))

    def contents(self, anew: bool = False) -> Contents:
        """What the store holds. The index is brought up to date on the way; with `anew` it is made from the documents alone.

        Where nothing can be written (no permission, no space, …) the store is read all the same; with `anew`, FlowbenchError.
        """
        if not self.folder.is_dir():
            return Contents((), (), ())
        with self.locked(only_to_read=not anew) as is_held:
            known = {} if anew else self._read_index()
            entries, strangers = self._entries(known)
            if anew:
                self._write_index(entries)
            elif is_held and {entry.run_id: entry for entry in entries} != known:
                with contextlib.suppress(WriteError):
                    self._write_index(entries)
        imported, foreign = self._imported()
        return Contents(tuple(entries), imported, tuple(strangers + foreign))

    def pruned(self) -> set[str]:
        """The ids of runs that were pruned here or elsewhere."""
        path = self.folder / "pruned.txt"
        return set(_bytes_of(path).decode(errors="replace").split()) if path.exists() else set()

    def note_pruned(self, run_ids: set[str]) -> None:
        """Remember that these runs are not to come back."""
        both = self.pruned() | run_ids
        if both != self.pruned():
            self._write("pruned.txt", "".join(f"{run_id}\n" for run_id in sorted(both)))

    @contextlib.contextmanager
    def locked(self, only_to_read: bool = False) -> Iterator[bool]:
        """Hold the index against other processes; false where nothing can be written, and it is `only_to_read`."""
        path = self.folder / ".lock"
        with contextlib.ExitStack() as opened:
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                is_held = True
            except OSError as error:
                if not only_to_read:
                    raise _unwritten(path, error) from None
                is_held = False
            yield is_held

    def _entries(self, known: dict[str, Entry]) -> tuple[list[Entry], list[Stranger]]:
        entries, strangers = [], []
        for path in _files(self.runs):
            try:
                entries.append(_entry(path, known.get(path.stem)))
            except FlowbenchError as error:
                strangers.append(Stranger(path, str(error).removeprefix(f"{path}: ")))
        strangers += [
            Stranger(path, "no part of a store")
            for path in _files(self.folder)
            if path.name not in ("runs", "imported", "index.json", "pruned.txt", ".lock")
        ]
        return sorted(entries, key=lambda entry: (instant(entry.created), entry.run_id)), strangers

    def _imported(self) -> tuple[tuple[ImportedPoint, ...], list[Stranger]]:
        points: dict[ImportedPoint, None] = {}  # the same comment may lie in two exports
        strangers = []
        for path in _files(self.imports):
            try:
                points |= dict.fromkeys(read_imported(_bytes_of(_document_file(path)), str(path)))
            except FlowbenchError as error:
                strangers.append(Stranger(path, str(error).removeprefix(f"{path}: ")))
        return tuple(sorted(points, key=lambda point: (point.instant, point.source))), strangers

    def _read_index(self) -> dict[str, Entry]:
        """What the index says; nothing where it is absent, torn or of another version: it is made anew then."""
        try:
            tree = json.loads((self.folder / "index.json").read_bytes())
            if (tree["schema"], tree["schema_version"]) != (INDEX_SCHEMA, VERSION):
                return {}
            return {entry.run_id: entry for entry in decode(tuple[Entry, ...], tree["runs"])}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write_index(self, entries: list[Entry]) -> None:
        tree = {"schema": INDEX_SCHEMA, "schema_version": VERSION, "runs": encode(entries)}
        self._write("index.json", json.dumps(tree, allow_nan=False))

    def _write(self, name: str, text: str) -> None:
        with way_out(_WAY_OUT):
            write_whole(self.folder / name, text)


def read_imported(content: bytes, source: str) -> tuple[ImportedPoint, ...]:
    """The points of a file that `add_imported` wrote; raises FlowbenchError naming `source`."""
    try:
        tree = json.loads(content.decode("utf-8"))
        if not isinstance(tree, dict) or tree.get("schema") != IMPORTED_SCHEMA or tree.get("schema_version") != VERSION:
            raise FlowbenchError(f"{source}: not a file of imported points, as flowbench history import writes them")
        return decode(tuple[ImportedPoint, ...], tree.get("points"), "$.points")
    except CodecError as error:
        raise FlowbenchError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise FlowbenchError(f"{source}: not JSON: {str(error)[:100]}") from None


def _entry(path: Path, known: Entry | None) -> Entry:
    _document_file(path)
    with _explained(path):
        status = path.stat()
    if known is not None and (known.nbytes, known.changed_ns) == (status.st_size, status.st_mtime_ns):
        return known
    document = parse_document(_bytes_of(path), str(path))
    if document.run_id != path.stem:
        raise DocumentError(f"{path}: holds run {document.run_id[:80]!r}, expected the run its name says")
    return Entry(document.run_id, document.created, status.st_size, status.st_mtime_ns, points_of(document))


def _document_file(path: Path) -> Path:
    """`path`, where it can be a document of the store; raises FlowbenchError with what it is instead."""
    if path.name.startswith("."):
        raise FlowbenchError("half-written: a writer is at work, or was killed; remove it once none is")
    if path.is_symlink() or not path.is_file() or not FILE_NAME.fullmatch(path.name):
        raise FlowbenchError("no document: expected a file RUN_ID.json")
    return path


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FlowbenchError(f"{folder}: {error.strerror}, expected a store's folder") from None


def _bytes_of(path: Path) -> bytes:
    with _explained(path):
        return path.read_bytes()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> FlowbenchError:
    return FlowbenchError(f"{path}: {error.strerror or error}; {room(error)}{_WAY_OUT}")
