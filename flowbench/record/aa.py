"""The sittings of `flowbench aa` as a file: one line each, written as they come, and read whatever a kill left of it."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flowbench.cell import Case, Count, Name
from flowbench.codec import CodecError, Limit, decode, encode
from flowbench.errors import FlowbenchError, room
from flowbench.record import store
from flowbench.record.quantities import Index, Moment, Seconds
from flowbench.record.run import Git, Machine

_FIRST_LINE = b'{"machine":'  # how the setting begins

Microseconds = Annotated[float, Limit(above=0, maximum=1e12)]


@dataclass(frozen=True)
class Setting:
    """What all sittings of a file share; the first line. `slowdowns` has the fraction of every side that was made slower."""

    machine: Machine
    git: Git | None
    engine: Name
    case: Case
    steps: Count
    warmup: Index
    steps_per_turn: Count
    untimed_per_turn: Index
    pairs: Count
    confirmation_pairs: Count
    least_margin: float
    slowdowns: dict[str, float]
    load: bool


@dataclass(frozen=True)
class Pair:
    """The times in µs of one side's steps, and of base's beside them, in one round."""

    side: Name
    pair: Index
    confirming: bool
    steps_us: tuple[Microseconds, ...]


@dataclass(frozen=True)
class AaSitting:
    """One sitting: the steps of base (`side` base) and of the others, in all rounds; how busy the machine was at its end."""

    started: Moment
    wall_s: Seconds
    load_average: float
    pairs: tuple[Pair, ...]


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the file, which need not be there yet, against other writers; FlowbenchError where there is one or no such place."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from None
    with store.held(path):
        yield


def begin(path: Path, setting: Setting) -> int:
    """Make the file, or go on with one of the same setting; returns how many sittings it has. FlowbenchError for another's."""
    if path.exists() and not _is_cut_short(path):
        before, sittings = read(path)
        different = [name for name in vars(setting) if getattr(setting, name) != getattr(before, name)]
        if different:
            raise FlowbenchError(
                f"{path} has sittings of another setting ({', '.join(different)} differ): choose another file with --out"
            )
        _cut_half_line(path)
        return len(sittings)
    _append(path, encode(setting))
    return 0


def add(path: Path, sitting: AaSitting) -> None:
    """Append a sitting: it is on the disk when this returns."""
    _append(path, encode(sitting))


def read(path: Path) -> tuple[Setting, tuple[AaSitting, ...]]:
    """The setting and all whole sittings of a file, which may be compressed (.xz); FlowbenchError where it has none."""
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        *lines, _half = content.split(b"\n")  # a line without its end was cut by a kill
        if not lines:
            raise ValueError("it has no whole line")
        setting, *sittings = [json.loads(line) for line in lines]
        return decode(Setting, setting), tuple(decode(AaSitting, line) for line in sittings)
    except OSError as error:
        raise FlowbenchError(f"{path}: {error.strerror or error}, expected sittings of flowbench aa") from None
    except (CodecError, ValueError, RecursionError, lzma.LZMAError) as error:
        raise FlowbenchError(f"{path}: {error}, expected sittings of flowbench aa") from None


def _append(path: Path, tree: object) -> None:
    if path.suffix == ".xz":
        raise FlowbenchError(f"{path} is compressed, which is for reading alone: choose a file without .xz with --out")
    line = json.dumps(tree, separators=(",", ":"), allow_nan=False) + "\n"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _unwritten(path, error) from None


def _unwritten(path: Path, error: OSError) -> FlowbenchError:
    return FlowbenchError(
        f"cannot write {path}: {error.strerror or error}; {room(error)}choose another file with --out"
    )


def _is_cut_short(path: Path) -> bool:
    """Whether a kill left nothing but the beginning of the first line, which is removed then."""
    if not path.is_file() or not _FIRST_LINE.startswith(path.read_bytes()[: len(_FIRST_LINE)]):
        return False
    _cut_half_line(path)
    return path.stat().st_size == 0


def _cut_half_line(path: Path) -> None:
    if path.suffix == ".xz":
        return
    try:
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    except OSError as error:
        raise _unwritten(path, error) from None
