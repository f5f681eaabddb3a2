"""Judges two run documents of different sittings: by how each stands beside its own reference, which was measured with it."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flowbench.cell import Case, Cell
from flowbench.judge.compare import (
    STEP_TIME,
    Matched,
    label_among,
    margin_between,
    missing_verdict,
    one_sided,
    overall_of,
)
from flowbench.judge.inference import Mean, beyond, difference_of, holm
from flowbench.judge.memory import both_peaks, judge_memory, peaks_of
from flowbench.judge.pairs import matched_samples, ratio_to_reference
from flowbench.judge.stats import process_median
from flowbench.judge.times import LEAST_MARGIN, LEVEL, by_chance, pair_log_ratio, percent
from flowbench.judge.verdict import NOT_COMPARABLE, Canary, Change, Comparison, ComparisonSet, Margin, SideName, Verdict
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample


def judge_documents(
    base: RunDocument, head: RunDocument, force: bool = False, noise_floors: Mapping[str, float] | None = None
) -> ComparisonSet:
    """The verdicts from one document to the other. On unlike machines nothing is judged: every verdict is `unclear`.

    `differences` says in which fields the machines differ; `force` marks what is shown all the same as not comparable, and
    puts cells beside each other that differ in threads alone.
    Times are compared relative to the reference of each document; without one, or with another version of it, a slower machine
    and a slower engine look the same, and no time is judged. `noise_floors` are those known of the machine, by `ENGINE/CASE`;
    where a document has larger ones, these count.
    """
    differences = tuple(base.machine.differences(head.machine))
    times: list[Comparison] = []
    memory: list[Comparison] = []
    matches = _beside_each_other(_matches(base, head)) if force else _matches(base, head)
    labels, elsewhere = _labels(matches), dict(_other_threads(matches))
    means = {index: mean for index, match in enumerate(matches) if (mean := _change(base, head, match)) is not None}
    floors = _largest([noise_floors or {}, *(one.comparison.noise_floors for one in (base, head) if one.comparison)])
    margins = [margin_between(match, LEAST_MARGIN, floors) for match in matches]
    tests = [index for index in means if _like_threads(matches[index])]
    ps = [beyond(means[index], math.log1p(margins[index].size)) for index in tests]
    adjusted = dict(zip(tests, holm(ps), strict=True))
    why_not = _why_no_times(base, head)
    for index, match in enumerate(matches):
        tested = _Tested(margins[index], means.get(index), adjusted.get(index, 1.0), len(tests))
        time = _time_of(base, head, match, tested, why_not)
        time = replace(time, label=labels[match], reason=elsewhere.get(match, time.reason))
        both = [time, *_memory_of(base, head, match, time)]
        if not _like_threads(match):
            both = [_not_comparable(one, f"{NOT_COMPARABLE}: {_threads_of(match)}, shown by force") for one in both]
        times.append(both[0])
        memory += both[1:]
    comparisons = (*times, *memory)
    if differences:
        reason = f"{NOT_COMPARABLE}: unlike machines" + (", shown by force" if force else "")
        comparisons = tuple(_not_comparable(one, reason) for one in comparisons)
    return ComparisonSet(
        base=_name(base),
        head=_name(head),
        comparisons=comparisons,
        overall=overall_of(times),
        canary=Canary("not measured", "two sittings have no canary in common"),
        stopping="two documents are judged as they are",
        not_measured=(*base.not_measured, *(one for one in head.not_measured if one not in base.not_measured)),
        interleaved=False,
        differences=differences,
    )


@dataclass(frozen=True)
class _Tested:
    """The change of one of `cells` cells, None where it has none, the margin it is tested against, and p after Holm."""

    margin: Margin
    mean: Mean | None
    adjusted_p: float
    cells: int


def _largest(floors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    largest: dict[str, float] = {}
    for one in floors:
        for cell, floor in one.items():
            largest[cell] = max(floor, largest.get(cell, floor))
    return largest


def _why_no_times(base: RunDocument, head: RunDocument) -> str | None:
    if base.reference is None or head.reference is None:
        return "one document has no reference, so that a slower machine and a slower engine look the same"
    if base.reference != head.reference:
        return f"the references differ: {base.reference} / {head.reference}"
    versions = [document.engine(str(document.reference)).version for document in (base, head)]
    if versions[0] != versions[1]:
        return f"the reference {base.reference} is of version {versions[0]} / {versions[1]}"
    return None


def _matches(base: RunDocument, head: RunDocument) -> list[Matched]:
    """The cells of both documents other than the references', head's side of a sitting of two sides; those of base first."""
    ours, theirs = _subjects(base), _subjects(head)
    return [Matched(*key, ours.get(key), theirs.get(key), ()) for key in dict.fromkeys([*ours, *theirs])]


def _beside_each_other(matches: list[Matched]) -> list[Matched]:
    """The matches, a lost and a new cell that differ in threads alone as one, where no other does."""
    pairs = {lost[0]: new[0] for lost, new in _apart(matches) if len(lost) == len(new) == 1}
    joined = [replace(pairs[one], base=one.base) if one in pairs else one for one in matches]
    found = set(pairs.values())
    return [one for one in joined if one not in found]


def _like_threads(match: Matched) -> bool:
    return not (match.base and match.head) or match.base.threads == match.head.threads


def _threads_of(match: Matched) -> str:
    return " / ".join(str(cell.threads) for cell in (match.base, match.head) if cell) + " threads"


def _apart(matches: Iterable[Matched]) -> Iterator[tuple[list[Matched], list[Matched]]]:
    """The lost and the new cells that differ in threads alone."""
    groups: dict[tuple[Case, str], tuple[list[Matched], list[Matched]]] = {}
    for match in matches:
        if match.base is None or match.head is None:
            lost, new = groups.setdefault((replace(match.case, threads=1), match.engine), ([], []))
            (lost if match.head is None else new).append(match)
    yield from ((lost, new) for lost, new in groups.values() if lost and new)


def _other_threads(matches: Iterable[Matched]) -> Iterator[tuple[Matched, str]]:
    """Why a cell is lost or new that the other document has with other threads, which are part of what is measured."""
    for lost, new in _apart(matches):
        for side, ours, theirs in (("head", lost, new), ("base", new, lost)):
            *others, last = sorted(match.case.threads for match in theirs)
            has = (
                f"{', '.join(map(str, others))} and {last} threads"
                if others
                else f"{last} thread{'s' if last > 1 else ''}"
            )
            for match in ours:
                way_out = "measure both with the same --threads"
                yield match, f"{side} has it with {has} in place of {match.case.threads}: {way_out}"


def _labels(matches: Iterable[Matched]) -> dict[Matched, str]:
    """A label for each match that no other case of the two documents has."""
    matches = list(matches)
    shared = Counter(case.label for case in {match.case for match in matches})
    return {
        match: label_among(shared, match.case) if _like_threads(match) else f"{match.case.label}, {_threads_of(match)}"
        for match in matches
    }


def _subjects(document: RunDocument) -> dict[tuple[Case, str], Cell]:
    engines = {engine.name: engine for engine in document.engines}
    return {
        (cell.case, engines[cell.engine].registered_name): cell
        for cell in document.cells
        if cell.engine != document.reference and engines[cell.engine].side in (None, "head")
    }


def _change(base: RunDocument, head: RunDocument, match: Matched) -> Mean | None:
    """The change of the time relative to the reference's, in logarithms; None where a side has no good pair with it."""
    ours, theirs = _relative_times(base, match.base), _relative_times(head, match.head)
    return difference_of(ours, theirs) if ours and theirs else None


