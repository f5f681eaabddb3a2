"""Limits on what head may come to, from a text in TOML: checked as numbers, each with its line and its exit code."""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowbench.cell import cell_name
from flowbench.errors import FlowbenchError
from flowbench.judge.stats import untold
from flowbench.judge.verdict import Comparison, ComparisonSet, LimitResult, MemoryKind

# The thresholds a limit may have, and what they are compared with.
_THRESHOLDS = {
    "min_relative_speed": "relative speed",
    "max_slowdown": "slowdown",
    "max_step_ms": "step time",
    "max_allocated_mib": "peak allocated",
    "max_reserved_mib": "peak reserved",
    "max_gpu_mib": "peak on the GPU",
    "max_resident_mib": "peak resident",
}
_MEMORY: dict[str, MemoryKind] = {
    "max_allocated_mib": "peak allocated",
    "max_reserved_mib": "peak reserved",
    "max_gpu_mib": "peak on the GPU",
    "max_resident_mib": "peak resident",
}
_KEYS = ("cell", *_THRESHOLDS, "exit_code")
_MIB = 1024 * 1024
_MOST = 1e15  # of any threshold: TOML's whole numbers have no end, and Python cannot make all of them floats


@dataclass(frozen=True)
class Limit:
    """One `[[limit]]`: thresholds by name, for every cell whose `ENGINE/MODEL/SHAPE/…` the pattern matches."""

    pattern: str
    thresholds: dict[str, float]
    exit_code: int


def parse_limits(text: str, source: str) -> tuple[Limit, ...]:
    """Read limits; FlowbenchError names `source` and the key that is unknown or has no usable value.

    A text looks like this: `[[limit]]`, `cell = "flow-eager/resnet50/*"`, `min_relative_speed = 1.0`, `max_slowdown = 0.05`.
    """
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise FlowbenchError(f"{source}: nested too deeply, expected tables [[limit]]") from None
    except ValueError as error:  # TOMLDecodeError, or a whole number of thousands of digits
        raise FlowbenchError(f"{source}: not TOML that can be read: {error}") from None
    unknown = [key for key in tree if key != "limit"]
    if unknown:
        raise FlowbenchError(f"{source}: unknown key {unknown[0]!r}, expected tables [[limit]] and nothing else")
    if not isinstance(tree.get("limit", []), list):
        raise FlowbenchError(f"{source}: limit is no list of tables, expected [[limit]] with two brackets before each")
    return tuple(
        _limit(table, f"{source}: limit {number}") for number, table in enumerate(tree.get("limit", []), start=1)
    )


def check_limits(limits: Sequence[Limit], comparison: ComparisonSet, source: str) -> tuple[LimitResult, ...]:
    """Every limit at every cell it matches; FlowbenchError for a pattern that matches none."""
    check_patterns(limits, [cell_name(time.engine, time.case) for time in comparison.times], source)
    return results_of(limits, comparison)


def results_of(limits: Sequence[Limit], comparison: ComparisonSet) -> tuple[LimitResult, ...]:
    """Every limit at every cell it matches; one that matches none is a result that could not be checked."""
    results: list[LimitResult] = []
    for limit in limits:
        times = [t for t in comparison.times if fnmatch.fnmatchcase(cell_name(t.engine, t.case), limit.pattern)]
        results += [_check(limit, name, time, comparison) for time in times for name in limit.thresholds]
        if not times:
            results += [
                LimitResult(
                    limit.pattern, name, limit.pattern, None, allowed, None, 2,
                    f"{limit.pattern}: no such cell was measured, so {name} = {allowed:g} cannot be checked",
                )
                for name, allowed in limit.thresholds.items()
            ]  # fmt: skip
    return tuple(results)


def check_patterns(limits: Sequence[Limit], names: Sequence[str], source: str) -> None:
    """Raise FlowbenchError for a pattern that matches none of `names`, which are cells' (`cell_name`)."""
    for limit in limits:
        if not fnmatch.filter(names, limit.pattern):
            known = ", ".join(names[:3]) or "none"
            raise FlowbenchError(f"{source}: the pattern {limit.pattern!r} matches no cell; cells here are: {known}")


