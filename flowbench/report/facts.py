"""What a report has to say, taken from a run document: figures, ratios, and what could not be measured and why."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from flowbench.cell import Case, Cell
from flowbench.judge.pairs import matched_samples, ratio_of
from flowbench.judge.series import Series
from flowbench.judge.stats import Ratio, geometric_mean, process_median
from flowbench.judge.verdict import ComparisonSet
from flowbench.record.gpu import FOREIGN_MEMORY
from flowbench.record.run import NotMeasured, RunDocument
from flowbench.record.sample import Sample
from flowbench.report.names import case_labels, engine_names
from flowbench.report.peaks import TELLING_KINDS, RankPeaks, largest_peak, memory_ratios, peaks_of_ranks

_ENDINGS = {
    "interrupted": "the sitting was interrupted before it",
    "running": "the sitting ended without a word (killed?) before it",
    "wall_cap": "the sitting's time was up before it",
    "complete": "no sample of it was taken",
}

# What is cut is cut from the end: faults of what is measured must not be, nor what a GPU did; that the box was busy may.
_GRAVENESS = {
    kind: place
    for place, kind in enumerate(
        (FOREIGN_MEMORY, "left behind", "remark", "GPU memory", "GPU slowed down", "GPU shared", "GPU not watched")
    )
}

# Of fewer pairs, in all cells together, no speed is given.
_LEAST_PAIRS = 3


@dataclass(frozen=True)
class Times:
    """Step times in ms over all timed steps of the counted processes; a step takes as long as its slowest rank.

    `median_ms` is the median of the processes' medians; of a side of a comparison, over all rounds that have both sides.
    `host_ms` is the median time that the host takes to issue a step; None where steps were not timed on the device.
    """

    total_ms: float
    count: int
    median_ms: float
    processes: int
    host_ms: float | None = None

    @property
    def mean_ms(self) -> float:
        """The mean step time, total / count."""
        return self.total_ms / self.count


@dataclass(frozen=True)
class Side:
    """One engine at one case. `name` is unique in the document; `reason` says why it is not `measured`."""

    engine: str
    name: str
    status: Literal["measured", "void", "failed", "not measured"]
    reason: str | None
    times: Times | None
    memory: tuple[RankPeaks, ...]

    def largest_peak(self, kind: str) -> int | None:
        """The peak in bytes of the largest rank, None where this kind (`MEMORY_KINDS`) is unknown."""
        return largest_peak(self.memory, kind)


@dataclass(frozen=True)
class Comparison:
    """A subject at one case against the reference. Without `ratio`, `no_ratio` says why."""

    case: Case
    label: str
    subject: Side
    reference: Side | None
    ratio: Ratio | None
    no_ratio: str | None
    memory_ratios: dict[str, float]

    @property
    def relative_speed(self) -> float | None:
        """Reference time / subject time, the geometric mean of the pairs' ratios; None where there is no ratio."""
        return self.ratio.geometric_mean if self.ratio else None

    @property
    def telling_memory(self) -> tuple[float | None, int | None]:
        """Of the kinds of peaks the one that says most: subject's / reference's where both have it, the subject's in bytes."""
        kinds = [kind for kind in TELLING_KINDS if kind in self.memory_ratios] or TELLING_KINDS
        for kind in kinds:
            peak = self.subject.largest_peak(kind)
            if peak is not None:
                return self.memory_ratios.get(kind), peak
        return None, None


@dataclass(frozen=True)
class Overall:
    """The geometric mean of a subject's ratios over the `good` ones of all its `cells`, and how sure that is.

    A good cell has `fewest_pairs` to `most_pairs`, and a pair's ratio lies from `lowest` to `highest`; of `untold` cells the
    interval says nothing. `interval` is that of the only good cell, where it says something.
    """

    name: str
    geometric_mean: float | None
    good: int
    cells: int
    fewest_pairs: int = 0
    most_pairs: int = 0
    lowest: float | None = None
    highest: float | None = None
    untold: int = 0
    interval: tuple[float, float] | None = None
    all_pairs: int = 0

    @property
    def is_telling(self) -> bool:
        """Whether the mean says anything: three pairs in all, and most cells have an interval that does."""
        return self.all_pairs >= _LEAST_PAIRS and 2 * self.untold <= self.good