def _relative_times(document: RunDocument, cell: Cell | None) -> list[float]:
    if cell is None or document.reference is None or not _good(document, cell):
        return []
    reference = Cell.of(cell.case, document.reference)
    pairs = matched_samples(document, reference, cell)
    return [pair_log_ratio(theirs.steps_ms, own.steps_ms) for theirs, own in pairs]


def _good(document: RunDocument, cell: Cell | None) -> tuple[Sample, ...]:
    """The samples of a cell; none where one of them is bad."""
    samples = document.samples_of(cell) if cell else ()
    return samples if all(sample.status == "ok" for sample in samples) else ()


def _time_of(base: RunDocument, head: RunDocument, match: Matched, tested: _Tested, why_not: str | None) -> Comparison:
    ours, theirs = _good(base, match.base), _good(head, match.head)
    bare = Comparison(
        match.case, match.engine, match.case.label, STEP_TIME, Verdict.UNCLEAR, "", tags=("different sittings",)
    )
    if not ours or not theirs:
        one = base.samples_of(match.base) if match.base else ()
        other = head.samples_of(match.head) if match.head else ()
        verdict, reason = missing_verdict(match, one, other, "its document has no sample of it")
        return replace(bare, verdict=verdict, reason=reason)
    verdict, reason = Verdict.UNCLEAR, why_not or "a side has no pair with its reference"
    mean = tested.mean
    if mean is not None and why_not is None:
        verdict, reason = _verdict(mean, tested)
    pairs = [_relative_times(document, cell) for document, cell in ((base, match.base), (head, match.head))]
    base_speed, head_speed = ratio_to_reference(base, match.base), ratio_to_reference(head, match.head)
    single = mean is None or mean.count < 2
    return replace(
        bare,
        verdict=verdict,
        reason=reason,
        base=statistics.median(process_median(sample.steps_ms) for sample in ours),
        head=statistics.median(process_median(sample.steps_ms) for sample in theirs),
        change=None
        if mean is None
        else Change(
            math.exp(mean.mean), None if single else math.exp(mean.low), None if single else math.exp(mean.high)
        ),
        pairs=min(map(len, pairs)),
        margin=tested.margin,
        p=None if mean is None else beyond(mean, math.log1p(tested.margin.size)),
        adjusted_p=None if mean is None else tested.adjusted_p,
        base_relative_speed=base_speed.geometric_mean if base_speed else None,
        head_relative_speed=head_speed.geometric_mean if head_speed else None,
        base_relative_interval=base_speed.interval if base_speed else None,
        head_relative_interval=head_speed.interval if head_speed else None,
    )