def _limit(table: Any, where: str) -> Limit:
    if not isinstance(table, dict):
        raise FlowbenchError(f"{where}: expected a table with a cell pattern and thresholds")
    for key in table:
        if key not in _KEYS:
            raise FlowbenchError(f"{where}: unknown key {key!r}, expected some of {', '.join(_KEYS)}")
    pattern, code = table.get("cell"), table.get("exit_code", 1)
    if not isinstance(pattern, str) or not pattern:
        raise FlowbenchError(f"{where}: its cell is {pattern!r}, expected a pattern such as 'flow-eager/resnet50/*'")
    if not isinstance(code, int) or isinstance(code, bool) or not 1 <= code <= 125 or code == 2:
        raise FlowbenchError(f"{where}: its exit_code is {code!r:.40}, expected 1 or 3 to 125 (2 is: could not judge)")
    thresholds = {name: table[name] for name in _THRESHOLDS if name in table}
    if not thresholds:
        raise FlowbenchError(f"{where}: it has no threshold, expected some of {', '.join(_THRESHOLDS)}")
    for name, value in thresholds.items():
        usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
        if not usable:
            raise FlowbenchError(
                f"{where}: its {name} is {value!r:.40}, expected a number from 0 to {_MOST:g} (not a text)"
            )
    return Limit(pattern, {name: float(value) for name, value in thresholds.items()}, code)


def _check(limit: Limit, name: str, time: Comparison, comparison: ComparisonSet) -> LimitResult:
    allowed = limit.thresholds[name]
    measured = max(_measured(name, time, comparison), default=None)
    unit = " ms" if name == "max_step_ms" else " MiB" if name in _MEMORY else ""
    what = f"{time.label} {time.engine}: {_THRESHOLDS[name]}"
    if measured is None:
        line = f"{what} was not measured, so {name} = {allowed:g} cannot be checked"
        return LimitResult(limit.pattern, name, time.label, None, allowed, None, 2, line)
    kept = measured >= allowed if name.startswith("min") else measured <= allowed
    doubt = _doubt(name, time, None if kept else allowed)
    if doubt is not None:
        line = f"{what} is {measured:.4g} ({doubt}), {name} = {allowed:g}: cannot be judged"
        return LimitResult(limit.pattern, name, time.label, measured, allowed, None, 2, line)
    line = f"{what} is {measured:.4g}{unit}, {name} = {allowed:g}: {'kept' if kept else 'exceeded'}"
    return LimitResult(limit.pattern, name, time.label, measured, allowed, kept, 0 if kept else limit.exit_code, line)


def _doubt(name: str, time: Comparison, exceeded: float | None) -> str | None:
    """Why a ratio tells nothing, or not for certain that it is beyond the threshold `exceeded`; None where it does.

    What is no ratio is compared as it is.
    """
    if name not in ("min_relative_speed", "max_slowdown"):
        return None
    is_speed = name == "min_relative_speed"
    change = time.change.interval if time.change else None
    interval = time.head_relative_interval if is_speed else change
    if untold(interval) is not None or interval is None or exceeded is None:
        return untold(interval)
    low, high = interval if is_speed else (interval[0] - 1, interval[1] - 1)
    return f"95 % interval {low:.4g} to {high:.4g}" if low <= exceeded <= high else None


def _measured(name: str, time: Comparison, comparison: ComparisonSet) -> Iterator[float]:
    """What a threshold is compared with; of memory, what every rank and GPU has."""
    if name == "min_relative_speed" and time.head_relative_speed is not None:
        yield time.head_relative_speed
    elif name == "max_slowdown" and time.change is not None:
        yield time.change.ratio - 1
    elif name == "max_step_ms" and time.head is not None:
        yield time.head
    elif name in _MEMORY:
        for memory in comparison.memory_of(time):
            if memory.quantity.name == _MEMORY[name] and memory.head is not None:
                yield memory.head / _MIB
