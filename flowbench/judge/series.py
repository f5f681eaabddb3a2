"""The history of a cell on a machine: its points in the order of time, and where its level shifted. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flowbench.judge.change_points import level_shifts
from flowbench.record.points import ImportedPoint, Point

STEP_TIME = "step time"
# Memory that shifts by less than this is what an allocator's rounding and a library's own buffers come to.
_MEMORY_MARGIN = 0.005
_TIME_MARGIN = 0.01


@dataclass(frozen=True)
class SeriesPoint:
    """One point. `status` is why there is no time; `source` is the run's id, or where a comment was read.

    `peaks` are bytes by kind, the largest of all ranks. `relative_interval` is None for one pair, and for what was imported.
    """

    when: str | None
    source: str
    commit: str | None
    dirty: bool
    status: str
    time_ms: float | None
    low_ms: float | None
    high_ms: float | None
    relative_speed: float | None
    peaks: dict[str, int] = field(default_factory=dict)
    relative_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Shift:
    """From `points[index]` on, the level of `quantity` is `after`, before it was `before`: medians, in ms or bytes.

    `quantity` is `step time` or a kind of memory peak.
    """

    index: int
    quantity: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """After / before: above 1, it takes more."""
        return self.after / self.before


@dataclass(frozen=True)
class Series:
    """One cell on one machine. Imported ones come from old comments: `cell` is their label then, `machine` the GPU's name."""

    cell: str
    label: str
    machine: str
    imported: bool
    points: tuple[SeriesPoint, ...]
    shifts: tuple[Shift, ...] = ()


def measured_series(points: Iterable[Point]) -> tuple[Series, ...]:
    """The series of measured points, which come in the order of time; without shifts."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.cell, point.machine), []).append(point)
    return tuple(
        Series(cell, members[-1].label, machine, False, tuple(map(_measured, members)))
        for (cell, machine), members in groups.items()
    )


def imported_series(points: Iterable[ImportedPoint]) -> tuple[Series, ...]:
    """The series of imported points; those whose date is not known come first, in the order they were given."""
    groups: dict[tuple[str, str], list[ImportedPoint]] = {}
    for point in points:
        groups.setdefault((point.label, point.machine), []).append(point)
    return tuple(
        Series(label, label, machine, True, tuple(map(_imported, sorted(members, key=lambda point: point.instant))))
        for (label, machine), members in groups.items()
    )


def chosen(series: Iterable[Series], cell: str | None, machine: str | None) -> tuple[Series, ...]:
    """The series whose cell and machine fit the patterns: `*` and `?` as in a shell, a plain text is looked for anywhere."""
    return tuple(one for one in series if fits(cell, one.cell, one.label) and fits(machine, one.machine))


def fits(pattern: str | None, *names: str) -> bool:
    """Whether a pattern fits one of `names`, as in `chosen`. Brackets stand for themselves: labels have shapes in them."""
    if pattern is None:
        return True
    wide = pattern if "*" in pattern or "?" in pattern else f"*{pattern}*"
    return any(fnmatch.fnmatchcase(name.lower(), wide.lower().replace("[", "[[]")) for name in names)


def with_shifts(series: Series) -> Series:
    """The series with the shifts of its step times and of each kind of memory peak; FlowbenchError without ruptures."""
    kinds = dict.fromkeys(kind for point in series.points for kind in point.peaks)
    found = _shifts(STEP_TIME, [point.time_ms for point in series.points], _TIME_MARGIN)
    for kind in kinds:
        found += _shifts(kind, [point.peaks.get(kind) for point in series.points], _MEMORY_MARGIN)
    return replace(series, shifts=tuple(sorted(found, key=lambda shift: shift.index)))


def _shifts(quantity: str, values: Sequence[float | None], margin: float) -> list[Shift]:
    places = [index for index, value in enumerate(values) if value]
    found = level_shifts([value for value in values if value], margin)
    return [Shift(places[index], quantity, before, after) for index, before, after in found]


def _measured(point: Point) -> SeriesPoint:
    return SeriesPoint(
        when=point.created,
        source=point.run_id,
        commit=point.commit,
        dirty=point.dirty,
        status=point.status,
        time_ms=point.time_ms,
        low_ms=point.low_ms,
        high_ms=point.high_ms,
        relative_speed=point.relative_speed,
        peaks=point.memory,
        relative_interval=point.relative_interval,
    )


def _imported(point: ImportedPoint) -> SeriesPoint:
    return SeriesPoint(
        when=point.date,
        source=point.source,
        commit=None,
        dirty=False,
        status="ok",
        time_ms=point.time_ms,
        low_ms=None,
        high_ms=None,
        relative_speed=point.relative_speed,
    )
