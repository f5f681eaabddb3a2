"""What moved inside a step from base to head: the ops and the tensors, of the cells that were profiled on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowbench.cell import Cell
from flowbench.judge.explanation import Moved, direction, explain, foremost
from flowbench.report.facts import Facts
from flowbench.report.names import case_labels, side_less_name
from flowbench.report.profiles import doubt
from flowbench.report.words import mebibytes, milliseconds

_MOST = 4


@dataclass(frozen=True)
class Moves:
    """One cell's: each a name from data and its figures on both sides, what moved most first.

    There are ops where the time is slower or faster alone; `doubt` is why they may not be the cause, empty where they may.
    """

    label: str
    name: str
    doubt: str
    ops: tuple[tuple[str, str], ...]
    tensors: tuple[tuple[str, str], ...]


def moves_of(facts: Facts) -> Iterator[Moves]:
    """The moves of each cell of head that has a profile beside base's."""
    document = facts.document
    base_of = {engine.registered_name: engine.name for engine in document.engines if engine.side == "base"}
    labels = case_labels(document)
    for cell in document.cells:
        engine = document.engine(cell.engine)
        if engine.side != "head" or engine.registered_name not in base_of:
            continue
        base = document.profile_of(Cell.of(cell.case, base_of[engine.registered_name]))
        head = document.profile_of(cell)
        if base is not None and head is not None:
            moved = explain(base, head)
            time = facts.changes.time_of(cell.case, engine.registered_name) if facts.changes else None
            along = direction(time)
            ops = _told(foremost(moved.ops, _MOST, along), _ms) if along else ()
            tensors = _told(moved.tensors[:_MOST], mebibytes)
            if ops or tensors:
                yield Moves(labels[cell.case], side_less_name(engine), doubt(moved, time) if ops else "", ops, tensors)


def _told(moved: Sequence[Moved], word: Callable[[float], str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            " ".join(filter(None, (one.op, one.shape, one.module))),
            f"{_side(one.base, one, word)} → {_side(one.head, one, word)}",
        )
        for one in moved
    )


def _side(value: float | None, of: Moved, word: Callable[[float], str]) -> str:
    if value is not None:
        return word(value)
    return "absent" if of.unlisted_below is None else f"below {word(of.unlisted_below)}"


def _ms(time_ms: float) -> str:
    return f"{milliseconds(time_ms)} ms"