def _verdict(mean: Mean, tested: _Tested) -> tuple[Verdict, str]:
    margin, size = math.log1p(tested.margin.size), percent(tested.margin.size)
    direction = Verdict.SLOWER if mean.mean > 0 else Verdict.FASTER
    if mean.count < 2:
        return Verdict.UNCLEAR, "one pair has no spread to judge it by"
    if tested.adjusted_p <= LEVEL:
        return direction, f"relative to the reference, the interval lies wholly beyond {size}"
    if beyond(mean, margin) <= LEVEL:
        return Verdict.UNCLEAR, by_chance(direction, tested.cells)
    if -margin <= mean.low and mean.high <= margin:
        return Verdict.SAME, f"relative to the reference, the interval lies within ±{size}"
    return Verdict.UNCLEAR, f"relative to the reference, the interval neither lies within ±{size} nor beyond"


def _memory_of(base: RunDocument, head: RunDocument, match: Matched, time: Comparison) -> Iterator[Comparison]:
    """Peaks of every process of head beside those of every process of base: they come in no pairs."""
    ours = [peaks_of(sample) for sample in _good(base, match.base)]
    theirs = [peaks_of(sample) for sample in _good(head, match.head)]
    for quantity in dict.fromkeys(quantity for peaks in (*ours, *theirs) for quantity in peaks):
        pairs = itertools.product(ours, theirs)
        both = [sizes for one, two in pairs if (sizes := both_peaks(quantity, one, two)) is not None]
        if not ours or not theirs or quantity.name == "step time":
            continue
        bare = Comparison(match.case, match.engine, time.label, quantity, Verdict.UNCLEAR, "", tags=time.tags)
        if not both:
            yield one_sided(bare, any(quantity in peaks for peaks in theirs))
            continue
        fewest = min(len(ours), len(theirs))
        judged = judge_memory(quantity.name, [one for one, _ in both], [two for _, two in both], fewest)
        change = Change(judged.head / judged.base, None, None) if judged.base > 0 else None
        yield replace(
            bare,
            verdict=judged.verdict,
            reason=judged.reason,
            base=judged.base,
            head=judged.head,
            change=change,
            pairs=fewest,
            margin=judged.margin,
        )


def _name(document: RunDocument) -> SideName:
    """A run by the commit that its figures are of: head's, where it is a sitting of two sides."""
    git = document.comparison.head.git if document.comparison else document.git
    return SideName(f"run {document.run_id}", git.commit if git else None, bool(git and git.dirty))


def _not_comparable(one: Comparison, reason: str) -> Comparison:
    if one.verdict.is_judged or one.verdict is Verdict.UNCLEAR:
        return replace(one, verdict=Verdict.UNCLEAR, reason=reason, tags=(*one.tags, NOT_COMPARABLE))
    return replace(one, tags=(*one.tags, NOT_COMPARABLE))
