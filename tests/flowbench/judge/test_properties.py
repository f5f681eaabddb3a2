"""What holds for any sitting and any two documents: scaled, swapped, with more pairs alike, with a bad side."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sittings import CASE, MIB, SMALL, plain, sitting

from flowbench.judge.compare import judge_document
from flowbench.judge.documents import judge_documents
from flowbench.judge.memory import judge_memory
from flowbench.judge.stats import paired_ratio
from flowbench.judge.times import Evidence, judge_times
from flowbench.judge.verdict import Change, Comparison, Verdict
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample

MIRRORED = {
    Verdict.SLOWER: Verdict.FASTER, Verdict.LARGER: Verdict.SMALLER, Verdict.LOST: Verdict.NEW,
}  # fmt: skip
MIRRORED |= {other: verdict for verdict, other in MIRRORED.items()}

CHANGES = st.floats(min_value=0.8, max_value=1.25)
SMALL_CHANGES = st.floats(min_value=0.97, max_value=1.03)
FACTORS = st.floats(min_value=1e-2, max_value=1e2)
PEAKS = st.integers(min_value=-8 * MIB, max_value=8 * MIB)
SIZES = st.lists(st.tuples(*[st.integers(min_value=0, max_value=4000)] * 2), min_size=1, max_size=5)
RATIOS = st.lists(st.floats(min_value=-0.2, max_value=0.2), min_size=2, max_size=10)


def scaled(document: RunDocument, factor: float) -> RunDocument:
    """The document as if measured on a machine that takes `factor` times as long for everything."""

    def slower(sample: Sample) -> Sample:
        ranks = tuple(
            dataclasses.replace(rank, steps_ms=tuple(factor * time for time in rank.steps_ms)) for rank in sample.ranks
        )
        return dataclasses.replace(sample, ranks=ranks)

    return dataclasses.replace(document, samples=tuple(map(slower, document.samples)))


def swapped(document: RunDocument) -> RunDocument:
    """The document with base as head and head as base; a canary's name is kept."""
    other = {"base": "head", "head": "base"}
    engines = tuple(
        dataclasses.replace(engine, side=other.get(str(engine.side), engine.side)) for engine in document.engines
    )
    names = {
        engine.name: f"{engine.registered_name}@{other[str(engine.side)]}"
        for engine in document.engines
        if engine.side in other
    }
    keys = {}
    cells = []
    for cell in document.cells:
        renamed = dataclasses.replace(cell, engine=names.get(cell.engine, cell.engine))
        keys[cell.key] = renamed.key
        cells.append(renamed)
    engines = tuple(
        dataclasses.replace(new, name=names.get(old.name, old.name))
        for old, new in zip(document.engines, engines, strict=True)
    )
    samples = tuple(dataclasses.replace(sample, cell=keys[sample.cell]) for sample in document.samples)
    return dataclasses.replace(document, engines=engines, cells=tuple(cells), samples=samples)


def in_short(one: Comparison) -> tuple[object, ...]:
    """What has to be equal of two judgements that say the same."""
    return one.case, one.engine, one.quantity, one.verdict, one.pairs, one.confirmed


def mirrors(change: Change | None, other: Change | None) -> bool:
    """Whether one change is the other backwards."""
    if change is None or other is None:
        return change is other
    ends = [(change.ratio, other.ratio), (change.low, other.high), (change.high, other.low)]
    return all(one is two if one is None or two is None else math.isclose(one, 1 / two) for one, two in ends)


@given(CHANGES, SMALL_CHANGES, FACTORS)
@settings(max_examples=40)
def test_scaling_both_sides_of_a_sitting_changes_nothing(change: float, again: float, factor: float) -> None:
    document = sitting({"head": change}, confirming={"head": change * again})
    one, two = judge_document(document), judge_document(scaled(document, factor))
    assert [*map(in_short, one.comparisons)] == [*map(in_short, two.comparisons)]
    assert (one.exit_code, one.canary.state) == (two.exit_code, two.canary.state)
    assert two.overall.ratio == pytest.approx(one.overall.ratio, rel=1e-9)


@given(CHANGES, FACTORS, FACTORS)
@settings(max_examples=40)
def test_a_document_of_a_slower_day_says_the_same(change: float, factor: float, other: float) -> None:
    base, head = (
        plain({"flow-eager": 100.0, "torch-eager": 120.0}),
        plain({"flow-eager": 100 * change, "torch-eager": 120.0}),
    )
    one, two = judge_documents(base, head), judge_documents(scaled(base, factor), scaled(head, other))
    assert [*map(in_short, one.comparisons)] == [*map(in_short, two.comparisons)]
    assert two.overall.ratio == pytest.approx(one.overall.ratio, rel=1e-9)


