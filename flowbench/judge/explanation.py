"""What changed within a step: the ops whose time moved most, the tensors at the peak that differ; and where to look for it.

A profile keeps its largest entries alone: what the other side does not list is there known to be less than its smallest. It is
of one step, whose time need not have moved as the verdict, of many, says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowbench.cell import Cell
from flowbench.judge.compare import judge_document
from flowbench.judge.verdict import Comparison, Verdict
from flowbench.record.profile import MOST_OPS, MOST_TENSORS, Profile, ProfiledOp, ProfiledTensor
from flowbench.record.run import RunDocument

# What stands among the ops for the step's time outside them.
OUTSIDE = "outside operations (host, between them)"

# A profiled step that moved by less than this part of what the verdict says, in ms, does not show it. In ms and not in per
# cent, since to be observed makes a step longer, but hardly what was added to it.
_LEAST_SHARE = 0.5

MOST_SHOWN = 10
# Of more cells that are slower or larger only the worst are looked into: each costs two processes.
MOST_PROFILED = 4


@dataclass(frozen=True)
class Moved:
    """One op (in ms) or one kind of tensor (in bytes) on both sides.

    A side that does not list it has None: it is absent there, or below `unlisted_below`, where that is not None.
    """

    op: str
    shape: str
    module: str
    base: float | None
    head: float | None
    unlisted_below: float | None

    @property
    def least_change(self) -> float:
        """Head - base; where a side is not known exactly, the change of which one can be sure."""
        below = self.unlisted_below or 0.0
        if self.base is None:
            return max(0.0, (self.head or 0.0) - below)
        if self.head is None:
            return min(0.0, below - self.base)
        return self.head - self.base


@dataclass(frozen=True)
class Explanation:
    """Ops and tensors that moved, most first; among the ops, the time outside them, where both sides tell it.

    `step_ms`, `ops_ms` (of all ops, listed or not) and `peak_bytes` are (base, head) of the profiled pass.
    """

    ops: tuple[Moved, ...]
    tensors: tuple[Moved, ...]
    step_ms: tuple[float, float]
    ops_ms: tuple[float, float]
    peak_bytes: tuple[int, int] | None


def worse_cells(document: RunDocument) -> list[Cell]:
    """Base's and head's cells of what is slower or larger in a document of two sides, the worst first, a few at most."""
    comparisons = [one for one in judge_document(document).comparisons if one.verdict.is_regression]
    comparisons.sort(key=lambda one: -(one.change.ratio if one.change else 1.0))
    wanted = [*dict.fromkeys((one.case, one.engine) for one in comparisons)][:MOST_PROFILED]
    found = []
    for case, engine in wanted:
        for side in ("base", "head"):
            found += [cell for cell in document.cells_of(case) if stands_for(document, cell) == (engine, side)]
    return found


def stands_for(document: RunDocument, cell: Cell) -> tuple[str, str | None]:
    """The engine of a cell by its registered name, and the side of a comparison that it stands for."""
    engine = document.engine(cell.engine)
    return engine.registered_name, engine.side


def explain(base: Profile, head: Profile) -> Explanation:
    """What moved from base to head."""
    ops = _moved({_key(op): op.total_ms for op in base.ops}, {_key(op): op.total_ms for op in head.ops}, MOST_OPS)
    if base.outside_ms is not None and head.outside_ms is not None:
        ops.append(Moved(OUTSIDE, "", "", base.outside_ms, head.outside_ms, None))
    tensors = _moved(
        {_key(tensor): tensor.total_bytes for tensor in base.tensors},
        {_key(tensor): tensor.total_bytes for tensor in head.tensors},
        MOST_TENSORS,
    )
    peaks = None
    if base.peak_bytes is not None and head.peak_bytes is not None:
        peaks = (base.peak_bytes, head.peak_bytes)
    return Explanation(_sorted(ops), _sorted(tensors), (base.step_ms, head.step_ms), (base.ops_ms, head.ops_ms), peaks)


def direction(time: Comparison | None) -> int:
    """1 where the time is slower, -1 where it is faster; 0 where it is not known to have moved."""
    if time is None:
        return 0
    return {Verdict.SLOWER: 1, Verdict.FASTER: -1}.get(time.verdict, 0)


def is_shown(explanation: Explanation, time: Comparison) -> bool:
    """Whether the profiled step moved as the verdict says that steps do: the same way, and by half as many ms at least."""
    base_ms, head_ms = explanation.step_ms
    along_ms = (head_ms - base_ms) * direction(time)
    expected_ms = abs(time.change.ratio - 1) * time.base if time.change and time.base is not None else 0.0
    return along_ms > 0 and along_ms >= _LEAST_SHARE * expected_ms


def foremost(moves: Sequence[Moved], most: int, along: int) -> tuple[Moved, ...]:
    """The `most` entries that moved most; where `along` is no 0, half of them moved that way, if so many did.

    A cell is not slower for what takes less time in it, however much less that is.
    """
    kept = [one for one in moves if one.least_change * along > 0][: (most + 1) // 2]
    kept += [one for one in moves if one not in kept][: most - len(kept)]
    return tuple(one for one in moves if one in kept)


def _key(entry: ProfiledOp | ProfiledTensor) -> tuple[str, str, str]:
    return entry.op, entry.shape, entry.module


def _moved(
    base: dict[tuple[str, str, str], float] | dict[tuple[str, str, str], int],
    head: dict[tuple[str, str, str], float] | dict[tuple[str, str, str], int],
    most: int,
) -> list[Moved]:
    moved = []
    for key in dict.fromkeys((*base, *head)):
        op, shape, module = key
        ours, theirs = base.get(key), head.get(key)
        below = _smallest(list(base.values()), most) if ours is None else None
        below = _smallest(list(head.values()), most) if theirs is None else below
        moved.append(Moved(op, shape, module, ours, theirs, below))
    return moved


def _sorted(moves: list[Moved]) -> tuple[Moved, ...]:
    return tuple(sorted((one for one in moves if one.least_change), key=lambda one: -abs(one.least_change)))


def _smallest(values: Sequence[float], most: int) -> float | None:
    """Below what an entry would not be listed; None where all were."""
    return min(values) if len(values) >= most else None
