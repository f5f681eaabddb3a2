"""Who runs when: the order of fresh processes in a sitting, and how long it is likely to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowbench.cell import Cell
from flowbench.workload.models import describe_model

ORDER = "mirrored"

# Rough costs, for the estimate before anything is measured: a process until its first step, and arithmetic per core.
START_S = 4.0
FLOPS_PER_CORE = 50e9
STEP_S = 0.02
# On a GPU: CUDA's context and kernels come before the first step; a step is bound by its arithmetic or by its launches.
GPU_START_S = 8.0
FLOPS_PER_GPU = 40e12


@dataclass(frozen=True)
class Turn:
    """One fresh process group: `cell`, in round `pair`, at `position` of the round's order."""

    cell: Cell
    pair: int
    position: int


def plan_turns(cells: Sequence[Cell], pairs: int) -> list[Turn]:
    """The turns of a sitting: `pairs` rounds over all cases, every other round with its engines reversed.

    For two engines that is A B, B A, A B, …: over two rounds a drift of the machine falls on both alike. Cases take turns
    too, so that a sitting that is cut short has every cell with fewer pairs.
    """
    cases = {case: [cell for cell in cells if cell.case == case] for case in dict.fromkeys(cell.case for cell in cells)}
    turns = []
    for pair in range(pairs):
        for engines in cases.values():
            order = engines if pair % 2 == 0 else engines[::-1]
            turns += [Turn(cell, pair, position) for position, cell in enumerate(order)]
    return turns


def estimate_s(cell: Cell, steps: int) -> float:
    """About how long one process of `cell` takes for `steps` steps, warm-up included: for people, never for a verdict."""
    model = describe_model(cell.model, cell.input_shape[1:])
    passes = 3 if cell.backward else 1  # backward computes two products for each of forward's
    flops = 2 * model.multiply_adds * cell.input_shape[0] * passes
    if cell.device == "cuda":
        return GPU_START_S + steps * (STEP_S + flops / FLOPS_PER_GPU)
    weights = sum(math.prod(parameter.shape) for parameter in model.parameters)
    return START_S + steps * (STEP_S + flops / (FLOPS_PER_CORE * cell.threads) + weights * 2e-9)