@dataclass(frozen=True)
class Disturbance:
    """What disturbed the measurement, of one kind: each message once, with how often it was found; `count` findings in all."""

    kind: str
    messages: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class Facts:
    """All that a report may say. `reference` is the reference's name, None where there is none to compare with.

    `changes` are the verdicts against a base, None where there is no base. `history` is what was measured, or posted, before.
    """

    document: RunDocument
    reference: str | None
    comparisons: tuple[Comparison, ...]
    overall: tuple[Overall, ...]
    left_out: tuple[NotMeasured, ...]
    changes: ComparisonSet | None = None
    history: tuple[Series, ...] = ()

    @functools.cached_property
    def earlier_sides(self) -> frozenset[str]:
        """The engines of a comparison that are base, or base once more as the canary: head's figures are what is new."""
        return frozenset(engine.name for engine in self.document.engines if engine.side not in (None, "head"))

    @functools.cached_property
    def disturbances(self) -> tuple[Disturbance, ...]:
        """The document's findings by kind, the gravest first: a busy box finds something in every sample."""
        found: dict[str, Counter[str]] = {}
        for finding in self.document.findings:
            found.setdefault(finding.kind, Counter())[finding.message] += 1
        return tuple(
            Disturbance(
                kind,
                tuple(f"{message} ({times} times)" if times > 1 else message for message, times in found[kind].items()),
                found[kind].total(),
            )
            for kind in sorted(found, key=lambda kind: _GRAVENESS.get(kind, len(_GRAVENESS)))
        )

    @functools.cached_property
    def has_host_times(self) -> bool:
        """Whether any engine has the host's time of a step."""
        sides = (side for comparison in self.comparisons for side in (comparison.subject, comparison.reference))
        return any(side is not None and side.times is not None and side.times.host_ms is not None for side in sides)

    @property
    def device(self) -> str:
        """The name of the GPU that was measured on, else of the CPU."""
        machine = self.document.machine
        return machine.gpus[0].name if self.document.on_gpu and machine.gpus else machine.cpu_model

    @property
    def anything_measured(self) -> bool:
        """Whether there is a time of any engine."""
        sides = (side for comparison in self.comparisons for side in (comparison.subject, comparison.reference))
        return any(side is not None and side.times is not None for side in sides)


def facts_of(document: RunDocument, changes: ComparisonSet | None = None, history: Sequence[Series] = ()) -> Facts:
    """The facts of a run document and what it was compared with; the same documents always yield the same facts."""
    names, labels = engine_names(document), case_labels(document)
    comparisons: list[Comparison] = []
    for case in document.cases:
        cells = document.cells_of(case)
        reference = next((cell for cell in cells if cell.engine == document.reference), None)
        subjects = [cell for cell in cells if cell is not reference] or list(cells)
        for subject in subjects:
            against = reference if subject is not reference else None
            comparisons.append(_comparison(document, labels[case], subject, against, names))
    reference_name = None
    if any(cell.engine == document.reference for cell in document.cells):
        reference_name = names[str(document.reference)]
    return Facts(
        document=document,
        reference=reference_name,
        comparisons=tuple(comparisons),
        overall=tuple(_overall(comparisons)),
        left_out=tuple(
            dict.fromkeys([*_left_out(document, names, labels), *(changes.not_measured if changes else ())])
        ),
        changes=changes,
        history=tuple(history),
    )


def _comparison(
    document: RunDocument, label: str, subject: Cell, reference: Cell | None, names: dict[str, str]
) -> Comparison:
    if reference is None:
        side = _side(document, subject, names)
        alone = "it is the reference" if subject.engine == document.reference else "there is no reference"
        return Comparison(subject.case, label, side, None, None, alone, {})
    pairs = matched_samples(document, reference, subject)
    unfit = [cell for cell in (reference, subject) if _status(document, cell)[0] != "measured"]
    if unfit or not pairs:
        sides = _side(document, reference, names), _side(document, subject, names)
        why = "; ".join(f"{side.name} {side.status}" for side in sides if side.status != "measured")
        why = why or "no round has both sides"
        return Comparison(subject.case, label, sides[1], sides[0], None, why, {})
    # Both sides' figures come from the same rounds, or an interrupted round would lean on the ratio.
    sides = (
        _side(document, reference, names, [pair[0] for pair in pairs]),
        _side(document, subject, names, [pair[1] for pair in pairs]),
    )
    return Comparison(
        subject.case, label, sides[1], sides[0], ratio_of(pairs), None, memory_ratios(sides[0].memory, sides[1].memory)
    )


