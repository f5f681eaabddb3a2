"""Charts of the page: what an axis spans, and how an interval that leaves it is drawn."""

from __future__ import annotations

import dataclasses
import re

from flowbench.record.run import RunDocument
from flowbench.report import render
from flowbench.report.charts import Line, Point, line_chart


def _ticks(svg: str) -> list[float]:
    return [float(text.replace(" ", "")) for text in re.findall(r'text-anchor="end">([^<]+)</text>', svg)]


def _whiskers(svg: str) -> list[str]:
    return re.findall(r'class="whisker" d="([^"]+)"', svg)


def test_an_interval_beyond_all_points_does_not_flatten_them() -> None:
    points = (Point(1, 2.9, 2.1, 4.1), Point(4, 2.5, 0.2, 31.1), Point(64, 1.8, 1.8, 1.85))
    svg = line_chart([Line("Flow", 1, points)], "speed", "batch size", level=1.0)
    assert max(_ticks(svg)) <= 4
    beyond, wide, narrow = _whiskers(svg)
    # An arrow where it goes on: one more move and two lines for each end outside.
    assert [path.count("M") for path in (beyond, wide, narrow)] == [2, 2, 1]


def test_intervals_near_the_points_are_drawn_whole() -> None:
    points = (Point(1, 2.0, 1.9, 2.2), Point(2, 1.5, 1.4, 1.6))
    svg = line_chart([Line("Flow", 1, points)], "speed", "batch size", level=1.0)
    assert [path.count("M") for path in _whiskers(svg)] == [1, 1]


def test_memory_is_drawn_as_what_tensors_took_where_every_side_counts_it(documents: dict[str, RunDocument]) -> None:
    document = documents["two_cells"]
    assert "Memory, peak resident, MiB" in render(document, "html")

    def counted(rank):
        return dataclasses.replace(rank, memory=dataclasses.replace(rank.memory, allocated_peak_bytes=3 << 20))

    samples = [dataclasses.replace(one, ranks=tuple(map(counted, one.ranks))) for one in document.samples]
    assert "Memory, peak allocated, MiB" in render(dataclasses.replace(document, samples=tuple(samples)), "html")