@given(CHANGES, SMALL_CHANGES, PEAKS, st.sampled_from(["", "base", "head"]), st.sampled_from(["", "base", "head"]))
@settings(max_examples=60)
def test_swapping_the_sides_of_a_sitting_mirrors_every_verdict(
    change: float, again: float, peak: int, lacking: str, failing: str
) -> None:
    lacks = ((lacking, CASE),) if lacking else ()
    spoiled = {(failing, SMALL): "failed"} if failing else {}
    no_canary = (("canary", SMALL),)
    document = sitting(
        {"head": change},
        {"head": peak},
        confirming={"head": change * again},
        lacks=(*lacks, *no_canary),
        spoiled=spoiled,
    )
    ahead = judge_document(document).comparisons
    back = {(one.case, one.engine, one.quantity): one for one in judge_document(swapped(document)).comparisons}
    assert len(back) == len(ahead)
    for one in ahead:
        two = back[one.case, one.engine, one.quantity]
        assert two.verdict is MIRRORED.get(one.verdict, one.verdict), one.quantity
        assert (two.base, two.head, two.pairs, two.confirmed) == (one.head, one.base, one.pairs, one.confirmed)
        if one.quantity.unit == "ms":
            assert mirrors(one.change, two.change)


@given(CHANGES, PEAKS)
@settings(max_examples=40)
def test_swapping_two_documents_mirrors_every_verdict(change: float, peak: int) -> None:
    one = plain({"flow-eager": 100.0, "torch-eager": 120.0, "flow-graph": 90.0})
    two = plain({"flow-eager": 100.0 * change, "torch-eager": 120.0})
    ahead, back = judge_documents(one, two).comparisons, judge_documents(two, one).comparisons
    verdicts = {(other.case, other.engine, other.quantity): other.verdict for other in back}
    for time in ahead:
        assert verdicts[time.case, time.engine, time.quantity] is MIRRORED.get(time.verdict, time.verdict)


@given(SIZES, st.integers(min_value=0, max_value=2**30))
@example([(512, 0)], 0)  # just a step of granularity
@example([(0, 5020), (0, 5020), (0, 0)], 1_000_000)  # no direction, and half a per cent of one side alone
def test_swapping_sides_mirrors_the_verdict_on_memory(sizes: list[tuple[int, int]], above: int) -> None:
    base, head = ([above + pair[side] for pair in sizes] for side in (0, 1))
    one, two = judge_memory("peak allocated", base, head), judge_memory("peak allocated", head, base)
    assert two.verdict is MIRRORED.get(one.verdict, one.verdict)
    assert (two.base, two.head) == (one.head, one.base)


@given(RATIOS, st.integers(min_value=2, max_value=4))
def test_more_identical_pairs_never_widen_what_is_reported(ratios: list[float], times: int) -> None:
    few, many = (judge_times([Evidence(tuple(ratios * n), tuple(ratios * n), 0.01)])[0] for n in (1, times))
    assert many.mean.half_width <= few.mean.half_width * (1 + 1e-9) + 1e-15
    times_ms = [10 * math.exp(ratio) for ratio in ratios]
    one, two = (paired_ratio([10.0] * len(ratios) * n, times_ms * n) for n in (1, times))
    assert one.interval is not None
    assert two.interval is not None
    assert two.interval[1] / two.interval[0] <= one.interval[1] / one.interval[0] * (1 + 1e-9)
    if few.verdict.is_judged and few.verdict is not Verdict.SAME:
        assert many.verdict is few.verdict  # what was certain stays so


@given(
    st.sets(st.tuples(st.sampled_from(["base", "head"]), st.sampled_from([CASE, SMALL])), min_size=1),
    st.sampled_from(["failed", "void", "lacks"]),
    CHANGES,
)
@settings(max_examples=40)
def test_what_is_bad_is_never_good(bad: set[tuple[str, object]], how: str, change: float) -> None:
    spoiled = dict.fromkeys(bad, how) if how != "lacks" else {}
    comparison = judge_document(sitting({"head": change}, spoiled=spoiled, lacks=tuple(bad) if how == "lacks" else ()))
    bad_cases = {case for _, case in bad}
    for time in comparison.times:
        if time.case in bad_cases:
            assert time.verdict in (Verdict.FAILED, Verdict.VOID, Verdict.LOST, Verdict.NEW)
            assert (time.change, time.base, time.head) == (None, None, None)
            assert comparison.memory_of(time) == ()
    assert comparison.overall.good <= 2 - len(bad_cases)
    only_new = how == "lacks" and {side for side, _ in bad} == {"base"} and len(bad_cases) < 2
    assert comparison.exit_code != 0 or only_new
