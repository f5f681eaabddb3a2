"""What became of each cell from base to head, one row a cell: its time, and the memory comparison that says most."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowbench.cell import Case
from flowbench.judge.stats import untold
from flowbench.judge.verdict import Comparison, Verdict
from flowbench.report.facts import Facts
from flowbench.report.names import side_less_name
from flowbench.report.words import interval, sizes

# From what a reader has to know first to what needs no attention.
ORDER = (
    Verdict.SLOWER, Verdict.LARGER, Verdict.FAILED, Verdict.VOID, Verdict.LOST, Verdict.FASTER, Verdict.SMALLER, Verdict.NEW,
    Verdict.UNCLEAR, Verdict.SAME,
)  # fmt: skip
_RANK = {verdict: rank for rank, verdict in enumerate(ORDER)}
UNCHANGED = (Verdict.SAME, Verdict.UNCLEAR)
# A sign beside the colour, for who sees no colours. None is an arrow: what is worse may be more time or less speed.
WORSE, BETTER, _NO_FIGURES = "!", "✓", "✕"
SIGNS: Mapping[Verdict, str] = {
    Verdict.SLOWER: WORSE, Verdict.LARGER: WORSE, Verdict.FAILED: _NO_FIGURES, Verdict.VOID: _NO_FIGURES,
    Verdict.LOST: _NO_FIGURES, Verdict.FASTER: BETTER, Verdict.SMALLER: BETTER, Verdict.NEW: "+", Verdict.UNCLEAR: "?",
    Verdict.SAME: "=",
}  # fmt: skip
_MEANINGS: Mapping[str, str] = {
    WORSE: "worse (slower or larger)", _NO_FIGURES: "failed, void or lost", BETTER: "better (faster or smaller)", "+": "new",
    "?": "unclear", "=": "the same",
}  # fmt: skip
# Before a relative speed of base's that its own pairs are too few to tell.
ABOUT = "≈"


@dataclass(frozen=True)
class Row:
    """One engine at one case, `name` is how people are told of it.

    `memory` are all its memory comparisons, the most telling first; `time` may be missing.
    """

    case: Case
    engine: str
    name: str
    label: str
    time: Comparison | None
    memory: tuple[Comparison, ...]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The time's verdict, then the most telling one of memory."""
        return tuple(one.verdict for one in (self.time, *self.memory[:1]) if one is not None)

    @property
    def worst(self) -> Verdict:
        """The verdict that a reader has to know first."""
        return min(self.verdicts, key=_RANK.__getitem__)

    @property
    def changed(self) -> bool:
        """Whether it belongs to what changed."""
        return self.worst not in UNCHANGED

    @property
    def broken(self) -> bool:
        """Whether a side gave no figures: the reason has to be told."""
        return self.worst in (Verdict.FAILED, Verdict.VOID, Verdict.LOST)

    @property
    def needs_reason(self) -> bool:
        """Whether its figures do not say what its verdict is about."""
        return self.broken or (self.worst is Verdict.LARGER and self.memory[0].change is None)

    @property
    def why(self) -> str:
        """The reasons of its most telling verdict."""
        told = [one for one in (self.time, *self.memory) if one and one.verdict is self.worst]
        return "; ".join(dict.fromkeys(one.reason for one in told))

    @property
    def unclear(self) -> str:
        """What of it could not be judged, and why; empty where all could."""
        told = [one for one in (self.time, *self.memory) if one and one.verdict is Verdict.UNCLEAR]
        return "; ".join(f"{one.quantity.label}: {one.reason}" for one in told)

    @property
    def speeds(self) -> str:
        """How fast base and head are beside the reference: `1.40 → 1.33`; empty where head's is not known.

        Only head's interval stands behind them, so that base's is `≈1.40` where its own says nothing.
        """
        if self.time is None or self.time.head_relative_speed is None:
            return ""
        base = self.time.base_relative_speed
        about = ABOUT if self.has_weak_base else ""
        return f"{'–' if base is None else f'{about}{base:.2f}'} → {self.time.head_relative_speed:.2f}"

    @property
    def has_weak_base(self) -> bool:
        """Whether a speed of base's is shown that its pairs are too few to tell."""
        if self.time is None or self.time.head_relative_speed is None or self.time.base_relative_speed is None:
            return False
        return untold(self.time.base_relative_interval) is not None

    @property
    def speeds_interval(self) -> str:
        """The 95 % interval of head's speed beside the reference; in its place that its pairs are too few."""
        if self.time is None or self.time.head_relative_speed is None:
            return ""
        return interval(self.time.head_relative_interval)

    @property
    def sizes(self) -> str:
        """Base's and head's peak of the memory comparison that says most; empty where there is none."""
        return sizes_of(self.memory[0]) if self.memory else ""

    @property
    def words(self) -> str:
        """Its verdicts in words: `slower, memory larger`."""
        told = [str(self.time.verdict)] if self.time else []
        if self.memory and (self.memory[0].verdict not in UNCHANGED[:1] or not told):
            memory = self.memory[0].verdict
            told += [f"memory {memory}"] if not told or str(memory) != told[0] else []
        return ", ".join(told)


def rows_of(facts: Facts) -> tuple[Row, ...]:
    """A row per engine and case, what changed first, else in the order of the comparisons; none where nothing is compared."""
    if facts.changes is None:
        return ()
    names = _engine_names(facts)
    groups: dict[tuple[Case, str], list[Comparison]] = {}
    for comparison in facts.changes.comparisons:
        groups.setdefault((comparison.case, comparison.engine), []).append(comparison)
    rows = []
    for (case, engine), members in groups.items():
        time = next((one for one in members if one.quantity.unit == "ms"), None)
        memory = sorted((one for one in members if one.quantity.unit == "bytes"), key=_telling)
        rows.append(Row(case, engine, names.get(engine, engine), members[0].label, time, tuple(memory)))
    return tuple(sorted(rows, key=lambda row: _RANK[row.worst]))


def sizes_of(one: Comparison) -> str:
    """Base's and head's peak of one memory comparison: `836.1 MiB → 836.4 MiB`; empty where neither is known."""
    if one.base is None and one.head is None:
        return ""
    return sizes(one.base, one.head, told_apart=one.verdict in (Verdict.LARGER, Verdict.SMALLER))


def legend_of(rows: Iterable[Row]) -> str:
    """What the signs of `rows` mean: of a row's verdicts the one to know first; empty without any."""
    used = {SIGNS[row.worst] for row in rows}
    return "; ".join(f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in used)


def anchor(engine: str, case: Case) -> str:
    """The name that a cell's link ends in: the same in every report, whatever else is in it."""
    readable = re.sub(
        r"[^a-z0-9]+", "-", f"{engine} {case.model} {'x'.join(map(str, case.input_shape))}".lower()
    ).strip("-")
    return f"cell-{readable[:60]}-{hashlib.sha256(f'{engine}/{case.key}'.encode()).hexdigest()[:10]}"


def _engine_names(facts: Facts) -> dict[str, str]:
    """The display name of each engine without its side, or its own name where several show the same one."""
    shown = {engine.registered_name: side_less_name(engine) for engine in facts.document.engines}
    counts = Counter(shown.values())
    return {name: word if counts[word] == 1 else name for name, word in shown.items()}


def _telling(comparison: Comparison) -> tuple[int, float]:
    change = abs(comparison.change.ratio - 1) if comparison.change else 0.0
    return _RANK[comparison.verdict], -change
