"""Writes a run as GitHub Markdown: the verdict, what changed, then, folded, everything else; short enough for a comment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from flowbench.cell import Case
from flowbench.report import speed_stats
from flowbench.report.changes import ABOUT, SIGNS, legend_of, rows_of
from flowbench.report.facts import Comparison, Facts
from flowbench.report.headline import headline_of, spoken
from flowbench.report.moves import moves_of
from flowbench.report.style import Style
from flowbench.report.templating import Ready, Templates
from flowbench.report.words import details_of, markdown, one_line

# GitHub refuses a comment of more than 65,536 characters; the rest is for who posts it.
LONGEST = 60_000
_CUT = "\n\n… cut here: the text was too long for a comment.\n"
_FIRST_GUESS, _MOST_GUESSES = 100, 6
_MOST_CHANGED = 1500  # of more, not even the shortest rows fit
_MOST_CHARTS, _MOST_IN_CHART = 3, 24
_SHORT_LABEL = {"full": 200, "short": 80, "shortest": 40}


def write(facts: Facts, style: Style | None = None) -> str:
    """The Markdown of `facts`, at most `LONGEST` characters; FlowbenchError for a user's template that does not work.

    Folded parts are cut first, then the columns of changed cells; only where many hundreds changed are some of them left out.
    """
    templates, view = Templates(style.templates if style else {}, markdown), view_of(facts)
    changed = view["changed"]

    def filled(most: int, shape: str = "full", most_changed: int = len(changed)) -> str:
        values = {"most": most, "shape": shape, "changed": changed[:most_changed], "changed_cells": len(changed)}
        text = templates.fill("report.md.j2", view | values | {"label_length": _SHORT_LABEL[shape]})
        return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"

    text = ""
    if len(changed) <= _MOST_CHANGED:
        lists = view["judged_rows"], facts.comparisons, view["memory"], facts.left_out, facts.disturbances
        text = _longest_that_fits(filled, max(map(len, lists)))
        text = text if len(text) <= LONGEST else filled(0, "short")
    if not text or len(text) > LONGEST:
        text = _longest_that_fits(lambda most_changed: filled(0, "shortest", most_changed), len(changed))
    # A user's template need not keep to what it is told, but a comment that is too long is not posted at all.
    return text if len(text) <= LONGEST else text[: LONGEST - 60].rpartition("\n")[0] + _CUT


def _longest_that_fits(filled: Callable[[int], str], most: int) -> str:
    """The text whose lists have up to `most` entries, as many as fit; the one without any where not even that fits.

    The first entries tell how many may fit: so thousands of them are not written out just to see that they are too many.
    """
    count = min(most, _FIRST_GUESS)
    text = filled(count)
    if count == most and len(text) <= LONGEST:
        return text
    least = best = filled(0)
    for _ in range(_MOST_GUESSES):
        fits = len(text) <= LONGEST
        best = text if fits and len(text) > len(best) else best
        # Lists end at different lengths, so that a straight line to the limit aims a little too far or not far enough.
        per_entry = max(len(text) - len(least), 1) / max(count, 1)
        following = min(most, int((LONGEST - len(least)) / per_entry * 0.97))
        if len(least) > LONGEST or following == count or (fits and len(text) > 0.95 * LONGEST):
            break
        count, text = following, filled(following)
    return text if len(best) < len(text) <= LONGEST else best


def view_of(facts: Facts) -> dict[str, Any]:
    """What the template is filled with."""
    headline, memory = headline_of(facts), list(_memory(facts))
    rows = rows_of(facts)
    return {
        "verdict": Ready(spoken(headline.verdict, markdown)),
        "notes": [Ready(spoken(note, markdown)) for note in headline.notes],
        "facts": facts,
        "document": facts.document,
        "changes": facts.changes,
        "signs": SIGNS,
        "legend_of": legend_of,
        "about": ABOUT,
        "judged_rows": rows,
        "changed": [row for row in rows if row.changed],
        "unclear": [row for row in rows if row.unclear],
        "moves": list(moves_of(facts)),
        "memory": memory,
        "kinds": list(dict.fromkeys(kind for _, _, ranks in memory for rank in ranks for kind in rank.peaks)),
        "gpus": sorted({gpu for _, _, ranks in memory for rank in ranks for gpu in rank.on_gpus}),
        "charts": list(_charts(facts))[:_MOST_CHARTS],
        "speed_stats": speed_stats.write(facts).splitlines(),
        "details": list(details_of(facts.document)),
    }


def _memory(facts: Facts) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Each engine's peaks per rank at each case, the reference's once."""
    seen: set[tuple[Case, str]] = set()
    for comparison in facts.comparisons:
        for side in (comparison.reference, comparison.subject):
            if side is not None and side.memory and (comparison.case, side.name) not in seen:
                seen.add((comparison.case, side.name))
                yield comparison.label, side.name, side.memory


def _charts(facts: Facts) -> Iterator[Ready]:
    """Mermaid charts of relative speed over batch sizes: one per engine and kind of case, from two sizes on."""
    if facts.reference is None:
        return
    earlier = facts.earlier_sides
    groups: dict[tuple[Case, str], list[Comparison]] = {}
    for comparison in facts.comparisons:
        if comparison.ratio and comparison.case.input_shape and comparison.subject.engine not in earlier:
            common = dataclasses.replace(comparison.case, input_shape=(0, *comparison.case.input_shape[1:]))
            groups.setdefault((common, comparison.subject.name), []).append(comparison)
    for (case, name), members in groups.items():
        members = sorted(members, key=lambda member: member.case.input_shape[0])
        if len(members) > 1:
            yield _chart(case, name, facts.reference, members)


def _chart(case: Case, name: str, reference: str, members: list[Comparison]) -> Ready:
    if len(members) > _MOST_IN_CHART:  # evenly thinned, with both ends
        last = len(members) - 1
        members = [members[round(index * last / (_MOST_IN_CHART - 1))] for index in range(_MOST_IN_CHART)]
    ratios = [member.ratio.geometric_mean for member in members if member.ratio]
    low, high = min([*ratios, 1.0]), max([*ratios, 1.0])
    room = max(high - low, 0.1) * 0.1
    label = case.label.replace("[0", "[N", 1)
    few = [str(member.case.input_shape[0]) for member in members if member.ratio and not member.ratio.telling_interval]
    return Ready(
        "\n".join(
            [
                "```mermaid",
                "xychart-beta",
                f'    title "{_plain(label)}: speed of {_plain(name)} relative to {_plain(reference)}"',
                f'    x-axis "batch size" [{", ".join(str(member.case.input_shape[0]) for member in members)}]',
                f'    y-axis "relative speed" {max(low - room, 0):.2f} --> {high + room:.2f}',
                f"    line [{', '.join(f'{ratio:.3f}' for ratio in ratios)}]",
                f"    line [{', '.join('1' for _ in ratios)}]",
                "```",
                *(["", f"Of too few pairs to tell: batch size {', '.join(few)}."] if few else []),
            ]
        )
    )


def _plain(text: str) -> str:
    """A name for a chart's title: what could end it, or mean something to the chart, becomes a dash."""
    return re.sub(r"[^\w ,.+()\[\]-]+", "-", one_line(text, 60))
