"""The noise that margins are made of: what `flowbench aa` has measured in enough sittings."""

from __future__ import annotations

from collections.abc import Mapping

from flowbench.judge.false_alarms import LEAST_SITTINGS
from flowbench.record.noise import NoiseFloor


def sure_floors(known: Mapping[str, NoiseFloor]) -> dict[str, float]:
    """The floors, as fractions by `ENGINE/CASE`, that tell something: of fewer sittings 95 % say nothing."""
    return {name: floor.floor for name, floor in known.items() if floor.sittings >= LEAST_SITTINGS}


def sure_shifts(known: Mapping[str, NoiseFloor]) -> dict[str, float]:
    """The shifts of a sitting, likewise, where they are known."""
    sure = {name: floor.shift for name, floor in known.items() if floor.sittings >= LEAST_SITTINGS}
    return {name: shift for name, shift in sure.items() if shift is not None}
