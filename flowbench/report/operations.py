"""The table of single operations: what each takes by two sides, and which of the two is quicker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from flowbench.judge.stats import paired_ratio
from flowbench.record.operations import Comparison
from flowbench.report.words import range_of_pairs


def table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """The lines of a table for each device and pair of sides: medians of the rounds' times, geometric means of their ratios."""
    groups: dict[tuple[str, int, str, str], list[Comparison]] = {}
    for each in comparisons:
        groups.setdefault((each.device, each.threads, each.subject, each.reference), []).append(each)
    for (device, threads, subject, reference), rows in groups.items():
        place = f"{device}, {threads} threads" if device == "cpu" else device
        yield (
            f"{subject} and {reference} in turn on {place}; ms a call;"
            f" ratio: {reference} / {subject}, above 1 {subject} is quicker"
        )
        yield from _aligned(
            [("operation", "of", "uses", subject, reference, "ratio", "lowest - highest"), *_rows(rows)]
        )


def _rows(rows: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    for operation in dict.fromkeys(each.operation for each in rows):
        own = [each for each in rows if each.operation == operation]
        for each in own:
            ratio = paired_ratio(each.reference_ms, each.subject_ms)
            yield (
                operation, each.label, str(each.uses or ""), _ms(median(each.subject_ms)), _ms(median(each.reference_ms)),
                f"{ratio.geometric_mean:.2f}", range_of_pairs(ratio),
            )  # fmt: skip
        if all(each.uses for each in own):
            ours, theirs = (
                sum(each.uses * median(times) for each, times in zip(own, sides, strict=True))
                for sides in ([each.subject_ms for each in own], [each.reference_ms for each in own])
            )
            yield (operation, "all uses", "", _ms(ours), _ms(theirs), f"{theirs / ours:.2f}", "")


def _ms(milliseconds: float) -> str:
    """Three digits at least, four decimals at most."""
    return (
        f"{milliseconds:.4f}"
        if milliseconds < 1
        else f"{milliseconds:.3f}"
        if milliseconds < 100
        else f"{milliseconds:.1f}"
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        words = [
            word.ljust(width) if column < 2 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(words).rstrip()
