"""The figures of `several_gpus.py` and their bars, from run documents and nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowbench.cell import Case, Cell
from flowbench.judge.pairs import matched_samples, ratio_of
from flowbench.judge.stats import process_median
from flowbench.record.gpu import FOREIGN_MEMORY
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample
from flowbench.report.peaks import MEMORY_KINDS

FLOW, PYTORCH, BEST = "flow-eager", "torch-eager", "torch-channels-last-static"
OTHERS = {PYTORCH: "PyTorch DDP", BEST: "PyTorch DDP at its best"}
LEAST_SPEED, LEAST_SCALING, MOST_MEMORY, LEAST_BANDWIDTH = 1.2, 0.97, 0.85, 0.95
MOST_ENDING_S = 10.0


@dataclass(frozen=True)
class Figure:
    """One line: `met` says whether the bar is, None where there is no figure; `value` then has the reason."""

    what: str
    value: str
    bar: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def cell_of(document: RunDocument, engine: str, batch_size: int, world_size: int) -> Cell:
    """A cell as it is, or would be, in a document whose cells differ in nothing else."""
    case = document.cells[0].case
    shape = (batch_size, *case.input_shape[1:])
    return Cell.of(replace(case, input_shape=shape, world_size=world_size), engine)


def speeds(document: RunDocument, own: Cell, engines: Sequence[str]) -> Iterator[Figure]:
    """How many times the speed of each other engine a cell of Flow has."""
    for engine in engines:
        pairs, reason = paired(document, Cell.of(own.case, engine), own)
        what, bar = f"{_where(own.case)}, speed against {OTHERS[engine]}", f">= {LEAST_SPEED}"
        if not pairs:
            yield Figure(what, reason, bar, None)
            continue
        ratio = ratio_of(pairs)
        mine, theirs = (f"{_time_ms([pair[side] for pair in pairs]):.1f}" for side in (1, 0))
        spread = (
            f"{ratio.lowest:.2f} - {ratio.highest:.2f} in {ratio.pairs} pairs; " if ratio.pairs > 1 else "one pair; "
        )
        value = f"{ratio.geometric_mean:.2f} ({spread}{mine} / {theirs} ms)"
        yield Figure(what, value, bar, ratio.geometric_mean >= LEAST_SPEED)


def memory(document: RunDocument, own: Cell, kinds: Sequence[str]) -> Iterator[Figure]:
    """The peaks of a cell of Flow over those of PyTorch's defaults, each of its largest rank."""
    pairs, reason = paired(document, Cell.of(own.case, PYTORCH), own)
    for kind in kinds:
        what, bar = f"{_where(own.case)}, {kind} per rank against {OTHERS[PYTORCH]}", f"<= {MOST_MEMORY}"
        theirs, ours = (_largest([pair[side] for pair in pairs], kind) for side in (0, 1))
        if ours is None or theirs is None:
            yield Figure(what, reason or _untold([sample for pair in pairs for sample in pair]), bar, None)
        else:
            value = f"{ours / theirs:.3f} ({ours / 2**20:.0f} / {theirs / 2**20:.0f} MiB)"
            yield Figure(what, value, bar, ours / theirs <= MOST_MEMORY)


def scaling(document: RunDocument, batch_size: int, world_sizes: Sequence[int]) -> Iterator[Figure]:
    """Flow's time at one rank over that at more, where each rank has as much to do."""
    alone, no_one = counted(document, cell_of(document, FLOW, batch_size, 1))
    for world_size in world_sizes:
        if world_size == 1:
            continue
        together, reason = counted(document, cell_of(document, FLOW, batch_size, world_size))
        what, bar = f"N = {batch_size} per rank, weak scaling from 1 to {world_size} ranks", f">= {LEAST_SCALING}"
        if not alone or not together:
            yield Figure(what, reason or f"with one rank: {no_one}", bar, None)
        else:
            one_ms, all_ms = _time_ms(alone), _time_ms(together)
            value = f"{one_ms / all_ms:.3f} ({one_ms:.1f} / {all_ms:.1f} ms)"
            yield Figure(what, value, bar, one_ms / all_ms >= LEAST_SCALING)


