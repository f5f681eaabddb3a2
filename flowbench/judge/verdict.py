"""What a comparison of two sides comes to: the words and records of verdicts, for whoever shows or acts on them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flowbench.cell import Case
from flowbench.record.run import NotMeasured

# The tag of figures of unlike machines, or of unlike numbers of threads, which are shown by force.
NOT_COMPARABLE = "not comparable"

# A commit by its digits, as people ask for it and as it is shown.
_COMMIT = re.compile(r"[0-9a-fA-F]{7,40}")
_WHOLE_COMMIT = re.compile(r"[0-9a-fA-F]{40}")
_DIGITS = 10


class Verdict(enum.StrEnum):
    """What became of one quantity of one cell from base to head.

    `slower`, `faster` and `same` speak of times, `larger`, `smaller` and `same` of memory. `unclear`: it was measured, and
    cannot be told. `failed` and `void`: a side raised, hung or died, or trained wrongly. `lost`: in base, not in head.
    `new`: in head, not in base.
    """

    SLOWER = "slower"
    FASTER = "faster"
    LARGER = "larger"
    SMALLER = "smaller"
    SAME = "same"
    UNCLEAR = "unclear"
    FAILED = "failed"
    VOID = "void"
    LOST = "lost"
    NEW = "new"

    @property
    def is_regression(self) -> bool:
        """Whether head is worse than base for certain."""
        return self in (Verdict.SLOWER, Verdict.LARGER)

    @property
    def is_judged(self) -> bool:
        """Whether base and head could be told apart, or told to be alike."""
        return self.is_regression or self in (Verdict.FASTER, Verdict.SMALLER, Verdict.SAME)


# What a memory comparison may be about; `Memory` of the run document has a field for each.
MemoryKind = Literal["peak allocated", "peak reserved", "peak on the GPU", "peak resident"]


@dataclass(frozen=True)
class Quantity:
    """What is compared: the step time in ms, or one kind of memory peak in bytes; of one rank and one GPU where it has one."""

    name: Literal["step time"] | MemoryKind
    rank: int | None = None
    gpu: int | None = None

    @property
    def unit(self) -> Literal["ms", "bytes"]:
        """The unit of base's and head's values."""
        return "ms" if self.name == "step time" else "bytes"

    @property
    def label(self) -> str:
        """A short text for people: `peak reserved, rank 1, GPU 1`."""
        words = [str(self.name)]
        words += [f"rank {self.rank}"] if self.rank is not None else []
        words += [f"GPU {self.gpu}"] if self.gpu is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Change:
    """Head's value / base's: above 1, head takes more.

    `low` and `high` are, of times, the ends of its 95 % interval, None for one pair; of memory the least and the most of all
    pairs, None where there are no pairs.
    """

    ratio: float
    low: float | None
    high: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """`low` and `high`; None without them."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Margin:
    """The change that does not count: as a fraction (0.01 is 1 %) for times, in bytes for memory; and where it comes from."""

    size: float
    source: str


@dataclass(frozen=True)
class Comparison:
    """One quantity of one engine at one case, base → head. What could not be had is None; `reason` says the verdict in words.

    `sign_flip_p` is exact and for this cell alone, `p` the t test's against the margin, `adjusted_p` after Holm over all cells.
    `confirmed`: whether new pairs agreed with a `slower` or `faster`; None where there was nothing to confirm.
    `base_relative_speed` is the reference's time / base's: above 1, base is faster than the reference framework;
    `base_relative_interval` has the ends of its 95 % interval, None for one pair.
    """

    case: Case
    engine: str
    label: str
    quantity: Quantity
    verdict: Verdict
    reason: str
    base: float | None = None
    head: float | None = None
    change: Change | None = None
    pairs: int = 0
    margin: Margin | None = None
    sign_flip_p: float | None = None
    p: float | None = None
    adjusted_p: float | None = None
    confirmed: bool | None = None
    confirmation_pairs: int = 0
    base_relative_speed: float | None = None
    head_relative_speed: float | None = None
    base_relative_interval: tuple[float, float] | None = None
    head_relative_interval: tuple[float, float] | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Canary:
    """Base measured against itself in the same sitting. Where it is `flagged`, nothing else of the sitting counts."""

    state: Literal["clear", "flagged", "not measured"]
    reason: str
    comparison: Comparison | None = None


@dataclass(frozen=True)
class Overall:
    """The geometric mean of head's time / base's over the `good` ones of all `cells`; the ratio is None where none is good."""

    ratio: float | None
    good: int
    cells: int


