"""Writes a run as one HTML page that needs nothing else: verdicts, charts, every cell with its pairs."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterator
from typing import Any

from flowbench.cell import Cell
from flowbench.judge.pairs import matched_samples, ratio_of
from flowbench.judge.verdict import Verdict
from flowbench.report import charts, speed_stats
from flowbench.report.changes import ABOUT, BETTER, SIGNS, WORSE, Row, anchor, legend_of, rows_of, sizes_of
from flowbench.report.facts import Comparison, Facts, Side
from flowbench.report.figures import MOST_CHARTS, colours_of, figures_of, histories_of, left_out_words, memory_timeline
from flowbench.report.headline import headline_of, spoken
from flowbench.report.moves import moves_of
from flowbench.report.style import Style
from flowbench.report.templating import Ready, Templates
from flowbench.report.words import (
    counted,
    details_of,
    interval,
    mebibytes,
    memory_ratio,
    milliseconds,
    one_line,
    spread,
)

_TONE_SIGNS = {"worse": WORSE, "better": BETTER, "same": "=", "unknown": "?", "plain": ""}


def write(facts: Facts, style: Style | None = None) -> str:
    """The page of `facts`, which loads nothing from anywhere; FlowbenchError for a user's template that does not work."""
    templates = Templates(style.templates if style else {}, escaped)
    script = templates.fill("page.js", {})
    # The browser runs this script alone, and asks nobody for anything, whatever a name in the document says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates.fill("page.html.j2", {**view_of(facts), "script": Ready(script), "script_digest": Ready(digest)})


def escaped(text: str, longest: int = 400) -> str:
    """A text from data for HTML's text and attributes: one line of printable characters."""
    return html.escape(one_line(text, longest))


def view_of(facts: Facts) -> dict[str, Any]:
    """What the template is filled with."""
    document, headline = facts.document, headline_of(facts)
    rows = list(_rows(facts))
    figures, histories = list(figures_of(facts)), list(histories_of(facts))
    return {
        "title": _title(facts),
        "verdict": Ready(spoken(headline.verdict, _name)),
        "tone": headline.tone,
        "tone_sign": _TONE_SIGNS[headline.tone],
        "notes": [Ready(spoken(note, _name)) for note in headline.notes],
        "facts": facts,
        "document": document,
        "changes": facts.changes,
        "changed": list(_changed(facts)),
        "has_weak_base": any(row.has_weak_base for row in rows_of(facts) if row.changed),
        "about": ABOUT,
        "legend": legend_of(rows_of(facts)),
        "changed_legend": legend_of(row for row in rows_of(facts) if row.changed),
        "moves": list(moves_of(facts)),
        "rows": rows,
        "states": any(row["words"] for row in rows),
        "ends": _ends(facts),
        "columns": 7 + any(row["words"] for row in rows) + facts.has_host_times,
        "filters": list(_filters(rows)),
        "figures": figures[:MOST_CHARTS],
        "figures_left_out": left_out_words(min(len(figures), MOST_CHARTS), len(figures)),
        "profiles": list(_profiles(facts))[:MOST_CHARTS],
        "profiles_left_out": left_out_words(
            min(len(document.profiles), MOST_CHARTS), len(document.profiles), "profile"
        ),
        "histories": histories[:MOST_CHARTS],
        "histories_left_out": left_out_words(min(len(histories), MOST_CHARTS), len(histories)),
        "speed_stats": speed_stats.write(facts),
        "details": list(details_of(document)),
        "counted": counted,
    }


def _filters(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[str]]]:
    """What the cells can be filtered by: a word, the row's key, and the values, of which there are two at least."""
    for word, key in (("Model", "model"), ("Engine", "engine"), ("World size", "world"), ("State", "state")):
        values = list(dict.fromkeys(str(row[key]) for row in rows))
        if len(values) > 1:
            yield word, key, values


def _title(facts: Facts) -> str:
    models = list(dict.fromkeys(comparison.case.model for comparison in facts.comparisons))
    what = models[0] if len(models) == 1 else counted(len(models), "model")
    return f"{what}, {facts.document.created[:10]}"


