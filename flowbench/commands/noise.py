"""The noise floors that margins are made of: those that `flowbench aa` has measured in enough sittings."""

from __future__ import annotations

from collections.abc import Mapping

from flowbench.judge.false_alarms import LEAST_SITTINGS
from flowbench.record.noise import NoiseFloor


def sure_floors(known: Mapping[str, NoiseFloor]) -> dict[str, float]:
    """The floors, as fractions by `ENGINE/CASE`, that tell something: of fewer sittings 95 % say nothing."""
    return {name: floor.floor for name, floor in known.items() if floor.sittings >= LEAST_SITTINGS}
