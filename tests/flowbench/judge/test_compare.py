"""Whole sittings and pairs of documents judged: every verdict, the canary, memory, and what may never count as good."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sittings import CASE, MACHINE, MIB, SMALL, plain, sitting

from flowbench.cell import Cell
from flowbench.judge.compare import is_case_precise, judge_document, to_confirm
from flowbench.judge.documents import judge_documents
from flowbench.judge.memory import both_peaks, judge_memory
from flowbench.judge.verdict import (
    Comparison,
    ComparisonSet,
    LimitResult,
    MemoryKind,
    Quantity,
    SideName,
    Verdict,
)
from flowbench.record.document import document_text, parse_document
from flowbench.record.gpu import GpuUse
from flowbench.record.run import Git, NotMeasured, RunDocument
from flowbench.record.sample import Memory, Sample
from flowbench.report.facts import facts_of


def time_of(comparison: ComparisonSet, case: object = CASE) -> Comparison:
    return next(time for time in comparison.times if time.case == case)


def test_a_sitting_says_what_changed_and_beside_what() -> None:
    comparison = judge_document(sitting({"head": 1.1}))
    slower, same = time_of(comparison), time_of(comparison, SMALL)
    assert (slower.verdict, same.verdict) == (Verdict.SLOWER, Verdict.SAME)
    assert (slower.base, slower.head) == (100, pytest.approx(110, rel=0.01))
    assert slower.change is not None
    assert slower.change.low < 1.1 < slower.change.high
    assert (slower.pairs, slower.confirmation_pairs, slower.confirmed) == (12, 6, True)
    assert (slower.base_relative_speed, slower.head_relative_speed) == (
        pytest.approx(1.2),
        pytest.approx(1.2 / 1.1, rel=0.01),
    )
    assert comparison.canary.state == "clear"
    assert (comparison.overall.good, comparison.overall.cells) == (2, 2)
    assert comparison.overall.ratio == pytest.approx(1.1**0.5, rel=0.01)
    assert comparison.stopping == "all 6 pairs were measured"
    assert comparison.head.label == "working tree (ffffffffff, with uncommitted changes)"
    assert comparison.exit_code == 1
    assert judge_document(sitting()).exit_code == 0


def test_verdicts_are_recomputed_from_the_file_alone() -> None:
    document = sitting({"head": 1.1}, {"head": MIB}, floors={f"flow-eager/{CASE.key}": 0.02})
    assert judge_document(parse_document(document_text(document))) == judge_document(document)


def test_swapping_the_sides_of_a_sitting_mirrors_it() -> None:
    slower, faster = judge_document(sitting({"head": 1.1})), judge_document(sitting({"head": 1 / 1.1}))
    assert (time_of(slower).verdict, time_of(faster).verdict) == (Verdict.SLOWER, Verdict.FASTER)
    assert faster.exit_code == 0


def test_what_new_pairs_do_not_confirm_is_unclear() -> None:
    document = sitting({"head": 1.1}, confirming={"head": 1.0})
    assert list(to_confirm(document)) == [CASE]
    time = time_of(judge_document(document))
    assert (time.verdict, time.confirmed) == (Verdict.UNCLEAR, False)
    assert judge_document(document).exit_code == 2
    assert (judge_document(document).overall.good, judge_document(document).overall.cells) == (2, 2), "it is measured"
    other_way = sitting({"head": 1.1}, confirming={"head": 0.9})
    assert list(to_confirm(other_way)) == [CASE], "the new pairs have no part in what they confirm"
    assert time_of(judge_document(other_way)).confirmed is False


def test_a_change_below_the_machines_noise_floor_does_not_count() -> None:
    document = sitting({"head": 1.1}, floors={f"flow-eager/{CASE.key}": 0.2})
    time = time_of(judge_document(document))
    assert time.verdict is Verdict.SAME
    assert time.margin is not None
    assert "noise floor measured on this machine, 20 %" in time.margin.source
    assert "has not measured" in str(time_of(judge_document(document), SMALL).margin)


def test_within_a_sitting_the_shift_of_sittings_counts_in_place_of_the_noise_floor() -> None:
    cell = f"flow-eager/{CASE.key}"
    time = time_of(judge_document(sitting({"head": 1.1}, floors={cell: 0.3}, shifts={cell: 0.2})))
    assert (time.verdict, time.margin.size) == (Verdict.SAME, 0.2)  # type: ignore[union-attr]
    assert "the shift of a sitting measured on this machine, 20 %" in str(time.margin)
    for shift, said in ((0.005, "0.5 %"), (0.0, "0 %")):
        noisy = sitting({"head": 1.1}, floors={cell: 0.2}, shifts={cell: shift})
        assert list(to_confirm(noisy)) == [CASE]
        time = time_of(judge_document(noisy))
        assert (time.verdict, time.margin.size) == (Verdict.SLOWER, 0.01)  # type: ignore[union-attr]
        assert f"the least one; the shift of a sitting measured on this machine is {said}" in str(time.margin)
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    between = time_of(judge_documents(base, noisy)).margin
    assert between is not None
    assert between.size == 0.2, "two sittings differ by their shifts and by the noise of both"


def test_a_flagged_canary_makes_everything_unclear() -> None:
    comparison = judge_document(sitting({"head": 1.1, "canary": 1.1}, {"head": MIB}))
    assert comparison.canary.state == "flagged"
    assert {one.verdict for one in comparison.comparisons} == {Verdict.UNCLEAR}
    assert "it was: slower" in time_of(comparison).reason
    assert comparison.exit_code == 2
    exceeded = LimitResult("*", "max_slowdown", "", 0.1, 0.05, False, 7, "exceeded")
    assert dataclasses.replace(comparison, limits=(exceeded,)).exit_code == 2, "nothing of it counts"
    failed = judge_document(sitting({"canary": 1.1}, spoiled={("head", CASE): "failed"}))
    assert time_of(failed).verdict is Verdict.FAILED


def test_a_canary_says_what_it_knows() -> None:
    seen = judge_document(sitting(floors={f"flow-eager/{SMALL.key}": 0.02})).canary
    assert seen.state == "clear"
    assert seen.reason.endswith("shows +0.0% in 6 pairs, not for certain beyond ±2 %")
    document = sitting({"canary": 1.1})
    four = tuple(sample for sample in document.samples if "canary" not in sample.cell or sample.pair < 4)
    canary = judge_document(dataclasses.replace(document, samples=four)).canary
    assert canary.comparison is not None
    assert canary.comparison.p is not None
    assert canary.comparison.p < 0.05
    assert canary.state == "clear", "of four pairs the exact sign-flip test can say nothing"
    document = sitting()
    once = tuple(sample for sample in document.samples if "canary" not in sample.cell or sample.pair == 0)
    canary = judge_document(dataclasses.replace(document, samples=once)).canary
    assert (canary.state, canary.reason.partition(" has ")[2]) == ("not measured", "a single pair, which tells nothing")


@pytest.mark.parametrize("status", ["failed", "void"])
@pytest.mark.parametrize("side", ["base", "head"])
def test_a_bad_side_is_named_and_never_good(status: str, side: str) -> None:
    comparison = judge_document(sitting(spoiled={(side, CASE): status}))
    time = time_of(comparison)
    assert time.verdict is Verdict(status)
    assert time.reason == f"{side}, pair 1: it is {status}"
    assert (time.base, time.head, time.change) == (None, None, None)
    assert comparison.memory_of(time) == ()
    assert (comparison.overall.good, comparison.overall.cells) == (1, 2)
    assert comparison.exit_code == 2


@pytest.mark.parametrize("side", ["base", "head"])
def test_a_side_that_fails_once_has_no_figures_of_the_other_rounds(side: str) -> None:
    document = sitting({"head": 1.1})
    bad = Cell.of(CASE, f"flow-eager@{side}").key
    samples = [
        dataclasses.replace(one, status="failed", error="it broke", ranks=())
        if (one.cell, one.pair) == (bad, 3)
        else one
        for one in document.samples
    ]
    comparison = judge_document(dataclasses.replace(document, samples=tuple(samples)))
    time = time_of(comparison)
    assert (time.verdict, time.reason) == (Verdict.FAILED, f"{side}, pair 4: it broke")
    assert (time.base, time.head, time.change, time.pairs) == (None, None, None, 0)
    assert (comparison.memory_of(time), comparison.overall.good) == ((), 1)


@given(st.sets(st.sampled_from(["base", "head"]), min_size=1), st.sampled_from(["failed", "void", "lacks"]))
def test_a_lost_or_failed_cell_never_counts_as_good(sides: set[str], how: str) -> None:
    spoiled = {(side, CASE): how for side in sides} if how != "lacks" else {}
    lacks = tuple((side, CASE) for side in sides) if how == "lacks" else ()
    comparison = judge_document(sitting(spoiled=spoiled, lacks=lacks))
    assert comparison.overall.good == 1
    assert all(not time.verdict.is_judged for time in comparison.times if time.case == CASE)


def test_a_cell_of_one_side_alone_is_lost_or_new() -> None:
    lost, new = (judge_document(sitting(lacks=((side, CASE),))) for side in ("head", "base"))
    assert (time_of(lost).verdict, lost.exit_code) == (Verdict.LOST, 2)
    assert (time_of(new).verdict, new.exit_code) == (Verdict.NEW, 0)


def test_nothing_measured_is_no_verdict() -> None:
    document = dataclasses.replace(sitting(), samples=())
    comparison = judge_document(document)
    assert comparison.overall.ratio is None
    assert {time.verdict for time in comparison.times} == {Verdict.UNCLEAR}
    assert comparison.canary.state == "not measured"
    assert comparison.exit_code == 2
    assert not is_case_precise(document, CASE)
    with pytest.raises(ValueError, match="ordinary run"):
        judge_document(plain({"flow-eager": 100.0}))


def test_steps_that_drift_are_told() -> None:
    document = sitting()
    drifting = tuple(
        dataclasses.replace(
            sample, ranks=(dataclasses.replace(sample.ranks[0], steps_ms=tuple(100 + 2.0 * step for step in range(9))),)
        )
        if "head" in sample.cell
        else sample
        for sample in document.samples
    )
    document = dataclasses.replace(document, samples=drifting, protocol=dataclasses.replace(document.protocol, steps=9))
    (tag,) = time_of(judge_document(document)).tags
    assert tag.startswith("drift: head's last third of steps takes +11.")
    backwards = [
        dataclasses.replace(sample, ranks=(dataclasses.replace(rank, steps_ms=rank.steps_ms[::-1]),))
        for sample in document.samples
        for rank in sample.ranks
    ]
    (tag,) = time_of(judge_document(dataclasses.replace(document, samples=tuple(backwards)))).tags
    assert tag.startswith("drift: head's last third of steps takes -10.")


def noisier(document: RunDocument, wanted: str) -> RunDocument:
    """The document with every other process of head at the cells whose key begins like that three times as slow."""
    samples = [
        dataclasses.replace(
            sample,
            ranks=tuple(
                dataclasses.replace(rank, steps_ms=tuple(3 * time for time in rank.steps_ms)) for rank in sample.ranks
            ),
        )
        if sample.cell.startswith(wanted) and "head" in sample.cell and sample.pair % 2
        else sample
        for sample in document.samples
    ]
    return dataclasses.replace(document, samples=tuple(samples))


def test_a_case_is_known_well_enough_when_all_its_engines_are_and_no_other_case_counts() -> None:
    document = sitting()
    uneven = noisier(document, f"flow-eager%40head/{SMALL.key}")
    assert [is_case_precise(document, case) for case in (CASE, SMALL)] == [True, True]
    assert [is_case_precise(uneven, case) for case in (CASE, SMALL)] == [True, False]
    eager = [engine for engine in document.engines if engine.side]
    both = dataclasses.replace(
        document,
        engines=(
            *document.engines,
            *(dataclasses.replace(one, name=one.name.replace("eager", "graph")) for one in eager),
        ),
        cells=(
            *document.cells,
            *(
                Cell.of(one.case, one.engine.replace("eager", "graph"))
                for one in document.cells
                if "flow" in one.engine
            ),
        ),
        samples=(
            *document.samples,
            *(
                dataclasses.replace(one, cell=one.cell.replace("flow-eager", "flow-graph"))
                for one in document.samples
                if "flow" in one.cell
            ),
        ),
    )
    assert is_case_precise(both, CASE)
    assert not is_case_precise(noisier(both, "flow-graph"), CASE)
    assert not is_case_precise(noisier(both, "flow-eager"), CASE)


def test_memory_of_each_kind_is_compared() -> None:
    comparison = judge_document(sitting(peaks={"head": MIB}))
    memory = {one.quantity.name: one for one in comparison.memory_of(time_of(comparison))}
    assert {name: one.verdict for name, one in memory.items()} == {
        "peak allocated": Verdict.LARGER, "peak reserved": Verdict.LARGER, "peak resident": Verdict.LARGER,
    }  # fmt: skip
    assert memory["peak allocated"].change is not None
    assert memory["peak allocated"].change.ratio == pytest.approx(1.01)
    assert comparison.exit_code == 1


def test_memory_is_compared_rank_by_rank() -> None:
    """What one rank takes more is not made up for by what the other takes less."""
    case = dataclasses.replace(CASE, world_size=2, ddp=True)

    def with_less(sample: Sample) -> Sample:
        one, other = sample.ranks
        memory = dataclasses.replace(other.memory, allocated_peak_bytes=60 * MIB)
        return dataclasses.replace(sample, ranks=(one, dataclasses.replace(other, memory=memory)))

    document = sitting(peaks={"head": MIB}, cases=(case,))
    samples = [with_less(sample) if "head" in sample.cell else sample for sample in document.samples]
    comparison = judge_document(dataclasses.replace(document, samples=tuple(samples)))
    memory = comparison.memory_of(time_of(comparison, case))
    allocated = [one for one in memory if one.quantity.name == "peak allocated"]
    assert [(one.quantity.rank, one.verdict) for one in allocated] == [(0, Verdict.LARGER), (1, Verdict.SMALLER)]
    assert [one.quantity.label for one in allocated] == ["peak allocated, rank 0", "peak allocated, rank 1"]
    assert comparison.exit_code == 1


def test_a_context_on_a_gpu_where_a_rank_has_nothing_to_do_is_larger() -> None:
    document = sitting()

    def with_uses(sample: Sample) -> Sample:
        uses = (GpuUse(1, 900 * MIB), *([GpuUse(0, 300 * MIB)] if "head" in sample.cell else []))
        rank = sample.ranks[0]
        return dataclasses.replace(
            sample, ranks=(dataclasses.replace(rank, memory=dataclasses.replace(rank.memory, gpu_uses=uses)),)
        )

    comparison = judge_document(dataclasses.replace(document, samples=tuple(map(with_uses, document.samples))))
    on_gpus = {
        one.quantity.gpu: one for one in comparison.memory_of(time_of(comparison)) if one.quantity.gpu is not None
    }
    assert (on_gpus[0].verdict, on_gpus[0].base, on_gpus[0].head) == (Verdict.LARGER, 0, 300 * MIB)
    assert on_gpus[1].verdict is Verdict.SAME
    assert comparison.exit_code == 1
    clean = dataclasses.replace(
        document, samples=tuple(with_uses(sample) for sample in document.samples if "base" in sample.cell)
    )
    clean = dataclasses.replace(
        clean,
        samples=tuple(
            dataclasses.replace(sample, cell=sample.cell.replace("base", "head", 1)) for sample in clean.samples
        ),
    )
    stray = dataclasses.replace(document, samples=tuple(map(with_uses, document.samples)))
    compared = judge_documents(clean, stray)
    (on_first,) = [one for one in compared.memory_of(time_of(compared)) if one.quantity.gpu == 0]
    assert (on_first.verdict, on_first.base, on_first.change) == (Verdict.LARGER, 0, None)


@pytest.mark.parametrize(
    ("base", "head", "verdict"),
    [
        ([1000, 1000], [2000, 1513], Verdict.LARGER),
        ([2000, 1513], [1000, 1000], Verdict.SMALLER),
        ([1000, 1000], [1512, 488], Verdict.SAME),
        ([10_000_000] * 2, [10_001_000, 9_999_000], Verdict.SAME),
        ([1000] * 3, [9000, 9000, 1000], Verdict.UNCLEAR),
        ([9000] * 3, [1000, 1000, 10_000], Verdict.UNCLEAR),
    ],
)
def test_memory_needs_a_step_in_the_same_direction_in_all_pairs(
    base: list[int], head: list[int], verdict: Verdict
) -> None:
    assert judge_memory("peak allocated", base, head).verdict is verdict


def test_what_the_system_measures_takes_two_pairs() -> None:
    for kind in ("peak resident", "peak on the GPU"):
        assert judge_memory(kind, [MIB], [100 * MIB]).verdict is Verdict.UNCLEAR
        assert judge_memory(kind, [100 * MIB], [MIB]).verdict is Verdict.UNCLEAR
        assert judge_memory(kind, [MIB], [2 * MIB]).verdict is Verdict.SAME
        assert judge_memory(kind, [MIB] * 2, [100 * MIB] * 2).verdict is Verdict.LARGER
    assert judge_memory("peak allocated", [MIB], [100 * MIB]).verdict is Verdict.LARGER


@pytest.mark.parametrize(
    ("kind", "step"),
    [("peak allocated", 512), ("peak reserved", 2 * MIB), ("peak on the GPU", 2 * MIB), ("peak resident", 4 * MIB)],
)
def test_a_step_of_granularity_is_no_change(kind: MemoryKind, step: int) -> None:
    assert judge_memory(kind, [MIB] * 2, [MIB + step] * 2).verdict is Verdict.SAME
    larger = judge_memory(kind, [MIB] * 2, [MIB + step + 1, MIB + step + 1000])
    assert larger.verdict is Verdict.LARGER
    assert larger.reason == f"larger in 2 pairs, by {step + 1:,d} to {step + 1000:,d} bytes"


def test_what_the_driver_does_not_list_is_nothing_where_it_lists_that_rank() -> None:
    """A rank of which the driver tells nothing at all is another matter."""
    asked = Quantity("peak on the GPU", 0, 1)
    other_gpu, other_rank = {Quantity("peak on the GPU", 0, 0): 7}, {Quantity("peak on the GPU", 1, 1): 7}
    assert both_peaks(asked, other_gpu, {asked: 9}) == (0, 9)
    assert both_peaks(asked, {asked: 9}, other_gpu) == (9, 0)
    assert both_peaks(asked, other_rank, {asked: 9}) is None
    assert both_peaks(Quantity("peak resident", 0), other_gpu, {Quantity("peak resident", 0): 9}) is None


def test_a_quantity_has_a_unit_and_a_label() -> None:
    time, peak, of_rank = Quantity("step time"), Quantity("peak resident"), Quantity("peak on the GPU", 1, 0)
    assert [one.unit for one in (time, peak, of_rank)] == ["ms", "bytes", "bytes"]
    assert [one.label for one in (time, peak, of_rank)] == [
        "step time",
        "peak resident",
        "peak on the GPU, rank 1, GPU 0",
    ]


def test_documents_are_compared_by_their_references() -> None:
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    twice_as_slow_a_day = plain({"flow-eager": 200.0, "torch-eager": 240.0})
    assert time_of(judge_documents(base, twice_as_slow_a_day)).verdict is Verdict.SAME
    slower = judge_documents(base, plain({"flow-eager": 220.0, "torch-eager": 240.0}))
    assert time_of(slower).verdict is Verdict.SLOWER
    assert time_of(slower).change.ratio == pytest.approx(1.1, rel=0.01)  # type: ignore[union-attr]
    assert slower.exit_code == 1
    assert not slower.interleaved


def test_between_documents_a_change_below_the_noise_floor_does_not_count() -> None:
    base, head = (plain({"flow-eager": ms, "torch-eager": 120.0}) for ms in (100.0, 110.0))
    cell = f"flow-eager/{CASE.key}"
    time = time_of(judge_documents(base, head, noise_floors={cell: 0.12}))
    assert (time.verdict, time.reason) == (Verdict.SAME, "relative to the reference, the interval lies within ±12 %")
    assert str(time.margin).count("the noise floor measured on this machine, 12 %")
    assert time_of(judge_documents(base, head, noise_floors={cell: 0.099})).verdict is Verdict.UNCLEAR
    assert time_of(judge_documents(base, head, noise_floors={cell: 0.005})).verdict is Verdict.SLOWER
    assert time_of(judge_documents(base, head, noise_floors={"another": 0.12})).verdict is Verdict.SLOWER
    known = sitting({"head": 1.1}, floors={cell: 0.2})  # as it was when that was measured
    for one, other in ((base, known), (known, base)):
        assert time_of(judge_documents(one, other, noise_floors={cell: 0.05})).margin.size == 0.2  # type: ignore[union-attr]


def test_what_one_cell_alone_would_show_is_told_where_there_are_more() -> None:
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    barely = plain({"flow-eager": 101.47, "torch-eager": 120.0})
    time = time_of(judge_documents(base, barely))
    assert time.p is not None
    assert 0.025 < time.p < 0.05
    assert time.verdict is Verdict.SLOWER
    assert time.change is not None
    assert time.change.low is not None
    assert time.change.low > 1.01
    base = plain({"flow-eager": 100.0, "flow-graph": 100.0, "torch-eager": 120.0})
    barely = plain({"flow-eager": 101.47, "flow-graph": 100.0, "torch-eager": 120.0})
    time = time_of(judge_documents(base, barely))
    assert time.verdict is Verdict.UNCLEAR
    assert time.reason == "it would look slower alone, but among 2 cells one may by chance (Holm)"


def test_two_pairs_are_judged_and_one_has_no_interval() -> None:
    def change(pairs: int) -> Comparison:
        base, head = (plain({"flow-eager": ms, "torch-eager": 120.0}, pairs) for ms in (100.0, 200.0))
        return time_of(judge_documents(base, head))

    one, two = change(1), change(2)
    assert (one.verdict, two.verdict) == (Verdict.UNCLEAR, Verdict.SLOWER)
    assert one.change is not None
    assert two.change is not None
    assert (one.change.low, one.change.high) == (None, None)
    assert two.change.low is not None
    assert two.change.low < two.change.ratio == pytest.approx(2)


def test_memory_of_documents_counts_processes_not_combinations() -> None:
    def peaks(base_pairs: int, head_pairs: int) -> dict[str, tuple[Verdict, str, int]]:
        base = plain({"flow-eager": 100.0, "torch-eager": 120.0}, base_pairs)
        head = plain({"flow-eager": 100.0, "torch-eager": 120.0}, head_pairs)
        more = [
            dataclasses.replace(rank, memory=Memory(300 * MIB, 1200 * MIB, 3000 * MIB, MIB))
            for sample in head.samples
            for rank in sample.ranks
        ]
        samples = [dataclasses.replace(sample, ranks=(rank,)) for sample, rank in zip(head.samples, more, strict=True)]
        compared = judge_documents(base, dataclasses.replace(head, samples=tuple(samples)))
        return {
            one.quantity.name: (one.verdict, one.reason, one.pairs) for one in compared.memory_of(time_of(compared))
        }

    assert peaks(6, 1)["peak resident"] == (
        Verdict.UNCLEAR, f"{2000 * MIB:+,d} bytes in the only pair, which may differ so from start to start", 1,
    )  # fmt: skip
    assert peaks(6, 1)["peak allocated"] == (Verdict.LARGER, f"larger in the only pair, by {200 * MIB:,d} bytes", 1)
    assert peaks(3, 2)["peak resident"] == (Verdict.LARGER, f"larger in 2 pairs, by {2000 * MIB:,d} bytes", 2)


def test_memory_that_one_side_alone_tells_is_lost_or_new() -> None:
    """As a cell is: what base told of and head does not is no `same`."""

    def reserved(one: RunDocument, sides: tuple[str, ...]) -> RunDocument:
        def without(sample: Sample) -> Sample:
            ranks = [
                dataclasses.replace(rank, memory=dataclasses.replace(rank.memory, reserved_peak_bytes=None))
                for rank in sample.ranks
            ]
            return (
                sample
                if any(side in sample.cell for side in sides)
                else dataclasses.replace(sample, ranks=tuple(ranks))
            )

        return dataclasses.replace(one, samples=tuple(map(without, one.samples)))

    all_told, document = ("flow", "torch"), plain({"flow-eager": 100.0, "torch-eager": 120.0})
    for sides, verdict in ((("base",), Verdict.LOST), (("head",), Verdict.NEW)):
        told = reserved(document, all_told), reserved(document, ())
        base, head = told if verdict is Verdict.LOST else told[::-1]
        for compared in (judge_document(reserved(sitting(), sides)), judge_documents(base, head)):
            (peak,) = [one for one in compared.memory_of(time_of(compared)) if one.quantity.name == "peak reserved"]
            assert (peak.verdict, peak.reason) == (verdict, "only one side tells this kind")
            assert len(compared.memory_of(time_of(compared))) == 3
            assert verdict is Verdict.NEW or compared.exit_code == 2


def test_a_sitting_of_two_sides_stands_for_its_head() -> None:
    ordinary = plain({"flow-eager": 100.0, "torch-eager": 120.0}, git=Git("a" * 40, "main", False))
    for base, head in ((ordinary, sitting()), (sitting(), ordinary)):
        compared = judge_documents(base, head)
        labels = {compared.base.commit, compared.head.commit}
        assert labels == {"a" * 40, "f" * 40}, "head's commit, whatever commit the harness was of"
        assert time_of(compared).verdict is not Verdict.LOST


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (plain({"flow-eager": 100.0}), "no reference"),
        (plain({"flow-eager": 100.0, "torch-eager": 120.0}, reference=None), "no reference"),
        (plain({"flow-eager": 100.0, "torch-eager": 120.0}, pairs=1), "one pair"),
    ],
)
def test_documents_that_share_no_reference_are_not_judged(head: RunDocument, said: str) -> None:
    time = time_of(judge_documents(plain({"flow-eager": 100.0, "torch-eager": 120.0}), head))
    assert time.verdict is Verdict.UNCLEAR
    assert said in time.reason


def test_another_version_of_the_reference_is_another_reference() -> None:
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    newer = dataclasses.replace(base, engines=(base.engines[0], dataclasses.replace(base.engines[1], version="2.0")))
    assert "version 1.0 / 2.0" in time_of(judge_documents(base, newer)).reason


def test_documents_of_unlike_machines_are_not_comparable() -> None:
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    other = dataclasses.replace(base, machine=dataclasses.replace(MACHINE, cpu_model="another"))
    comparison = judge_documents(base, other, force=True)
    assert comparison.differences == ("cpu_model: AMD EPYC / another",)
    assert all(one.verdict is Verdict.UNCLEAR and "not comparable" in one.tags for one in comparison.comparisons)
    assert comparison.exit_code == 2
    lost = judge_documents(sitting(), dataclasses.replace(sitting(cases=(SMALL,)), machine=other.machine), force=True)
    assert time_of(lost).verdict is Verdict.LOST, "also there"
    assert time_of(lost).label == CASE.label


def test_a_bad_cell_of_a_document_is_named() -> None:
    good, failed = sitting(), sitting(spoiled={("head", CASE): "failed"})
    for base, head, side in ((good, failed, "head"), (failed, good, "base")):
        time = time_of(judge_documents(base, head))
        assert (time.verdict, time.reason) == (Verdict.FAILED, f"{side}, pair 1: it is failed")


def test_what_either_document_leaves_out_is_told_once() -> None:
    both, one = NotMeasured("a", "in both"), NotMeasured("b", "in head alone")
    base = plain({"flow-eager": 100.0}, not_measured=(both,))
    head = plain({"flow-eager": 100.0}, not_measured=(both, one))
    assert judge_documents(base, head).not_measured == (both, one)


def test_a_cell_missing_in_one_document_is_lost_or_new() -> None:
    both = plain({"flow-eager": 100.0, "flow-graph": 90.0, "torch-eager": 120.0})
    one = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    for base, head, verdict in ((both, one, Verdict.LOST), (one, both, Verdict.NEW)):
        graph = next(time for time in judge_documents(base, head).times if time.engine == "flow-graph")
        assert graph.verdict is verdict


def test_only_unclear_is_told_apart_from_what_was_not_measured() -> None:
    unclear = judge_document(sitting({"head": 1.1}, confirming={"head": 1.0}))
    assert unclear.is_only_unclear
    assert not judge_document(
        sitting({"head": 1.1, "canary": 1.1})
    ).is_only_unclear  # nothing counts, head may be worse
    limit = LimitResult("*", "max_step_ms", "", None, 1.0, None, 2, "was not measured")
    others = [
        judge_document(sitting()),
        judge_document(sitting({"head": 1.1})),
        judge_document(sitting({"head": 1.1}, confirming={"head": 1.0}, spoiled={("head", SMALL): "failed"})),
        judge_document(sitting({"head": 1.1}, confirming={"head": 1.0}, lacks=(("head", SMALL),))),
        judge_document(dataclasses.replace(sitting(), samples=())),
        dataclasses.replace(unclear, limits=(limit,)),
        dataclasses.replace(unclear, differences=("cpu_model: one / another",)),
    ]
    assert [other.is_only_unclear for other in others] == [False] * len(others)
    assert {other.exit_code for other in others} == {0, 1, 2}


def test_what_both_document_and_verdicts_leave_out_is_reported_once() -> None:
    missing = NotMeasured("torch-eager", "torch is not installed; without it there is no reference, and no ratio")
    document = dataclasses.replace(sitting(reference=False), not_measured=(missing,))
    assert facts_of(document, judge_document(document)).left_out.count(missing) == 1


@pytest.mark.parametrize(
    ("side", "name", "label"),
    [
        (SideName("main", "1a2b3c4d5e6f", False), "main", "main (1a2b3c4d5e)"),
        (SideName("main", None, False), "main", "main"),
        (
            SideName("working tree", "1a2b3c4d5e6f", True),
            "working tree",
            "working tree (1a2b3c4d5e, with uncommitted changes)",
        ),
        (SideName("1a2b3c4d" * 5, "1a2b3c4d" * 5, False), "1a2b3c4d1a", "1a2b3c4d1a"),
        (SideName("1a2b3c4", "1a2b3c4d" * 5, True), "1a2b3c4", "1a2b3c4d1a (with uncommitted changes)"),
        (SideName("fade123", "1a2b3c4d" * 5, False), "fade123", "fade123 (1a2b3c4d1a)"),
    ],
)
def test_a_side_is_told_by_one_name_and_one_commit(side: SideName, name: str, label: str) -> None:
    assert (side.name, side.label) == (name, label)


def with_threads(document: RunDocument, threads: int) -> RunDocument:
    """The same figures, of cells with so many threads."""
    cells = {cell.key: dataclasses.replace(cell, threads=threads) for cell in document.cells}
    samples = tuple(dataclasses.replace(one, cell=cells[one.cell].key) for one in document.samples)
    return dataclasses.replace(document, cells=tuple(cells.values()), samples=samples)


def test_cells_that_differ_in_threads_alone_say_so_and_the_way_out() -> None:
    two = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    lost, new = judge_documents(two, with_threads(two, 1)).times
    assert (lost.verdict, lost.label) == (Verdict.LOST, f"{CASE.label}, threads=2")
    assert lost.reason == "head has it with 1 thread in place of 2: measure both with the same --threads"
    assert (new.verdict, new.label) == (Verdict.NEW, f"{CASE.label}, threads=1")
    assert new.reason == "base has it with 2 threads in place of 1: measure both with the same --threads"
    one, four = with_threads(two, 1), with_threads(two, 4)
    both = dataclasses.replace(one, cells=one.cells + four.cells, samples=one.samples + four.samples)
    assert [time.reason.partition(":")[0] for time in judge_documents(two, both).times] == [
        "head has it with 1 and 4 threads in place of 2",
        "base has it with 2 threads in place of 1",
        "base has it with 2 threads in place of 4",
    ]
    assert [time.label for time in judge_documents(two, two).times] == [CASE.label], "where nothing is to be told apart"
    graph = plain({"flow-graph": 100.0, "torch-eager": 120.0})
    assert judge_documents(two, with_threads(graph, 1)).times[0].reason == "base has this cell, head has not"


def test_by_force_cells_that_differ_in_threads_alone_stand_beside_each_other() -> None:
    two = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    one = with_threads(plain({"flow-eager": 200.0, "torch-eager": 180.0}), 1)
    compared = judge_documents(two, one, force=True)
    (time,) = compared.times
    assert (time.verdict, time.label) == (Verdict.UNCLEAR, f"{CASE.label}, 2 / 1 threads")
    assert (time.reason, time.case.threads) == ("not comparable: 2 / 1 threads, shown by force", 1)
    assert (time.base, time.head) == (pytest.approx(100, rel=0.01), pytest.approx(200, rel=0.01))
    assert time.change is not None
    assert time.change.ratio == pytest.approx(200 / 180 * 120 / 100, rel=0.01)
    assert {peak.verdict for peak in compared.memory_of(time)} == {Verdict.UNCLEAR}
    assert (compared.exit_code, compared.is_only_unclear) == (2, False)
    elsewhere = dataclasses.replace(one, machine=dataclasses.replace(MACHINE, usable_cores=1))
    (time,) = judge_documents(two, elsewhere, force=True).times
    assert (time.label, time.reason) == (
        f"{CASE.label}, 2 / 1 threads",
        "not comparable: unlike machines, shown by force",
    )
    assert time.head == pytest.approx(200, rel=0.01)
    four = with_threads(two, 4)
    both = dataclasses.replace(one, cells=one.cells + four.cells, samples=one.samples + four.samples)
    verdicts = [time.verdict for time in judge_documents(two, both, force=True).times]
    assert verdicts == [Verdict.LOST, Verdict.NEW, Verdict.NEW], "which of them it is beside cannot be told"


def test_what_is_shown_by_force_makes_no_other_cell_harder_to_judge() -> None:
    base = plain({"flow-eager": 100.0, "torch-eager": 120.0})
    barely = plain({"flow-eager": 101.47, "torch-eager": 120.0})  # alone it is slower, and among two cells unclear
    graph = plain({"flow-graph": 100.0, "torch-eager": 120.0})
    ours, theirs = (
        dataclasses.replace(
            one,
            engines=(*one.engines, graph.engines[0]),
            cells=one.cells + more.cells,
            samples=one.samples + more.samples,
        )
        for one, more in ((base, with_threads(graph, 4)), (barely, with_threads(graph, 1)))
    )
    times = {time.engine: time.verdict for time in judge_documents(ours, theirs, force=True).times}
    assert times == {"flow-eager": Verdict.SLOWER, "flow-graph": Verdict.UNCLEAR}
