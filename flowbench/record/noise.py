"""The noise floors of machines: how large a change the same commit shows against itself, kept for later comparisons."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from flowbench.cell import Count
from flowbench.codec import CodecError, Limit, decode, encode
from flowbench.errors import FlowbenchError, room
from flowbench.record import store
from flowbench.record.quantities import Index, Moment, Text
from flowbench.record.run import Machine

# Who writes it holds it for moments: two sittings on one machine may end at the same time.
_PATIENCE_S = 30.0

_WAY_OUT = "set XDG_STATE_HOME to another folder"


@dataclass(frozen=True)
class NoiseFloor:
    """95 % of `sittings` of one engine at one case (`ENGINE/CASE`), same commit on both sides, showed a change up to `floor`.

    `alarms` of them were judged `slower` or `faster`, each of which was false. 95 % are off by up to `shift` in all their
    pairs together, which their own intervals do not tell; None where an earlier version measured, which did not say.
    """

    cell: Text
    floor: Annotated[float, Limit(minimum=0, maximum=10)]
    sittings: Count
    alarms: Index
    measured: Moment
    shift: Annotated[float, Limit(minimum=0, maximum=10)] | None = None


@dataclass(frozen=True)
class MachineNoise:
    """The noise floors of one machine."""

    machine: Machine
    floors: tuple[NoiseFloor, ...]


@dataclass(frozen=True)
class NoiseFile:
    """What is known of all machines that share this home folder."""

    machines: tuple[MachineNoise, ...]


def noise_path() -> Path:
    """Where the noise floors are kept: in the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "flowbench" / "noise.json"


def read_floors(machine: Machine, path: Path | None = None) -> dict[str, NoiseFloor]:
    """The noise floors known of `machine`, by `ENGINE/CASE`; FlowbenchError for a file that cannot be read."""
    for known in _read(path or noise_path()).machines:
        if not known.machine.differences(machine):
            return {floor.cell: floor for floor in known.floors}
    return {}


def keep_floor(machine: Machine, floor: NoiseFloor, path: Path | None = None) -> None:
    """Write a noise floor down, in place of an older one of the same cell and machine."""
    path = path or noise_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store.WriteError(f"cannot write {path}: {error.strerror or error}", _WAY_OUT, room(error)) from None
    with store.way_out(_WAY_OUT), store.held(path, _PATIENCE_S):
        floors = {**read_floors(machine, path), floor.cell: floor}
        others = [known for known in _read(path).machines if known.machine.differences(machine)]
        file = NoiseFile((*others, MachineNoise(machine, tuple(floors.values()))))
        store.write_whole(path, json.dumps(encode(file), indent=1, allow_nan=False) + "\n")


def _read(path: Path) -> NoiseFile:
    try:
        return decode(NoiseFile, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return NoiseFile(())
    except (OSError, CodecError, ValueError, RecursionError) as error:
        raise FlowbenchError(f"{path}: {error}; it keeps noise floors: delete it, and measure them again") from None
