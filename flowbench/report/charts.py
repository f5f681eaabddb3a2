"""Draws the charts of the HTML page as inline SVG: sizes for a phone's width, colours from the page's style sheet."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowbench.report.templating import Ready
from flowbench.report.words import one_line

_WIDTH, _HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 34
_MOST_BEYOND = 0.5  # how far intervals stretch an axis, by the extent of all points
_MOST_WORDS = 40  # points told in words to a screen reader, beyond them the table serves


@dataclass(frozen=True)
class Point:
    """A value with the ends of its interval, and what a pointer resting on it shows."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class Line:
    """One engine's points, in the order of x, in one of the page's colours 0 to 5."""

    name: str
    colour: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Mark:
    """A vertical line at x with a word beside it, for example a change point."""

    x: float
    word: str
    note: str


class Scale:
    """Maps values to pixels, linearly or by logarithm; a single value lies in the middle."""

    def __init__(self, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False) -> None:
        self._logarithmic = logarithmic
        known = [self._of(value) for value in values]
        low, high = min(known, default=0.0), max(known, default=1.0)
        if high - low < 1e-12:
            low, high = low - 0.5, high + 0.5
        self._low, self._factor, self._start = low, (end - start) / (high - low), start

    def __call__(self, value: float) -> float:
        """The pixel of `value`."""
        return self._start + (self._of(value) - self._low) * self._factor

    def _of(self, value: float) -> float:
        return math.log(value) if self._logarithmic else value


def line_chart(
    lines: Sequence[Line],
    what: str,
    x_word: str,
    *,
    level: float | None = None,
    from_zero: bool = False,
    logarithmic: bool = False,
    ticks: Sequence[tuple[float, str]] | None = None,
    marks: Sequence[Mark] = (),
    joined: bool = True,
) -> Ready:
    """Lines with intervals over one x axis; `level` is drawn as a line of its own (a ratio's 1).

    An interval that goes far beyond all points would flatten them: it ends in an arrow at the edge.
    """
    points = [point for line in lines for point in line.points]
    heights = [point.y for point in points] + [*([0.0] if from_zero else []), *([] if level is None else [level])]
    room = _MOST_BEYOND * (max(heights) - min(heights) or abs(max(heights)))
    edges = min(heights) - room, max(heights) + room
    heights += [min(max(y, edges[0]), edges[1]) for point in points for y in (point.low, point.high) if y is not None]
    y_ticks = nice_ticks(min(heights), max(heights))
    y = Scale(y_ticks, _HEIGHT - _BOTTOM, _TOP)
    xs = sorted({point.x for point in points})
    x = Scale([*xs, *(mark.x for mark in marks)], _LEFT + 8, _WIDTH - _RIGHT - 8, logarithmic=logarithmic)
    shapes = [*_y_axis(y_ticks, y), *_x_axis(ticks or _thinned(xs, x), x, x_word)]
    if level is not None:
        shapes.append(f'<path class="level" d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}"/>')
    shapes += [_mark(mark, x) for mark in marks]
    # Intervals at one x would hide each other: each line stands a little beside the next.
    shapes += [_drawn(line, x, y, joined, 3 * (index - (len(lines) - 1) / 2)) for index, line in enumerate(lines)]
    return _svg(shapes, _WIDTH, _HEIGHT, f"{what} over {x_word}. {_in_words(lines)}")


def strip(ratios: Sequence[float], interval: tuple[float, float] | None, mean: float, what: str) -> Ready:
    """The distribution of a cell's pairs: a dot per pair, the interval as a band, 1 as a line."""
    width, height, middle = _WIDTH, 78, 34
    ends = [*ratios, 1.0, *(interval or ())]
    ticks = nice_ticks(min(ends), max(ends), 4)
    x = Scale(ticks, 16, width - 16)
    shapes = [f'<path class="axis" d="M8 {height - 22}H{width - 8}"/>']
    for tick in ticks:
        shapes.append(f'<text class="tick" x="{x(tick):.1f}" y="{height - 7}" text-anchor="middle">{tick:g}</text>')
        shapes.append(f'<path class="axis" d="M{x(tick):.1f} {height - 22}v4"/>')
    if interval:
        low, high = x(interval[0]), x(interval[1])
        shapes.append(
            f'<rect class="band" x="{low:.1f}" y="{middle - 14}" width="{max(high - low, 1):.1f}" height="28"/>'
        )
    shapes.append(f'<path class="level" d="M{x(1):.1f} 6V{height - 22}"/>')
    shapes.append(f'<path class="mean" d="M{x(mean):.1f} {middle - 14}v28"/>')
    for index, ratio in enumerate(ratios):
        # Pairs of one value would hide each other: they step up and down in turn.
        offset = (index % 5 - 2) * 5
        shapes.append(
            f'<circle class="pair" cx="{x(ratio):.1f}" cy="{middle + offset}" r="3.5">'
            f"<title>pair {index + 1}: {ratio:.3f}</title></circle>"
        )
    return _svg(shapes, width, height, what, "strip")


