"""Profiled steps in words: op by op, the tensors at the peak, and what changed between two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flowbench.cell import Cell
from flowbench.judge.explanation import (
    MOST_SHOWN,
    OUTSIDE,
    Explanation,
    Moved,
    direction,
    explain,
    foremost,
    is_shown,
    stands_for,
)
from flowbench.judge.verdict import Comparison, ComparisonSet
from flowbench.record.profile import Profile
from flowbench.record.run import RunDocument
from flowbench.report.words import milliseconds, one_line


def changes(document: RunDocument, comparison: ComparisonSet) -> Iterator[str]:
    """What changed in each cell that has profiles of both sides, in words: ops where `comparison` has its time changed."""
    for case in document.cases:
        sides = {stands_for(document, cell): document.profile_of(cell) for cell in document.cells_of(case)}
        for (engine, side), head in sides.items():
            base = sides.get((engine, "base"))
            if side == "head" and head is not None and base is not None:
                yield f"\n{one_line(case.label)} {one_line(engine)}"
                time = comparison.time_of(case, engine)
                yield from changed(explain(base, head), time, with_ops=direction(time) != 0)


def profile_lines(cell: Cell, profile: Profile) -> Iterator[str]:
    """A profile in words: its ops, its peak and the tensors alive there, the largest first."""
    yield f"{one_line(cell.label)}: one step op by op, {milliseconds(profile.step_ms)} ms (observed, which slows it)"
    for name, total_ms, calls in _largest(profile)[:MOST_SHOWN]:
        share = 100 * total_ms / profile.step_ms if profile.step_ms else 0.0
        yield f"  {milliseconds(total_ms):>9} ms  {share:4.1f} %  {calls:>5}  {name}"
    if profile.peak_bytes is not None:
        yield f"peak: {_size(profile.peak_bytes)}, {milliseconds(profile.peak_at_ms or 0.0)} ms into the step"
    for tensor in profile.tensors[:MOST_SHOWN]:
        name = _name(tensor.op, tensor.shape, tensor.module)
        yield f"  {_size(tensor.total_bytes):>9}  {tensor.count:>4} x  {name}"
    for text in profile.missing:
        yield f"not available: {one_line(text)}"


def changed(explanation: Explanation, time: Comparison | None, with_ops: bool = True) -> Iterator[str]:
    """What changed, in words; `time` is what was judged of all steps, None where nothing was."""
    base_ms, head_ms = explanation.step_ms
    yield f"what changed from base to head (profiled step: {milliseconds(base_ms)} -> {milliseconds(head_ms)} ms):"
    if with_ops:
        yield from (f"  {text}" for text in [doubt(explanation, time)] if text)
        ops = foremost(explanation.ops, MOST_SHOWN, direction(time))
        base_ms, head_ms = explanation.ops_ms
        title = f"ops whose time moved most, ms (all ops: {milliseconds(base_ms)} -> {milliseconds(head_ms)})"
        yield from _moves(title, ops, milliseconds)
    else:
        verdict = time.verdict if time else "not known"
        yield f"  ops: not shown, as the verdict on time is {verdict}; flowbench explain shows them"
    if explanation.peak_bytes is not None:
        base, head = explanation.peak_bytes
        yield f"peak: {_size(base)} -> {_size(head)}"
        yield from _moves("tensors alive at the peak that differ", explanation.tensors[:MOST_SHOWN], _size)


def doubt(explanation: Explanation, time: Comparison | None) -> str:
    """Why the ops that moved may not be taken for the cause, in words; empty where the profiled step moved as was judged."""
    if time is None or is_shown(explanation, time):
        return ""
    if not direction(time):
        return (
            f"the verdict on time is {time.verdict}: what moved in this one profiled step is noise, as far as is known"
        )
    measured = f"{time.verdict}, {time.change.ratio:.3f}" if time.change else time.verdict
    return (
        f"this one profiled step does not show the change ({measured}): it is noisy,"
        " and what moved in it is no sure explanation"
    )


def _largest(profile: Profile) -> list[tuple[str, float, str]]:
    """The name, the ms and the calls of each op, and the time outside them, the largest first."""
    rows = [(_name(op.op, op.shape, op.module), op.total_ms, f"{op.calls} x") for op in profile.ops]
    if profile.outside_ms is not None:
        rows.append((OUTSIDE, profile.outside_ms, ""))
    return sorted(rows, key=lambda row: -row[1])


def _moves(title: str, moves: tuple[Moved, ...], word: Callable[[float], str]) -> Iterator[str]:
    yield f"  {title}:" if moves else f"  {title}: none"
    for one in moves:
        unlisted = f"< {word(one.unlisted_below)}" if one.unlisted_below is not None else "none"
        base, head = (unlisted if side is None else word(side) for side in (one.base, one.head))
        sign = "+" if one.least_change > 0 else "-"
        yield f"    {base:>12} -> {head:>12}  {sign}{word(abs(one.least_change))}  {_name(one.op, one.shape, one.module)}"


def _size(nbytes: float) -> str:
    """Bytes as people write them."""
    units = ["B", "KiB", "MiB", "GiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        del units[0]
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.1f} {units[0]}"


def _name(op: str, shape: str, module: str) -> str:
    return one_line(f"{op} {shape}".strip() + (f" in {module}" if module else ""))
