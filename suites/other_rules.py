"""The sittings of `flowbench aa` judged by the rules of other tools too: false alarms and power of each, as a table.

Run as `python suites/other_rules.py reports/aa-2-cores/*.xz`; it needs SciPy for the Mann-Whitney test. Each rule is given what
its tool would see. `same sitting`: base and head as they were measured, interleaved, which flatters the others: their runs are
minutes or days apart. `stored baseline`: head against the base of the sitting before, as they are used.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowbench.commands.false_alarms import evidence_of_sides
from flowbench.judge.false_alarms import verdicts_of
from flowbench.judge.inference import binomial_interval
from flowbench.judge.verdict import Verdict
from flowbench.record import aa

Processes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Rule:
    """A tool's rule: from the step times of base's and of head's processes to whether it says that something changed."""

    name: str
    what: str
    says_changed: Callable[[Processes, Processes], bool]


def _first_process(figure: Callable[[Sequence[float]], float], most: float) -> Callable[[Processes, Processes], bool]:
    """One run of each side, and one figure of each run: head's may be at most so many times base's."""
    return lambda base, head: figure(head[0]) / figure(base[0]) > most


def _asv(base: Processes, head: Processes) -> bool:
    """asv continuous: two processes a side, medians that differ by 10 %, and Mann-Whitney below 0.002."""
    one, other = _pooled(base[:2]), _pooled(head[:2])
    ratio = statistics.median(other) / statistics.median(one)
    return (ratio > 1.1 or ratio < 1 / 1.1) and _mann_whitney(one, other) < 0.002


def _pooled_mann_whitney(base: Processes, head: Processes) -> bool:
    return _mann_whitney(_pooled(base), _pooled(head)) < 0.05


def _pooled(processes: Processes) -> list[float]:
    return [time for process in processes for time in process]


def _mann_whitney(one: Sequence[float], other: Sequence[float]) -> float:
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(one, other).pvalue)


RULES = (
    Rule("pytest-benchmark `compare-fail=mean:5%`", "mean of one run", _first_process(statistics.fmean, 1.05)),
    Rule("pytest-benchmark `compare-fail=min:5%`", "minimum of one run", _first_process(min, 1.05)),
    Rule("asv continuous", "factor 1.1, p < 0.002, two runs", _asv),
    Rule("github-action-benchmark 150 %", "mean of one run", _first_process(statistics.fmean, 1.5)),
    Rule("github-action-benchmark 110 %", "mean of one run", _first_process(statistics.fmean, 1.1)),
    Rule("Mann-Whitney on pooled steps", "p < 0.05, all runs", _pooled_mann_whitney),
)


def table(path: Path) -> str:
    """The table of one file of sittings, in Markdown."""
    setting, sittings = aa.read(path)
    sides = ("head", *setting.slowdowns)
    titles = ["false alarms", *(f"+{100 * slowdown:g} % found" for slowdown in setting.slowdowns.values())]
    loads = [sitting.load_average for sitting in sittings]
    what = (
        f"{len(sittings)} sittings, {setting.engine} {setting.case.label}, {'with' if setting.load else 'without'} a load of"
        f" their own; the load average was {min(loads):.1f} to {max(loads):.1f} on {setting.machine.usable_cores} cores."
    )
    lines = [
        what,
        "",
        "| rule | "
        + " | ".join(f"{title}, {how}" for how in ("same sitting", "stored baseline") for title in titles)
        + " |",
        "|---|" + "---|" * 2 * len(titles),
    ]
    verdicts = [verdicts_of(of_side) for of_side in evidence_of_sides(setting, sittings).values()]
    ours = [
        [verdict in ((Verdict.SLOWER, Verdict.FASTER) if side == "head" else (Verdict.SLOWER,)) for verdict in of_side]
        for side, of_side in zip(sides, verdicts, strict=True)
    ]
    lines.append(_row("**flowbench**", [*ours, *[None] * len(sides)]))
    for rule in RULES:
        together = [[rule.says_changed(_steps(s, "base"), _steps(s, side)) for s in sittings] for side in sides]
        apart = [
            [rule.says_changed(_steps(earlier, "base"), _steps(later, side)) for earlier, later in itertools.pairwise(sittings)]
            for side in sides
        ]  # fmt: skip
        lines.append(_row(f"{rule.name} ({rule.what})", [*together, *apart]))
    return "\n".join(lines) + "\n"


def _steps(sitting: aa.AaSitting, side: str) -> Processes:
    """What a tool without rounds that confirm would have measured."""
    return [pair.steps_us for pair in sitting.pairs if pair.side == side and not pair.confirming]


def _row(name: str, columns: Sequence[Sequence[bool] | None]) -> str:
    return f"| {name} | " + " | ".join(_cell(column) for column in columns) + " |"


def _cell(said: Sequence[bool] | None) -> str:
    if not said:
        return "-"
    low, high = binomial_interval(sum(said), len(said))
    return f"{sum(said)} of {len(said)} ({low:.0%} - {high:.0%})"


if __name__ == "__main__":
    sys.stdout.write("\n".join(table(Path(argument)) for argument in sys.argv[1:]))
