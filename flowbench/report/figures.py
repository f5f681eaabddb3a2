"""Chooses what the HTML page draws: which cells make one chart, over which axis, in whose colours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowbench.cell import Case, Cell
from flowbench.judge.series import STEP_TIME, Series
from flowbench.record.profile import Profile
from flowbench.report import charts
from flowbench.report.charts import Line, Mark, Point
from flowbench.report.facts import Comparison, Facts, Side
from flowbench.report.peaks import MEMORY_KINDS, MIB, TELLING_KINDS
from flowbench.report.templating import Ready
from flowbench.report.words import counted, interval, milliseconds

MOST_CHARTS = 24


@dataclass(frozen=True)
class Figure:
    """A chart with its caption, its legend and what the page's filters ask of it."""

    title: str
    caption: str
    svg: Ready
    legend: tuple[tuple[str, int], ...]
    model: str
    world_sizes: str


@dataclass(frozen=True)
class History:
    """A chart of a cell's history on a machine; `imported` from old comments. `model` is empty where it is not known."""

    title: str
    caption: str
    svg: Ready
    model: str
    world_sizes: str
    imported: bool


def colours_of(facts: Facts) -> Mapping[str, int]:
    """A colour from 0 to 5 for each engine by its name, the same in all charts; 0 is the reference's alone."""
    subjects = dict.fromkeys(comparison.subject.name for comparison in facts.comparisons)
    colours = {name: 1 + number % 5 for number, name in enumerate(name for name in subjects if name != facts.reference)}
    return colours | ({facts.reference: 0} if facts.reference else {})


def figures_of(facts: Facts) -> Iterator[Figure]:
    """Relative speed and memory over batch sizes, then over world sizes; cases that differ in more make charts of their own."""
    axes: list[tuple[str, Callable[[Case], Case], Callable[[Case], int]]] = [
        ("batch size", _without_batch, lambda case: case.input_shape[0]),
        ("world size", _without_world, lambda case: case.world_size),
    ]
    colours = colours_of(facts)
    for word, common, value in axes:
        groups: dict[Case, list[Comparison]] = {}
        for comparison in facts.comparisons:
            if comparison.case.input_shape:
                groups.setdefault(common(comparison.case), []).append(comparison)
        for case, members in groups.items():
            if len({value(member.case) for member in members}) > 1:
                label = case.label.replace("[0,", "[N,").replace("[0]", "[N]")
                yield from filter(None, (_speed(facts, members, label, word, value, colours),
                                         _memory(members, label, word, value, colours)))  # fmt: skip


def histories_of(facts: Facts) -> Iterator[History]:
    """The histories of this document's cells, measured ones, then those that old comments tell; what shifted comes first."""
    # A comparison measures a cell twice, under names of its own: both are that cell.
    engines = {engine.name: engine.registered_name for engine in facts.document.engines}
    cells = {Cell.of(cell.case, engines[cell.engine]).key: cell for cell in facts.document.cells}
    for series in sorted(facts.history, key=lambda one: (one.imported, not one.shifts)):
        cell = cells.get(series.cell)
        if cell is None and not series.imported:
            continue
        for quantity in dict.fromkeys([STEP_TIME, *(shift.quantity for shift in series.shifts)]):
            svg = _history_chart(series, quantity)
            if svg is not None:
                what = "step time, ms" if quantity == STEP_TIME else f"{quantity}, MiB"
                yield History(
                    title=series.label,
                    caption=f"{what}; {series.machine}",
                    svg=svg,
                    model=cell.model if cell else "",
                    world_sizes=str(cell.world_size) if cell else "",
                    imported=series.imported,
                )


def _history_chart(series: Series, quantity: str) -> Ready | None:
    """One quantity over the points in their order, the shifts of its level as marks; None for fewer than two points."""
    in_time = quantity == STEP_TIME
    points: list[Point] = []
    places: dict[int, int] = {}
    for index, one in enumerate(series.points):
        value = one.time_ms if in_time else one.peaks.get(quantity, 0) / MIB
        if not value:
            continue
        places[index] = len(points)
        low, high = (one.low_ms, one.high_ms) if in_time else (None, None)
        commit = f", {one.commit[:10]}{' and changes' if one.dirty else ''}" if one.commit else ""
        told = f"{milliseconds(value)} {'ms' if in_time else 'MiB'}, {(one.when or 'no date')[:10]}{commit}"
        points.append(Point(len(points), value, low, high, told, hollow=series.imported))
    if len(points) < 2:
        return None
    marks = [
        Mark(places[shift.index], f"× {shift.ratio:.3f}", f"{shift.quantity} × {shift.ratio:.3f} from here on")
        for shift in series.shifts
        if shift.quantity == quantity and shift.index in places
    ]
    dates = [(series.points[index].when or "")[:10] for index in places]
    ends = [(0.0, dates[0] or "first"), (float(len(points) - 1), dates[-1] or "last")]
    line = Line(series.label, 2 if series.imported else 1, tuple(points))
    what = f"{quantity} of {series.label} on {series.machine}"
    if marks:
        what += (
            " (shifts: "
            + ", ".join(f"{mark.word} at {dates[int(mark.x)] or 'an unknown date'}" for mark in marks)
            + ")"
        )
    return charts.line_chart([line], what, "runs in their order", ticks=ends, marks=marks, joined=not series.imported)