def foreign_memory(document: RunDocument, batch_sizes: Sequence[int]) -> Figure:
    """Whether any rank held memory on a GPU that is not its own, of whichever engine."""
    what = f"N = {', '.join(map(str, batch_sizes))}, ranks with memory on another's GPU"
    messages = dict.fromkeys(
        f"{document.by_key[finding.cell].engine if finding.cell else ''}: {finding.message}"
        for finding in document.findings
        if finding.kind == FOREIGN_MEMORY
    )
    samples = [sample for sample in document.samples if sample.ranks]
    ranks = [rank.memory for sample in samples for rank in sample.ranks]
    if messages:
        own = any(message.startswith(FLOW) for message in messages)
        return Figure(what, "; ".join(messages)[:300], "none of Flow's", not own)
    if not ranks or not all(each.gpu_uses for each in ranks):
        return Figure(what, _untold(samples) if ranks else "no sample was taken", "none of Flow's", None)
    return Figure(what, f"none of {len(ranks)}", "none of Flow's", True)


def agreement(document: RunDocument, what: str, cell: Cell) -> Figure:
    """Whether the ranks of a cell, which saw different data, ended with the same parameters: else it is void."""
    good, reason = counted(document, cell)
    if not good:
        void = any(sample.status == "void" for sample in document.samples_of(cell))
        return Figure(what, reason, "bit-identical", False if void else None)
    if len({rank.losses for rank in good[0].ranks}) < cell.world_size:
        return Figure(what, "some ranks saw the same losses, so the same data", "bit-identical", None)
    return Figure(what, "bit-identical", "bit-identical", True)


def bandwidth(what: str, flow: float, other: float) -> Figure:
    """Bus bandwidths in bytes per second, beside the other library's."""
    value = f"{flow / other:.2f} of PyTorch's ({flow / 1e9:.1f} / {other / 1e9:.1f} GB/s)"
    return Figure(what, value, f">= {LEAST_BANDWIDTH}", flow / other >= LEAST_BANDWIDTH)


def paired(document: RunDocument, other: Cell, own: Cell) -> tuple[tuple[tuple[Sample, Sample], ...], str]:
    """The pairs of two cells, or none and the reason: a bad sample of either spoils all."""
    for cell in (own, other):
        good, reason = counted(document, cell)
        if not good:
            return (), f"{cell.engine}: {reason}"
    pairs = matched_samples(document, other, own)
    return pairs, "" if pairs else "no round has both"


def counted(document: RunDocument, cell: Cell) -> tuple[list[Sample], str]:
    """The samples of a cell, or none and the reason."""
    samples = document.samples_of(cell)
    bad = next((f"{sample.status}: {sample.error}" for sample in samples if sample.status != "ok"), None)
    if bad is None and samples:
        return list(samples), ""
    left_out = [left.reason for left in document.not_measured if left.what in (cell.label, cell.engine)]
    return [], (bad or "; ".join(left_out) or document.ending.reason or f"the sitting is {document.ending.how}")[:300]


def _where(case: Case) -> str:
    return f"N = {case.input_shape[0]}, {case.world_size} rank{'s' * (case.world_size > 1)}"


def _time_ms(samples: Sequence[Sample]) -> float:
    return statistics.median(process_median(sample.steps_ms) for sample in samples)


def _largest(samples: Sequence[Sample], kind: str) -> int | None:
    peaks = [getattr(rank.memory, MEMORY_KINDS[kind]) for sample in samples for rank in sample.ranks]
    return max((peak for peak in peaks if peak is not None), default=None)


def _untold(samples: Sequence[Sample]) -> str:
    ranks = [rank.memory for sample in samples for rank in sample.ranks]
    hows = [each.gpu_uses_how for each in ranks if not each.gpu_uses and each.gpu_uses_how]
    return "; ".join(dict.fromkeys(hows)) or "an engine does not tell it"