def _side(document: RunDocument, cell: Cell, names: dict[str, str], samples: list[Sample] | None = None) -> Side:
    status, reason = _status(document, cell)
    name = names[cell.engine]
    if status != "measured":
        return Side(cell.engine, name, status, reason, None, ())
    typical = _typical_samples(document, cell, samples)
    samples = samples or list(document.samples_of(cell))
    steps = [sample.steps_ms for sample in samples]
    times = Times(
        total_ms=sum(map(sum, steps)),
        count=sum(map(len, steps)),
        median_ms=statistics.median(process_median(sample.steps_ms) for sample in typical),
        processes=len(samples),
        host_ms=_host_ms(samples),
    )
    return Side(cell.engine, name, status, None, times, peaks_of_ranks(samples, cell.world_size))


def _typical_samples(document: RunDocument, cell: Cell, shared: list[Sample] | None) -> Sequence[Sample]:
    """Whose median step is shown: the samples `shared` with the reference; those of a side, in all rounds that are judged.

    The reference takes part in few of them, and a side has one typical time, wherever it is shown.
    """
    own = document.samples_of(cell)
    engine = document.engine(cell.engine)
    if engine.side is None:
        return shared or own
    other = Cell.of(cell.case, f"{engine.registered_name}@{'head' if engine.side == 'base' else 'base'}")
    good = {sample.pair for sample in document.samples_of(other) if sample.status == "ok"}
    return [sample for sample in own if sample.pair in good] or own


def _host_ms(samples: Sequence[Sample]) -> float | None:
    known = [[rank.host_ms for rank in sample.ranks if rank.host_ms] for sample in samples]
    medians = [statistics.median(map(max, zip(*ranks, strict=False))) for ranks in known if ranks]
    return statistics.median(medians) if medians else None


def _status(
    document: RunDocument, cell: Cell
) -> tuple[Literal["measured", "void", "failed", "not measured"], str | None]:
    """One bad sample spoils its cell: figures of the rest would hide it."""
    samples = document.samples_of(cell)
    for sample in samples:
        if sample.status != "ok":
            return sample.status, f"pair {sample.pair + 1}: {sample.error}"
    return ("measured", None) if samples else ("not measured", _ENDINGS[document.ending.how])


def _overall(comparisons: list[Comparison]) -> Iterable[Overall]:
    for name in dict.fromkeys(comparison.subject.name for comparison in comparisons if comparison.reference):
        own = [comparison for comparison in comparisons if comparison.subject.name == name and comparison.reference]
        ratios = [comparison.ratio for comparison in own if comparison.ratio]
        if not ratios:
            yield Overall(name, None, 0, len(own))
            continue
        yield Overall(
            name=name,
            geometric_mean=geometric_mean([ratio.geometric_mean for ratio in ratios]),
            good=len(ratios),
            cells=len(own),
            fewest_pairs=min(ratio.pairs for ratio in ratios),
            most_pairs=max(ratio.pairs for ratio in ratios),
            lowest=min(ratio.lowest for ratio in ratios),
            highest=max(ratio.highest for ratio in ratios),
            untold=sum(ratio.telling_interval is None for ratio in ratios),
            interval=ratios[0].telling_interval if len(ratios) == 1 else None,
            all_pairs=sum(ratio.pairs for ratio in ratios),
        )


def _left_out(document: RunDocument, names: dict[str, str], labels: dict[Case, str]) -> Iterable[NotMeasured]:
    said = {missing.what for missing in document.not_measured}
    for cell in document.cells:
        status, reason = _status(document, cell)
        taken = len(document.samples_of(cell))
        what = f"{names[cell.engine]} {labels[cell.case]}"
        if reason is not None and said.isdisjoint({cell.key, cell.label, what}):
            yield NotMeasured(what, reason if status == "not measured" else f"{status}, {reason}")
        elif status == "measured" and taken < document.protocol.pairs and document.comparison is None:
            yield NotMeasured(what, f"{taken} of {document.protocol.pairs} pairs were measured")
    yield from document.not_measured
    if not any(cell.engine == document.reference for cell in document.cells):
        yield NotMeasured("relative speed", "there is no reference in this run, so times only")
    ranks = [rank for sample in document.samples for rank in sample.ranks]
    untold = (rank.memory.gpu_uses_how for rank in ranks if not rank.memory.gpu_uses and rank.memory.gpu_uses_how)
    for how in dict.fromkeys(untold):
        yield NotMeasured("GPU used (the driver's figure for each process)", how)
