"""The relative speed has one definition: what a run's report says of a cell, a comparison and its point in a series say too."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from sittings import CASE, plain, sitting

from flowbench.cell import Cell
from flowbench.judge.compare import judge_document
from flowbench.judge.documents import judge_documents
from flowbench.judge.points import points_of
from flowbench.record.run import RunDocument
from flowbench.report.facts import facts_of

# Means, medians and the faster half of these steps all differ.
STEPS = (1.0, 1.1, 1.5, 4.0)


def uneven(document: RunDocument) -> RunDocument:
    """The document with steps that take unlike lengths, other ones in the reference's processes than elsewhere."""
    samples = []
    for sample in document.samples:
        factors = STEPS if sample.cell.startswith("torch-eager/") else (1.0, 1.2, 1.4, 1.6)
        ranks = tuple(
            dataclasses.replace(rank, steps_ms=tuple(map(float.__mul__, rank.steps_ms, factors)))
            for rank in sample.ranks
        )
        samples.append(dataclasses.replace(sample, ranks=ranks))
    return dataclasses.replace(document, samples=tuple(samples))


def expected(document: RunDocument, engine: str) -> float:
    """The geometric mean over rounds of median reference time / median time."""
    (cell,) = [cell for cell in document.cells_of(CASE) if cell.engine == engine]
    (reference,) = [cell for cell in document.cells_of(CASE) if cell.engine == "torch-eager"]
    theirs = {sample.pair: statistics.median(sample.steps_ms) for sample in document.samples_of(reference)}
    logs = [
        math.log(theirs[sample.pair] / statistics.median(sample.steps_ms))
        for sample in document.samples_of(cell)
        if sample.pair in theirs
    ]
    return math.exp(statistics.fmean(logs))


def test_a_run_and_its_point_in_a_series_say_the_same() -> None:
    document = uneven(plain({"torch-eager": 120.0, "flow-eager": 100.0}))
    (comparison,) = facts_of(document).comparisons
    assert comparison.relative_speed == pytest.approx(expected(document, "flow-eager"), rel=1e-12)
    assert [point.relative_speed for point in points_of(document)] == [None, comparison.relative_speed]


def test_a_sitting_of_two_sides_says_of_each_what_its_report_says() -> None:
    document = uneven(sitting({"head": 1.1}))
    time = next(time for time in judge_document(document).times if time.case == CASE)
    assert time.base_relative_speed == pytest.approx(expected(document, "flow-eager@base"), rel=1e-12)
    assert time.head_relative_speed == pytest.approx(expected(document, "flow-eager@head"), rel=1e-12)
    shown = {one.subject.engine: one.relative_speed for one in facts_of(document).comparisons if one.case == CASE}
    assert shown == {"flow-eager@base": time.base_relative_speed, "flow-eager@head": time.head_relative_speed}
    ratios = {one.subject.engine: one.ratio for one in facts_of(document).comparisons if one.case == CASE}
    intervals = {engine: ratio.interval for engine, ratio in ratios.items() if ratio}
    assert intervals == {"flow-eager@base": time.base_relative_interval, "flow-eager@head": time.head_relative_interval}
    assert time.head_relative_interval != time.base_relative_interval


def test_two_documents_beside_each_other_keep_their_own_relative_speeds() -> None:
    base, head = (uneven(plain({"torch-eager": 120.0, "flow-eager": ms})) for ms in (100.0, 80.0))
    (time,) = judge_documents(base, head).times
    assert time.base_relative_speed == facts_of(base).comparisons[0].relative_speed
    assert time.head_relative_speed == facts_of(head).comparisons[0].relative_speed
    intervals = [
        one.ratio and one.ratio.interval for one in (facts_of(base).comparisons[0], facts_of(head).comparisons[0])
    ]
    assert [time.base_relative_interval, time.head_relative_interval] == intervals


def test_a_bad_sample_of_the_reference_leaves_no_relative_speed_anywhere() -> None:
    document = plain({"torch-eager": 120.0, "flow-eager": 100.0})
    first = next(sample for sample in document.samples if sample.cell.startswith("torch-eager/"))
    bad = dataclasses.replace(first, status="void", error="its losses differ")
    document = dataclasses.replace(document, samples=tuple(bad if one is first else one for one in document.samples))
    (comparison,) = facts_of(document).comparisons
    assert comparison.relative_speed is None
    assert [point.relative_speed for point in points_of(document)] == [None, None]


def test_a_side_has_one_typical_time_wherever_it_is_shown() -> None:
    """The reference is in fewer rounds than the sides, and these became slower since."""
    document = sitting({"head": 1.1}, confirming={"head": 1.4})
    last = max(sample.pair for sample in document.samples_of(Cell.of(CASE, "torch-eager")))
    assert last == 5
    time = next(time for time in judge_document(document).times if time.case == CASE)
    shown = {one.subject.engine: one.subject.times for one in facts_of(document).comparisons if one.case == CASE}
    (base, head) = (shown[f"flow-eager@{side}"] for side in ("base", "head"))
    assert base is not None
    assert head is not None
    assert (base.median_ms, head.median_ms) == (time.base, time.head)
    assert head.median_ms > 120, "rounds without the reference count"
    # A round that lost one side counts for neither.
    lost = document.samples_of(Cell.of(CASE, "flow-eager@head"))[6:]
    document = dataclasses.replace(document, samples=tuple(one for one in document.samples if one not in lost))
    time = next(time for time in judge_document(document).times if time.case == CASE)
    shown = {one.subject.engine: one.subject.times for one in facts_of(document).comparisons if one.case == CASE}
    head = shown["flow-eager@head"]
    assert head is not None
    assert head.median_ms == time.head < 111


def test_a_cell_that_failed_once_is_a_point_without_figures() -> None:
    """Its times of before are none of its series; and a canary, which is base once more, is no point at all."""
    document = sitting()
    bad = next(cell.key for cell in document.cells if cell.engine == "flow-eager@head")
    samples = [
        dataclasses.replace(one, status="failed", error="it broke", ranks=())
        if (one.cell, one.pair) == (bad, 3)
        else one
        for one in document.samples
    ]
    of_case = points_of(dataclasses.replace(document, samples=tuple(samples)))[: len(document.cells_of(CASE))]
    base, head, reference = of_case
    assert (base.status, head.status, reference.status) == ("ok", "failed", "ok")
    assert (head.processes, head.time_ms, head.low_ms, head.relative_speed, head.memory) == (0, None, None, None, {})
    assert base.time_ms == pytest.approx(100)
    assert len(points_of(document)) == len(document.cells) - 1