def _name(text: str) -> str:
    return f'<span class="name">{escaped(text)}</span>'


def _changed(facts: Facts) -> Iterator[dict[str, Any]]:
    """The rows of what changed, of time and memory, with relative speeds where there is a reference."""
    for row in rows_of(facts):
        if row.changed:
            yield {
                "id": anchor(row.engine, row.case),
                "label": row.label,
                "engine": row.name,
                "sign": SIGNS[row.worst],
                "class": _class_of(row.worst),
                "words": row.words,
                "time": row.time,
                "memory": row.memory[0] if row.memory else None,
                "sizes": row.sizes,
                "speeds": row.speeds,
                "speeds_interval": row.speeds_interval,
                "reason": next((one.reason for one in (row.time, *row.memory) if one and one.verdict is row.worst), ""),
            }


def _class_of(verdict: Verdict) -> str:
    if verdict.is_regression or verdict in (Verdict.FAILED, Verdict.VOID, Verdict.LOST):
        return "worse"
    return {Verdict.FASTER: "better", Verdict.SMALLER: "better", Verdict.SAME: "same"}.get(verdict, "unknown")


def _rows(facts: Facts) -> Iterator[dict[str, Any]]:
    judged = {(row.engine, row.case): row for row in rows_of(facts)}
    earlier = facts.earlier_sides
    colours = colours_of(facts)
    ends = _ends(facts)
    for comparison in facts.comparisons:
        subject, reference, ratio = comparison.subject, comparison.reference, comparison.ratio
        row = None if subject.engine in earlier else judged.get((_sideless(facts, subject.engine), comparison.case))
        yield {
            "id": anchor(
                subject.engine if subject.engine in earlier else _sideless(facts, subject.engine), comparison.case
            ),
            "label": comparison.label,
            "model": one_line(comparison.case.model) or "?",
            "engine": one_line(subject.name) or "?",
            "world": comparison.case.world_size,
            "colour": colours[subject.name],
            "state": str(row.worst) if row else subject.status,
            "class": _class_of(row.worst) if row else "" if subject.status == "measured" else "worse",
            "sign": SIGNS[row.worst] if row else "" if subject.status == "measured" else "✕",
            "words": row.words if row else "" if subject.status == "measured" else subject.status,
            "subject": subject,
            "reference": reference,
            "ratio": ratio,
            "bar": charts.interval_bar(ratio.geometric_mean, ratio.telling_interval, ends, colours[subject.name])
            if ratio
            else "",
            "memory": _memory_words(comparison),
            "comparison": comparison,
            "strip": _strip(comparison),
            "against_base": _against_base(facts, comparison),
            "judged": _judged(row),
            "kinds": _kinds(subject, reference),
            "losses": _losses(facts, comparison),
        }


def _ends(facts: Facts) -> tuple[float, float]:
    """The scale that all bars share: wide enough for most intervals, as a few wide ones must not flatten the rest."""
    ratios = [comparison.ratio for comparison in facts.comparisons if comparison.ratio]
    means = [ratio.geometric_mean for ratio in ratios]
    told = [(ratio, ratio.telling_interval or (ratio.lowest, ratio.highest)) for ratio in ratios]
    lows = [max(low, ratio.lowest / 1.1) for ratio, (low, _) in told]
    highs = [min(high, ratio.highest * 1.1) for ratio, (_, high) in told]
    return min([*lows, *means, 1 / 1.02]), max([*highs, *means, 1.02])


def _sideless(facts: Facts, engine: str) -> str:
    """The engine's name without the side of a comparison that it stands for."""
    return facts.document.engine(engine).registered_name


