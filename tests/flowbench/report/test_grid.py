"""The classic table: what stands in it, and that data cannot break it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowbench.record.run import RunDocument
from flowbench.report import grid
from flowbench.report.facts import facts_of


def rows(document: RunDocument) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in grid.write(facts_of(document)).splitlines()
        if line.startswith("|") and not line.startswith("| -")
    ]


def test_batch_sizes_go_across_and_each_cell_has_both_times_and_the_range_of_the_pairs(
    documents: dict[str, RunDocument],
) -> None:
    assert rows(documents["two_cells"]) == [
        ["N", "4", "1"],
        ["Flow, resnet50, 3x224x224, one process", "507.5 / 707.0 → 1.39-1.40", "126.9 / 176.8 → 1.39-1.40"],
        ["PyTorch-NHWC, resnet50, 3x224x224, one process", "558.3 / 707.0 → 1.26-1.27", "139.6 / 176.8 → 1.26-1.27"],
    ]


def test_a_ratio_of_too_few_pairs_is_marked(documents: dict[str, RunDocument]) -> None:
    document = documents["two_cells"]
    first = tuple(sample for sample in document.samples if sample.pair == 0)
    assert all(
        cell.endswith(" (one pair only)") for row in rows(replace(document, samples=first))[1:] for cell in row[1:]
    )
    flow = next(sample for sample in document.samples if sample.pair == 1 and "flow" in sample.cell)
    slower = tuple(replace(rank, steps_ms=tuple(9 * time_ms for time_ms in rank.steps_ms)) for rank in flow.ranks)
    uneven = replace(
        document, samples=tuple(replace(one, ranks=slower) if one is flow else one for one in document.samples)
    )
    assert [cell.endswith(" (too few pairs)") for row in rows(uneven)[1:] for cell in row[1:]].count(True) == 1


def test_ranks_and_modes_are_rows_of_their_own(documents: dict[str, RunDocument]) -> None:
    assert [row[0] for row in rows(documents["two_ranks"])[1:]] == [
        "Flow, resnet50, 3x224x224, 2 GPUs, DDP",
        "Flow, resnet50, 3x224x224, one GPU, bfloat16, graph",
    ]


def test_what_has_no_figures_says_why(documents: dict[str, RunDocument]) -> None:
    assert rows(documents["failed"])[1][1] == "none: Flow failed"
    assert grid.write(facts_of(documents["no_reference"])).startswith("No table: nothing is compared")


@pytest.mark.parametrize("situation", ["hostile_names", "same_names", "nothing_measured", "interrupted"])
def test_every_line_has_as_many_cells(documents: dict[str, RunDocument], situation: str) -> None:
    lines = [line for line in grid.write(facts_of(documents[situation])).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1
