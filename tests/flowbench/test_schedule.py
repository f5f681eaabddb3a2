"""Who runs when: every engine once a round, each round the mirror of the one before."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowbench.cell import Case, Cell
from flowbench.measure import schedule
from flowbench.measure.progress import duration
from flowbench.measure.schedule import estimate_s, plan_turns
from flowbench.presets import PRESETS


@given(engines=st.integers(1, 4), sizes=st.integers(1, 3), pairs=st.integers(1, 7))
def test_rounds_are_mirrored_and_whole(engines: int, sizes: int, pairs: int) -> None:
    cells = [
        Cell.of(Case("linear", (size, 3, 8, 8), "float32", "eager", 1, False, True, True, 2), f"engine{engine}")
        for size in range(1, sizes + 1)
        for engine in range(engines)
    ]
    turns = plan_turns(cells, pairs)
    assert len(turns) == len({(turn.cell.key, turn.pair) for turn in turns}) == len(cells) * pairs
    rounds = [turns[start : start + engines] for start in range(0, len(turns), engines)]
    for number, turns_of_round in enumerate(rounds):
        assert len({turn.cell.case for turn in turns_of_round}) == 1
        assert {turn.pair for turn in turns_of_round} == {number // sizes}
        assert [turn.position for turn in turns_of_round] == list(range(engines))
        names = [turn.cell.engine for turn in turns_of_round]
        assert names == [f"engine{index}" for index in range(engines)][:: 1 if number // sizes % 2 == 0 else -1]


def test_each_preset_estimates_what_it_promises() -> None:
    def minutes(name: str) -> float:
        preset = PRESETS[name]
        return (
            sum(preset.pairs * estimate_s(cell, preset.steps + preset.warmup) for cell in preset.cells(threads=2)) / 60
        )

    assert minutes("smoke") < 1.5
    assert minutes("cpu") < 8
    assert minutes("cpu") < minutes("seed") < minutes("full")


@pytest.mark.parametrize("backward", [True, False])
def test_an_estimate_is_a_start_and_equal_steps_of_so_much_arithmetic(backward: bool) -> None:
    """ResNet-50 at 224x224 has 4.09e9 multiplications with additions an image, and 25.6e6 weights."""
    case = Case("resnet50", (16, 3, 224, 224), "float32", "eager", 1, False, True, backward, 2)
    flops = 2 * 4.09e9 * 16 * (3 if backward else 1)
    on_cpu = flops / (schedule.FLOPS_PER_CORE * 2) + 25.6e6 * 2e-9
    on_gpu = flops / schedule.FLOPS_PER_GPU
    for device, start_s, arithmetic_s in (("cpu", schedule.START_S, on_cpu), ("cuda", schedule.GPU_START_S, on_gpu)):
        cell = Cell.of(dataclasses.replace(case, device=device), "flow-eager")
        assert estimate_s(cell, 0) == start_s
        assert estimate_s(cell, 10) == pytest.approx(start_s + 10 * (schedule.STEP_S + arithmetic_s), rel=0.01)


def test_durations_read_well() -> None:
    assert [duration(s) for s in (0.2, 59.4, 59.6, 250, 7500)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "4 min 10 s",
        "2 h 05 min",
    ]