def _strip(comparison: Comparison) -> Ready | None:
    ratio = comparison.ratio
    if ratio is None or comparison.reference is None:
        return None
    pairs = [math.exp(logarithm) for logarithm in ratio.log_ratios]
    told = ", ".join(f"{pair:.3f}" for pair in pairs[:40])
    what = f"{comparison.reference.name}'s time / {comparison.subject.name}'s in each of {counted(len(pairs), 'pair')}: {told}"
    return charts.strip(pairs, ratio.telling_interval, ratio.geometric_mean, what)


def _against_base(facts: Facts, comparison: Comparison) -> Ready | None:
    """The pairs of head and base where both are in this document."""
    engine = comparison.subject.engine
    base = Cell.of(comparison.case, f"{_sideless(facts, engine)}@base")
    if engine in facts.earlier_sides or base.key not in facts.document.by_key:
        return None
    pairs = matched_samples(facts.document, Cell.of(comparison.case, engine), base)
    if not pairs:
        return None
    ratio = ratio_of(pairs)
    told = ", ".join(f"{math.exp(pair):.3f}" for pair in ratio.log_ratios[:40])
    what = f"head's time / base's in each of {counted(ratio.pairs, 'pair')}: {told}"
    return charts.strip(
        [math.exp(pair) for pair in ratio.log_ratios], ratio.telling_interval, ratio.geometric_mean, what
    )


def _judged(row: Row | None) -> list[dict[str, str]]:
    """Each verdict of a cell with its figures, for the cell's details."""
    told = []
    for one in (row.time, *row.memory) if row else ():
        if one is None:
            continue
        ends = sizes_of(one) if one.quantity.unit == "bytes" else _times(one.base, one.head)
        ratio = memory_ratio if one.quantity.unit == "bytes" else "{:.3f}".format
        change = ratio(one.change.ratio) if one.change else ""
        if one.change and one.quantity.unit == "ms":
            change += f" ({interval(one.change.interval)})"
        elif one.change and one.change.interval:
            change += f" ({spread(*one.change.interval)})"
        told.append(
            {
                "what": one.quantity.label,
                "verdict": str(one.verdict),
                "class": _class_of(one.verdict),
                "ends": ends,
                "change": change,
                "reason": one.reason,
                "tags": ", ".join(one.tags),
            }
        )
    return told


def _times(*ends_ms: float | None) -> str:
    if not any(ends_ms):
        return ""
    return " → ".join("–" if time is None else f"{milliseconds(time)} ms" for time in ends_ms)


def _memory_words(comparison: Comparison) -> str:
    ratio, peak = comparison.telling_memory
    return f"{ratio:.2f}" if ratio else "–" if peak is None else mebibytes(peak)


def _kinds(subject: Side, reference: Side | None) -> list[dict[str, Any]]:
    """Memory per rank and kind, the subject's beside the reference's."""
    rows = []
    for rank in subject.memory:
        other = next((one.peaks for one in reference.memory if one.rank == rank.rank), {}) if reference else {}
        for kind, peak in rank.peaks.items():
            rows.append({"rank": rank.rank, "kind": kind, "subject": peak, "reference": other.get(kind)})
        if len(rank.on_gpus) > 1 or any(gpu != rank.rank for gpu in rank.on_gpus):
            others = next((one.on_gpus for one in reference.memory if one.rank == rank.rank), {}) if reference else {}
            for gpu, held in rank.on_gpus.items():
                rows.append(
                    {"rank": rank.rank, "kind": f"held on GPU {gpu}", "subject": held, "reference": others.get(gpu)}
                )
    return rows


def _losses(facts: Facts, comparison: Comparison) -> str:
    samples = facts.document.samples_of(Cell.of(comparison.case, comparison.subject.engine))
    differences = [sample.loss_difference for sample in samples if sample.loss_difference is not None]
    return f"Losses differ from the reference's by at most {max(differences):.2g}." if differences else ""


def _profiles(facts: Facts) -> Iterator[dict[str, Any]]:
    for profile in facts.document.profiles:
        cell = facts.document.by_key[profile.cell]
        yield {
            "label": cell.label,
            "profile": profile,
            "svg": memory_timeline(profile),
            "model": cell.model,
            "world": cell.world_size,
        }