def memory_timeline(profile: Profile) -> Ready | None:
    """What the allocator held over one profiled step; None where the engine cannot tell."""
    if not profile.timeline or profile.timeline[-1].at_ms <= 0:
        return None
    points = [(point.at_ms, point.allocated_bytes / MIB) for point in profile.timeline]
    peak = None
    if profile.peak_bytes is not None and profile.peak_at_ms is not None:
        peak = (profile.peak_at_ms, profile.peak_bytes / MIB)
    words = f"Memory over one step of {profile.step_ms:.3g} ms" + (
        f", peak {peak[1]:.0f} MiB at {peak[0]:.3g} ms" if peak else ""
    )
    return charts.area_chart(points, words, "MiB", peak)


def _speed(
    facts: Facts,
    members: Sequence[Comparison],
    label: str,
    word: str,
    value: Callable[[Case], int],
    colours: Mapping[str, int],
) -> Figure | None:
    """Relative speed where there is a reference, else the step times."""
    points: dict[str, list[Point]] = {}
    relative = facts.reference is not None
    for member in members:
        at, name = value(member.case), member.subject.name
        if relative and member.ratio:
            low, high = member.ratio.telling_interval or (None, None)
            told = f"{member.ratio.geometric_mean:.2f} at {at} ({interval(member.ratio.interval)})"
            points.setdefault(name, []).append(
                Point(at, member.ratio.geometric_mean, low, high, told, hollow=low is None)
            )
        elif not relative and member.subject.times:
            time_ms = member.subject.times.median_ms
            points.setdefault(name, []).append(Point(at, time_ms, note=f"{milliseconds(time_ms)} ms at {at}"))
    what = f"Speed relative to {facts.reference}" if relative else "Median step time, ms"
    caption = "above 1 is faster; bars are 95 % intervals" if relative else "below is faster"
    if relative and any(point.hollow for own in points.values() for point in own):
        caption += ", hollow dots of too few pairs"
    return _figure(members, points, label, what, caption, word, colours, 1.0 if relative else None)


def _memory(
    members: Sequence[Comparison], label: str, word: str, value: Callable[[Case], int], colours: Mapping[str, int]
) -> Figure | None:
    """The kind of peak that most sides have, of several the most telling one; of each side's largest rank."""
    sides: dict[tuple[str, int], Side] = {}
    for member in members:
        for side in (member.reference, member.subject):
            if side is not None and side.memory:
                sides.setdefault((side.name, value(member.case)), side)
    known = {kind: sum(side.largest_peak(kind) is not None for side in sides.values()) for kind in MEMORY_KINDS}
    if not any(known.values()):
        return None
    kind = max((*TELLING_KINDS, *known), key=lambda kind: known[kind])  # of equals, the first
    points: dict[str, list[Point]] = {}
    for (name, at), side in sides.items():
        peak = side.largest_peak(kind)
        if peak is not None:
            points.setdefault(name, []).append(Point(at, peak / MIB, note=f"{peak / MIB:.0f} MiB at {at}"))
    return _figure(
        members, points, label, f"Memory, {kind}, MiB", "of the largest rank; below needs less", word, colours, None
    )


def _figure(
    members: Sequence[Comparison],
    points: Mapping[str, list[Point]],
    label: str,
    what: str,
    caption: str,
    word: str,
    colours: Mapping[str, int],
    level: float | None,
) -> Figure | None:
    lines = [
        Line(name, colours[name], tuple(sorted(own, key=lambda point: point.x)))
        for name, own in sorted(points.items(), key=lambda item: colours[item[0]])
    ]
    if not lines:
        return None
    return Figure(
        title=what,
        caption=f"{label}; {caption}",
        svg=charts.line_chart(lines, f"{what}, {label}", word, level=level, from_zero=level is None, logarithmic=True),
        legend=tuple((line.name, line.colour) for line in lines),
        model=members[0].case.model,
        world_sizes=" ".join(map(str, sorted({member.case.world_size for member in members}))),
    )


def _without_batch(case: Case) -> Case:
    return dataclasses.replace(case, input_shape=(0, *case.input_shape[1:]))


def _without_world(case: Case) -> Case:
    return dataclasses.replace(case, world_size=1, ddp=False, broadcast_buffers=True)


def left_out_words(shown: int, all_of: int, what: str = "chart") -> str:
    """What is said where not all are drawn; empty where they are."""
    return "" if shown == all_of else f"{counted(all_of - shown, f'more {what}')} left out, for the page's size."
