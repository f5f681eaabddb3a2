"""The verdict in words: the first line of every report for people, and the sentences that must stand beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from flowbench.judge.verdict import Comparison, ComparisonSet, Verdict
from flowbench.report.facts import Facts, Overall
from flowbench.report.words import counted, spread

ENDINGS = {
    "interrupted": "the sitting was interrupted",
    "running": "the sitting ended without a word (killed?)",
    "wall_cap": "the sitting's time was up",
}
Tone = Literal["worse", "better", "same", "unknown", "plain"]


class Name(str):
    """A part of a sentence that comes from data: each format escapes it in its own way."""


Sentence = tuple[str, ...]


@dataclass(frozen=True)
class Headline:
    """The verdict, how it is to be taken, and the sentences that follow it."""

    verdict: Sentence
    tone: Tone
    notes: tuple[Sentence, ...]


def headline_of(facts: Facts) -> Headline:
    """What `facts` come to, in words."""
    notes = [*_incomplete(facts)]
    if facts.changes is not None:
        verdict, tone = _verdict(facts.changes)
        notes += [*_cautions(facts.changes), *_speeds(facts)]
        return Headline(verdict, tone, tuple(notes))
    speeds = list(_speeds(facts))
    verdict, *rest = speeds or [("Times only: there is no reference to compare with.",)]
    if not facts.anything_measured:
        verdict, rest = ("Nothing was measured. The reasons stand below.",), []
    rest.append(("No baseline: whether anything changed is not judged here.",))
    return Headline(verdict, "plain" if facts.anything_measured else "unknown", (*notes, *rest))


def spoken(sentence: Sentence, escaped: Callable[[str], str]) -> str:
    """A sentence with the parts that come from data `escaped`."""
    return "".join(escaped(part) if isinstance(part, Name) else part for part in sentence)


def _verdict(changes: ComparisonSet) -> tuple[Sentence, Tone]:
    base = Name(changes.base.name)
    if changes.differences:
        return (
            "No verdict: ",
            base,
            " was measured on another machine, figures of two machines do not compare.",
        ), "unknown"
    if changes.canary.state == "flagged":
        return (
            "No verdict: ",
            base,
            " measured against itself differs in this sitting, so nothing in it counts.",
        ), "unknown"
    times = changes.times
    memory = [comparison for comparison in changes.comparisons if comparison.quantity.unit == "bytes"]
    if not any(one.verdict.is_judged for one in changes.comparisons):
        return _nothing_judged(times, base), "unknown"
    time_words, memory_words = _time_words(times, base), _memory_words(memory)
    verdicts = {comparison.verdict for comparison in changes.comparisons}
    broken = verdicts & {Verdict.FAILED, Verdict.VOID, Verdict.LOST}
    if any(verdict.is_regression for verdict in verdicts) or broken:
        tone: Tone = "worse"
    elif verdicts & {Verdict.FASTER, Verdict.SMALLER}:
        tone = "better"
    else:
        tone = "unknown" if Verdict.UNCLEAR in verdicts else "same"
    return (*time_words, ", ", memory_words, "."), tone


def _nothing_judged(times: tuple[Comparison, ...], base: Name) -> Sentence:
    if not times:
        return ("No verdict: nothing was compared with ", base, ".")
    if all(one.verdict is Verdict.NEW for one in times):
        return ("No verdict: ", base, f" has no figures for any of the {counted(len(times), 'cell')}.")
    return ("No verdict: ", f"{_tally(times, len(times))}, so nothing could be judged against ", base, ".")


def _time_words(times: tuple[Comparison, ...], base: Name) -> Sentence:
    """`2 of 14 cells slower than main`; what could not be measured is said before what is as fast."""
    of = counted(len(times), "cell")
    changed = [one for one in times if one.verdict in (Verdict.SLOWER, Verdict.FASTER)]
    same = [one for one in times if one.verdict is Verdict.SAME]
    others = tuple(one for one in times if one.verdict not in (Verdict.SLOWER, Verdict.FASTER, Verdict.SAME))
    if changed:
        return (f"{_tally(tuple(changed), len(times))} than ", base, f", {_tally(others, None)}" if others else "")
    if not times:
        return ("No times to compare with ", base)
    if not others:
        return (f"All {of} as fast as " if len(times) > 1 else "1 cell as fast as ", base)
    if not same:
        return (f"{_tally(others, len(times))}: no verdict on time against ", base)
    return (f"{_tally(others, len(times))}, {len(same)} as fast as ", base)


def _memory_words(memory: list[Comparison]) -> str:
    if not memory:
        return "memory not compared"
    cells = {verdict: len({(one.case, one.engine) for one in memory if one.verdict is verdict}) for verdict in Verdict}
    told = [
        f"memory {verdict} in {counted(cells[verdict], 'cell')}"
        for verdict in (Verdict.LARGER, Verdict.SMALLER)
        if cells[verdict]
    ]
    if told:
        return " and ".join([told[0], *(words.removeprefix("memory ") for words in told[1:])])
    if not cells[Verdict.SAME]:
        return "memory not judged"
    open_ones = len({(one.case, one.engine) for one in memory if not one.verdict.is_judged})
    return (
        f"memory unchanged where it could be judged ({counted(open_ones, 'cell')} not)"
        if open_ones
        else "memory unchanged"
    )


def _tally(comparisons: tuple[Comparison, ...], of: int | None) -> str:
    """`2 of 14 cells slower and 1 faster`; without `of` just the counts."""
    counts = [(verdict, sum(one.verdict is verdict for one in comparisons)) for verdict in Verdict]
    (first, number), *others = [(verdict, count) for verdict, count in counts if count]
    start = f"{number} {first}" if of is None else f"{number} of {counted(of, 'cell')} {first}"
    words = [start, *(f"{count} {verdict}" for verdict, count in others)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _incomplete(facts: Facts) -> Iterator[Sentence]:
    ending = facts.document.ending
    if ending.how in ENDINGS:
        reason = (": ", Name(ending.reason)) if ending.reason else ()
        yield (f"Incomplete: {ENDINGS[ending.how]}", *reason, ". What was measured until then follows.")


def _cautions(changes: ComparisonSet) -> Iterator[Sentence]:
    if changes.differences:
        yield ("The machines differ in ", Name("; ".join(changes.differences)), ".")
    if changes.canary.state != "clear":
        yield ("Canary ", changes.canary.state, ": ", Name(changes.canary.reason))
    if not changes.interleaved:
        yield (
            "Base and head were measured in two sittings, not in turn: what else changed between them cannot be told apart.",
        )
    for limit in changes.limits:
        if limit.kept is not True:
            yield ("Limit: ", Name(limit.line))


def _speeds(facts: Facts) -> Iterator[Sentence]:
    """Each subject's speed beside the reference framework's."""
    if facts.reference is None or not facts.anything_measured:
        return
    reference = Name(facts.reference)
    # Of a comparison only head's speed is news: base's stands beside it in the table.
    others = {one.subject.name for one in facts.comparisons if one.subject.engine in facts.earlier_sides}
    for overall in facts.overall:
        if overall.name in others:
            continue
        cells = counted(overall.cells, "cell")
        if overall.geometric_mean is None:
            yield (
                Name(overall.name),
                ": no relative speed to ",
                reference,
                f", as none of its {cells} has good pairs.",
            )
        elif not overall.is_telling:
            yield (
                Name(overall.name), ": too few pairs to give a speed beside ", reference, f"'s ({_hedge(overall)}).",
            )  # fmt: skip
        else:
            yield (
                Name(overall.name), f": {overall.geometric_mean:.2f} times ", reference, f"'s speed ({_hedge(overall)}).",
            )  # fmt: skip


def _hedge(overall: Overall) -> str:
    """What a speed rests on: its cells and pairs, and the interval of the only one or else the lowest and the highest pair."""
    fewest, most = overall.fewest_pairs, overall.most_pairs
    pairs = counted(most, "pair") if fewest == most else f"{fewest} to {most} pairs"
    told = [f"geometric mean of {overall.good} of {counted(overall.cells, 'cell')}"] if overall.cells > 1 else []
    told.append(f"{pairs} each" if overall.good > 1 else pairs)
    if overall.interval is not None:
        told.append(f"95 % interval {spread(*overall.interval)}")
    elif overall.lowest is not None and overall.highest is not None and overall.all_pairs > 1:
        told.append(f"from {overall.lowest:.2f} to {overall.highest:.2f} times")
    if overall.is_telling and overall.untold:
        told.append(f"too few pairs in {counted(overall.untold, 'cell')}")
    return ", ".join(told)