@dataclass(frozen=True)
class LimitResult:
    """One limit at one cell: what was measured and allowed, as one line, and the exit code it asks for (0 where it is kept).

    `kept` is None where that cannot be judged: nothing was measured, or a ratio in too few pairs.
    """

    pattern: str
    name: str
    label: str
    measured: float | None
    allowed: float
    kept: bool | None
    exit_code: int
    line: str

    @property
    def is_unclear(self) -> bool:
        """Whether it was measured, and cannot be judged."""
        return self.kept is None and self.measured is not None


@dataclass(frozen=True)
class SideName:
    """One side for people: what was asked for (a git ref, `working tree`, a file) and the commit that it was."""

    asked: str
    commit: str | None
    dirty: bool

    @property
    def name(self) -> str:
        """What was asked for, the digits of a whole commit shortened."""
        return self.asked[:_DIGITS] if _WHOLE_COMMIT.fullmatch(self.asked) else self.asked

    @property
    def label(self) -> str:
        """`main (1a2b3c4d5e, with uncommitted changes)`; a commit that was asked for by its digits is told once."""
        if self.commit is None:
            return self.name
        by_digits = _COMMIT.fullmatch(self.asked) and self.commit.startswith(self.asked.lower())
        notes = [] if by_digits else [self.commit[:_DIGITS]]
        notes += ["with uncommitted changes"] if self.dirty else []
        name = self.commit[:_DIGITS] if by_digits else self.name
        return f"{name} ({', '.join(notes)})" if notes else name


@dataclass(frozen=True)
class ComparisonSet:
    """All that base and head came to. `stopping` says why sampling ended, in words.

    `interleaved` is false for two documents of different sittings. `differences` are the fields in which the machines differ;
    where there are any, nothing is comparable, and every verdict is `unclear`.
    """

    base: SideName
    head: SideName
    comparisons: tuple[Comparison, ...]
    overall: Overall
    canary: Canary
    stopping: str
    not_measured: tuple[NotMeasured, ...] = ()
    limits: tuple[LimitResult, ...] = ()
    interleaved: bool = True
    differences: tuple[str, ...] = ()

    @property
    def times(self) -> tuple[Comparison, ...]:
        """The comparisons of step times, one per cell."""
        return tuple(comparison for comparison in self.comparisons if comparison.quantity.name == "step time")

    def time_of(self, case: Case, engine: str) -> Comparison | None:
        """The comparison of the step times of a cell; None where there is none."""
        return next((time for time in self.times if (time.case, time.engine) == (case, engine)), None)

    def memory_of(self, time: Comparison) -> tuple[Comparison, ...]:
        """The memory comparisons of the cell that `time` is about."""
        return tuple(
            other
            for other in self.comparisons
            if other.quantity.name != "step time" and (other.case, other.engine) == (time.case, time.engine)
        )

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """How many comparisons came to each verdict; verdicts that none came to are left out."""
        verdicts = [comparison.verdict for comparison in self.comparisons]
        return {verdict: verdicts.count(verdict) for verdict in Verdict if verdict in verdicts}

    @property
    def exit_code(self) -> int:
        """1 where something is worse, else what an exceeded limit asks for, else 2 where something was not judged, else 0.

        A sitting whose canary is flagged is 2: nothing of it counts.
        """
        if self.canary.state == "flagged":
            return 2
        if any(comparison.verdict.is_regression for comparison in self.comparisons):
            return 1
        exceeded = [limit.exit_code for limit in self.limits if limit.kept is False]
        if exceeded:
            return min(exceeded)
        if any(limit.kept is None for limit in self.limits):
            return 2
        judged = any(comparison.verdict.is_judged for comparison in self.comparisons)
        open_ones = any(not (one.verdict.is_judged or one.verdict is Verdict.NEW) for one in self.comparisons)
        return 0 if judged and not open_ones else 2

    @property
    def is_only_unclear(self) -> bool:
        """Whether all was measured as planned, and nothing but an `unclear` keeps the exit code from 0.

        Not so for what is shown by force, of unlike machines or numbers of threads, nor where the canary is flagged: then it is
        not known that nothing is worse.
        """
        if self.canary.state == "flagged":
            return False
        open_ones = [one for one in self.comparisons if not (one.verdict.is_judged or one.verdict is Verdict.NEW)]
        measured = all(
            one.verdict is Verdict.UNCLEAR and one.pairs > 0 and NOT_COMPARABLE not in one.tags for one in open_ones
        )
        kept = all(limit.kept or limit.is_unclear for limit in self.limits)
        unclear = bool(open_ones) or any(limit.is_unclear for limit in self.limits)
        return self.exit_code == 2 and kept and measured and unclear and not self.differences