def interval_bar(ratio: float, interval: tuple[float, float] | None, ends: tuple[float, float], colour: int) -> Ready:
    """A ratio with its interval for a table's row, on one logarithmic scale with all other rows; told beside in figures."""
    width, height = 120, 14
    low, high = ends
    x = Scale([low, high], 4, width - 4, logarithmic=True)
    parts = [f'<path class="level" d="M{x(1):.1f} 0V{height}"/>']
    if interval:
        left, right = (x(min(max(end, low), high)) for end in interval)
        parts.append(f'<path class="whisker" d="M{left:.1f} 7H{right:.1f}"/>')
    parts.append(f'<circle class="dot" cx="{x(min(max(ratio, low), high)):.1f}" cy="7" r="3"/>')
    return Ready(
        f'<svg class="bar c{colour}" viewBox="0 0 {width} {height}" aria-hidden="true" focusable="false">{"".join(parts)}</svg>'
    )


def area_chart(points: Sequence[tuple[float, float]], what: str, unit: str, peak: tuple[float, float] | None) -> Ready:
    """A held amount over the time of a step, as steps, with its peak marked; x in ms, y in `unit`."""
    ticks = nice_ticks(0.0, max([height for _, height in points] + [peak[1] if peak else 0.0]))
    y = Scale(ticks, _HEIGHT - _BOTTOM, _TOP)
    x_ticks = [tick for tick in nice_ticks(0.0, points[-1][0]) if tick <= points[-1][0]]
    x = Scale([0.0, points[-1][0]], _LEFT, _WIDTH - _RIGHT)
    path = f"M{x(0):.1f} {y(0):.1f}" + "".join(f"H{x(at):.1f}V{y(height):.1f}" for at, height in points)
    shapes = [
        f'<path class="area" d="{path}V{y(0):.1f}Z"/>',
        *_y_axis(ticks, y),
        *_x_axis([(tick, f"{tick:g}") for tick in x_ticks], x, "ms into the step"),
    ]
    if peak:
        at, height = peak
        near_end = at > points[-1][0] * 0.7
        shapes.append(f'<circle class="peak" cx="{x(at):.1f}" cy="{y(height):.1f}" r="4"/>')
        shapes.append(
            f'<text class="name" x="{x(at) + (-8 if near_end else 8):.1f}" y="{max(y(height) + 4, 16):.1f}"'
            f' text-anchor="{"end" if near_end else "start"}">peak {height:,.0f} {unit}</text>'.replace(",", " ")
        )
    return _svg(shapes, _WIDTH, _HEIGHT, what)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about so many: steps of 1, 2 or 5 times a power of ten."""
    if high - low < 1e-9 * max(abs(high), 1e-9):
        low, high = low - abs(low) * 0.1 - 1e-9, high + abs(high) * 0.1 + 1e-9
    raw = (high - low) / max(about - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def _y_axis(ticks: Sequence[float], y: Scale) -> list[str]:
    shapes = []
    for tick in ticks:
        shapes.append(f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{_WIDTH - _RIGHT}"/>')
        word = f"{tick:,.0f}".replace(",", " ") if abs(tick) >= 1000 else f"{tick:g}"
        shapes.append(f'<text class="tick" x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{word}</text>')
    return shapes


def _x_axis(ticks: Sequence[tuple[float, str]], x: Scale, word: str) -> list[str]:
    line = _HEIGHT - _BOTTOM
    shapes = [f'<path class="axis" d="M{_LEFT} {line}H{_WIDTH - _RIGHT}"/>']
    for value, text in ticks:
        at = x(value)
        # A long word at an end of the axis, a date, stays inside of it.
        outside = len(text) > 5 and min(at - _LEFT, _WIDTH - _RIGHT - at) < 30
        side = "middle" if not outside else "start" if at < _WIDTH / 2 else "end"
        shapes.append(f'<path class="axis" d="M{at:.1f} {line}v4"/>')
        shapes.append(f'<text class="tick" x="{at:.1f}" y="{line + 15}" text-anchor="{side}">{_escaped(text)}</text>')
    shapes.append(
        f'<text class="word" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">'
        f"{_escaped(word)}</text>"
    )
    return shapes


def _thinned(values: Sequence[float], x: Scale, least: float = 26) -> list[tuple[float, str]]:
    """Ticks at the values themselves, as many as have room; powers of two first, which batch sizes mostly are."""
    taken: list[float] = []
    for value in sorted(values, key=lambda value: (not math.log2(value).is_integer() if value > 0 else True, value)):
        if all(abs(x(value) - x(other)) >= least for other in taken):
            taken.append(value)
    return [(value, f"{value:g}") for value in sorted(taken)]


def _mark(mark: Mark, x: Scale) -> str:
    at = x(mark.x)
    side = "end" if at > _WIDTH * 0.6 else "start"
    return (
        f'<g class="mark"><path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}"/><text class="word" '
        f'x="{at + (-4 if side == "end" else 4):.1f}" y="{_TOP + 8}" text-anchor="{side}">{_escaped(mark.word)}</text>'
        f"<title>{_escaped(mark.note)}</title></g>"
    )


def _drawn(line: Line, x: Scale, y: Scale, joined: bool, beside: float) -> str:
    parts = []
    many = len(line.points) > 40
    if joined and len(line.points) > 1:
        path = "L".join(f"{x(point.x) + beside:.1f} {y(point.y):.1f}" for point in line.points)
        parts.append(f'<path class="line" d="M{path}"/>')
    ends = [(x(point.x) + beside, point.low, point.high) for point in line.points]
    if many:  # so many intervals side by side are a band
        known = [
            (at, _within(y(low)), _within(y(high))) for at, low, high in ends if low is not None and high is not None
        ]
        way = [f"{at:.1f} {low:.1f}" for at, low, _ in known] + [
            f"{at:.1f} {high:.1f}" for at, _, high in reversed(known)
        ]
        way_text = "L".join(way)
        parts.insert(0, f'<path class="spread" d="M{way_text}Z"/>' if known else "")
    for point in line.points:
        at = x(point.x) + beside
        if not many and point.low is not None and point.high is not None:
            parts.append(_whisker(at, y(point.low), y(point.high)))
        kind = "dot hollow" if point.hollow else "dot"
        parts.append(
            f'<circle class="{kind}" cx="{at:.1f}" cy="{y(point.y):.1f}" r="{1.6 if many else 3}">'
            f"<title>{_escaped(f'{line.name}: {point.note}')}</title></circle>"
        )
    return f'<g class="c{line.colour}" data-engine="{_escaped(line.name)}">{"".join(parts)}</g>'


def _whisker(at: float, low: float, high: float) -> str:
    """An interval from pixel `low` up to pixel `high`, with an arrow where it goes on beyond the chart."""
    ends = _within(low), _within(high)
    arrows = [
        f"M{at - 3:.1f} {end + turn:.1f}L{at:.1f} {end:.1f}L{at + 3:.1f} {end + turn:.1f}"
        for end, whole, turn in zip(ends, (low, high), (-4, 4), strict=True)
        if end != whole
    ]
    return f'<path class="whisker" d="M{at:.1f} {ends[0]:.1f}V{ends[1]:.1f}{"".join(arrows)}"/>'


def _within(pixel: float) -> float:
    return min(max(pixel, _TOP), _HEIGHT - _BOTTOM)


def _in_words(lines: Sequence[Line]) -> str:
    told = []
    for line in lines:
        shown = line.points[:_MOST_WORDS]
        more = f" and {len(line.points) - len(shown)} more" if len(line.points) > len(shown) else ""
        told.append(f"{line.name}: {'; '.join(point.note for point in shown)}{more}.")
    return " ".join(told)


def _svg(shapes: Iterable[str], width: int, height: int, what: str, kind: str = "chart") -> Ready:
    return Ready(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{_escaped(what)}">'
        f"{''.join(shapes)}</svg>"
    )


def _escaped(text: str) -> str:
    return html.escape(one_line(text, 4000))
