"""Judges a sitting of two sides: every cell's times and memory from base to head, the canary, and what is missing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flowbench.cell import Case, Cell, cell_name
from flowbench.judge.inference import mean_of
from flowbench.judge.memory import both_peaks, judge_memory, peaks_of
from flowbench.judge.pairs import ratio_to_reference
from flowbench.judge.stats import geometric_mean, process_median
from flowbench.judge.times import (
    CHECK_LEVEL,
    LEVEL,
    Evidence,
    Judgement,
    is_precise,
    judge_times,
    pair_log_ratio,
    percent,
)
from flowbench.judge.verdict import (
    Canary,
    Change,
    Comparison,
    ComparisonSet,
    Margin,
    Overall,
    Quantity,
    SideName,
    Verdict,
)
from flowbench.record.run import RESUMED, RunDocument, Side, SidesCompared
from flowbench.record.sample import Sample

STEP_TIME = Quantity("step time")

# A process whose later steps differ from its earlier ones by this much, in all processes alike, was not warm, or heats up.
_DRIFT = 0.02
_LEAST_DRIFT_STEPS = 9


@dataclass(frozen=True)
class Matched:
    """Base and head of one engine at one case: the cells, where each side has one, and the good samples of shared rounds."""

    case: Case
    engine: str
    base: Cell | None
    head: Cell | None
    pairs: tuple[tuple[Sample, Sample], ...]

    @property
    def name(self) -> str:
        """`ENGINE/CASE`, by which the noise of a machine is kept."""
        return cell_name(self.engine, self.case)


def judge_document(document: RunDocument) -> ComparisonSet:
    """All verdicts of a sitting of two sides, from its document alone; ValueError for a document of an ordinary run."""
    plan = comparison_of(document)
    matches = matched_sides(document)
    by_cell = {(match.case, match.engine): judged for match, judged in _judged(document)}
    times: list[Comparison] = []
    memory: list[Comparison] = []
    for match in matches:
        time = _time_of(document, match, by_cell.get((match.case, match.engine)))
        times.append(time)
        memory += _memory_of(match, time) if time.verdict.is_judged or time.verdict is Verdict.UNCLEAR else []
    canary = _canary(document)
    comparisons = (*times, *memory)
    if canary.state == "flagged":
        comparisons = tuple(_unclear(one, f"nothing counts, since {canary.reason}") for one in comparisons)
    return ComparisonSet(
        base=side_name(plan.base),
        head=side_name(plan.head),
        comparisons=comparisons,
        overall=overall_of(times),
        canary=canary,
        stopping=_stopping(document),
        not_measured=document.not_measured,
    )


def comparison_of(document: RunDocument) -> SidesCompared:
    """What makes the document a comparison; ValueError where nothing does."""
    if document.comparison is None:
        raise ValueError("the document is of an ordinary run, expected a sitting of two sides (flowbench compare)")
    return document.comparison


def matched_sides(document: RunDocument, one: str = "base", other: str = "head") -> list[Matched]:
    """Base and head (or two other sides) of every engine and case, in the order of the document."""
    sides: dict[tuple[Case, str], dict[str, Cell]] = {}
    for cell in document.cells:
        engine = document.engine(cell.engine)
        if engine.side in (one, other):
            sides.setdefault((cell.case, engine.registered_name), {})[engine.side] = cell
    return [
        Matched(case, engine, cells.get(one), cells.get(other), _pairs(document, cells.get(one), cells.get(other)))
        for (case, engine), cells in sides.items()
    ]


def canary_of(document: RunDocument) -> Matched | None:
    """Base against itself, at the case where the sitting has that; None where it has not."""
    return next((match for match in matched_sides(document, "base", "canary") if match.head is not None), None)


def evidence_of(document: RunDocument, match: Matched) -> Evidence:
    """The log-ratios of a match, those of the confirming rounds apart, and its margin."""
    plan, protocol = comparison_of(document), document.protocol
    first_confirming = protocol.pairs - plan.confirmation_pairs
    ratios = [(base.pair, pair_log_ratio(base.steps_ms, head.steps_ms)) for base, head in match.pairs]
    return Evidence(
        sampling=tuple(ratio for pair, ratio in ratios if pair < first_confirming),
        confirming=tuple(ratio for pair, ratio in ratios if pair >= first_confirming),
        margin=margin_within(plan, match).size,
    )


def margin_within(plan: SidesCompared, match: Matched) -> Margin:
    """The margin within one sitting, whose intervals tell all noise but what its pairs share: at least the shift of a sitting.

    Where that is not known, as in documents and noise of earlier versions, the noise floor stands in: the cautious choice.
    """
    shift = plan.sitting_shifts.get(match.name)
    if shift is None:
        return margin_between(match, plan.least_margin, plan.noise_floors)
    return _at_least(plan.least_margin, shift, "shift of a sitting")


def margin_between(match: Matched, least_margin: float, noise_floors: Mapping[str, float]) -> Margin:
    """The margin between documents of two sittings, whose intervals do not tell what lies between: at least the noise floor."""
    floor = noise_floors.get(match.name)
    if floor is None:
        return Margin(
            least_margin,
            "the least one; flowbench aa has not measured this cell's noise here (in enough sittings)",
        )
    return _at_least(least_margin, floor, "noise floor")


def _at_least(least_margin: float, noise: float, name: str) -> Margin:
    if noise > least_margin:
        return Margin(noise, f"the {name} measured on this machine, {percent(noise)}")
    return Margin(least_margin, f"the least one; the {name} measured on this machine is {percent(noise)}")


def is_case_precise(document: RunDocument, case: Case) -> bool:
    """Whether the intervals of all engines at `case` are narrow enough to end sampling it."""
    matches = [match for match in matched_sides(document) if match.case == case]
    least = comparison_of(document).least_pairs
    evidence = [evidence_of(document, match) for match in matches if match.pairs]
    return bool(evidence) and all(is_precise(one.sampling, one.margin, least) for one in evidence)


def to_confirm(document: RunDocument, sides: Sequence[str] = ("head",)) -> dict[Case, tuple[str, ...]]:
    """The cases where some of `sides` look slower or faster than base after all the sampling, with these: new pairs decide."""
    found: dict[Case, tuple[str, ...]] = {}
    for side in sides:
        for match, judged in _judged(document, side):
            if judged.confirmed is not None:
                found[match.case] = (*found.get(match.case, ()), side)
    return found


def overall_of(times: Sequence[Comparison]) -> Overall:
    """The geometric mean of the changes over matched good cells: lost, failed and void ones have no change."""
    good = [time.change.ratio for time in times if time.change is not None]
    return Overall(geometric_mean(good) if good else None, len(good), len(times))


def missing_verdict(match: Matched, one: Sequence[Sample], other: Sequence[Sample], ending: str) -> tuple[Verdict, str]:
    """The verdict, with its reason, of a match without pairs or with a bad sample: `one` and `other` are all its samples."""
    if match.head is None:
        return Verdict.LOST, "base has this cell, head has not"
    if match.base is None:
        return Verdict.NEW, "head has this cell, base has not"
    for side, samples in (("head", other), ("base", one)):
        for sample in samples:
            if sample.status != "ok":
                verdict = Verdict.FAILED if sample.status == "failed" else Verdict.VOID
                return verdict, f"{side}, pair {sample.pair + 1}: {sample.error}"
    for side, samples in (("head", other), ("base", one)):
        if not samples:
            return Verdict.UNCLEAR, f"{side} was not measured: {ending}"
    return Verdict.UNCLEAR, "no round has both sides"


def one_sided(bare: Comparison, in_head: bool) -> Comparison:
    """The comparison of a kind of memory that base or head alone tells: `new` where it is head."""
    return replace(bare, verdict=Verdict.NEW if in_head else Verdict.LOST, reason="only one side tells this kind")


def _judged(document: RunDocument, side: str = "head") -> list[tuple[Matched, Judgement]]:
    """The judgement of every match of base and `side` that was measured, all together."""
    matches = matched_sides(document, "base", side)
    measured = [(match, evidence_of(document, match)) for match in matches if match.pairs]
    measured = [(match, evidence) for match, evidence in measured if evidence.sampling]
    judged = judge_times([evidence for _, evidence in measured])
    return [(match, one) for (match, _), one in zip(measured, judged, strict=True)]


def _time_of(document: RunDocument, match: Matched, judged: Judgement | None) -> Comparison:
    empty = Comparison(match.case, match.engine, label_of(document, match.case), STEP_TIME, Verdict.UNCLEAR, "")
    samples, other = (document.samples_of(cell) if cell else () for cell in (match.base, match.head))
    if judged is None:
        stopped = comparison_of(document).stopped.get(match.case.key)  # that the machine slept, say, ends no sitting
        ending = stopped or document.ending.reason or f"the sitting's ending is {document.ending.how!r}"
        verdict, reason = missing_verdict(match, samples, other, ending)
        return replace(empty, verdict=verdict, reason=reason)
    plan, single = comparison_of(document), judged.mean.count < 2
    base_speed, head_speed = (ratio_to_reference(document, cell) for cell in (match.base, match.head))
    confirming = sum(base.pair >= document.protocol.pairs - plan.confirmation_pairs for base, _ in match.pairs)
    return replace(
        empty,
        verdict=judged.verdict,
        reason=judged.reason,
        base=statistics.median(process_median(base.steps_ms) for base, _ in match.pairs),
        head=statistics.median(process_median(head.steps_ms) for _, head in match.pairs),
        change=Change(
            math.exp(judged.mean.mean),
            None if single else math.exp(judged.mean.low),
            None if single else math.exp(judged.mean.high),
        ),
        pairs=len(match.pairs),
        margin=margin_within(plan, match),
        sign_flip_p=judged.sign_flip_p,
        p=judged.p,
        adjusted_p=judged.adjusted_p,
        confirmed=judged.confirmed,
        confirmation_pairs=confirming,
        base_relative_speed=base_speed.geometric_mean if base_speed else None,
        head_relative_speed=head_speed.geometric_mean if head_speed else None,
        base_relative_interval=base_speed.interval if base_speed else None,
        head_relative_interval=head_speed.interval if head_speed else None,
        tags=tuple(_drifts(match)),
    )


def _memory_of(match: Matched, time: Comparison) -> Iterator[Comparison]:
    peaks = [(peaks_of(base), peaks_of(head)) for base, head in match.pairs]
    for quantity in dict.fromkeys(quantity for pair in peaks for side in pair for quantity in side):
        both = [sizes for base, head in peaks if (sizes := both_peaks(quantity, base, head)) is not None]
        bare = Comparison(match.case, match.engine, time.label, quantity, Verdict.UNCLEAR, "")
        if not both or quantity.name == "step time":
            yield one_sided(bare, any(quantity in head for _, head in peaks))
            continue
        judged = judge_memory(quantity.name, [base for base, _ in both], [head for _, head in both])
        ratios = [head / base for base, head in both if base > 0]
        yield replace(
            bare,
            verdict=judged.verdict,
            reason=judged.reason,
            base=judged.base,
            head=judged.head,
            change=Change(judged.head / judged.base, min(ratios), max(ratios)) if judged.base > 0 and ratios else None,
            pairs=len(both),
            margin=judged.margin,
        )


def _canary(document: RunDocument) -> Canary:
    match = canary_of(document)
    if match is None:
        return Canary("not measured", "the sitting has none")
    where = f"base against itself at {label_of(document, match.case)}"
    if not match.pairs:
        return Canary("not measured", f"{where} has no good pair")
    if len(match.pairs) < 2:
        return Canary("not measured", f"{where} has a single pair, which tells nothing")
    evidence = evidence_of(document, match)
    (judged,) = judge_times([evidence])
    time = replace(_time_of(document, match, judged), confirmed=None)
    looks_changed = judged.p <= LEVEL and judged.sign_flip_p <= CHECK_LEVEL
    seen = f"{where} shows {math.expm1(judged.mean.mean):+z.1%} in {time.pairs} pairs"
    if looks_changed:
        return Canary("flagged", f"{seen}: this sitting sees changes where there are none", time)
    return Canary("clear", f"{seen}, not for certain beyond ±{percent(evidence.margin)}", time)


def _pairs(document: RunDocument, base: Cell | None, head: Cell | None) -> tuple[tuple[Sample, Sample], ...]:
    """The samples of rounds in which both are ok; none where a sample of either is not: what is bad once has no figure."""
    if base is None or head is None:
        return ()
    ours, theirs = document.samples_of(head), document.samples_of(base)
    if any(sample.status != "ok" for sample in (*ours, *theirs)):
        return ()
    by_pair = {sample.pair: sample for sample in theirs}
    return tuple((by_pair[sample.pair], sample) for sample in ours if sample.pair in by_pair)


def _drifts(match: Matched) -> Iterator[str]:
    for side, number in (("base", 0), ("head", 1)):
        drifts = []
        for pair in match.pairs:
            steps, third = pair[number].steps_ms, len(pair[number].steps_ms) // 3
            if len(steps) >= _LEAST_DRIFT_STEPS:
                drifts.append(math.log(process_median(steps[-third:])) - math.log(process_median(steps[:third])))
        if len(drifts) < 2:
            continue
        drift = mean_of(drifts)
        if drift.low > math.log1p(_DRIFT) or drift.high < -math.log1p(_DRIFT):
            yield f"drift: {side}'s last third of steps takes {math.expm1(drift.mean):+.1%} of its first"


def _stopping(document: RunDocument) -> str:
    stopped = comparison_of(document).stopped
    labels: dict[str, list[str]] = {}
    for case in document.cases:
        why = stopped.get(case.key, document.ending.reason or "the sitting ended without a word (killed?)")
        labels.setdefault(why, []).append(label_of(document, case))
    ends = [why if len(labels) == 1 else f"{', '.join(names)}: {why}" for why, names in labels.items()]
    return "; ".join([*ends, *(finding.message for finding in document.findings if finding.kind == RESUMED)])


def label_of(document: RunDocument, case: Case) -> str:
    """A label for people that no other case of the document has."""
    return label_among(document.labels, case)


def label_among(shared: Mapping[str, int], case: Case) -> str:
    """A label for people; `shared` has how many cases have each: threads are told only where they tell cases apart."""
    return case.label if shared[case.label] == 1 else f"{case.label}, threads={case.threads}"


def side_name(side: Side) -> SideName:
    """A side of the plan, for people."""
    git = side.git
    return SideName(side.asked, git.commit if git else None, bool(git and git.dirty))


def _unclear(comparison: Comparison, reason: str) -> Comparison:
    if comparison.verdict.is_judged or comparison.verdict is Verdict.UNCLEAR:
        return replace(comparison, verdict=Verdict.UNCLEAR, reason=f"{reason} (it was: {comparison.verdict})")
    return comparison
