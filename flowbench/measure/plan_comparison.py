"""From two sides and what was asked for to the document of a comparison's sitting, before its first sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flowbench.cell import Case, Cell
from flowbench.errors import FlowbenchError
from flowbench.judge.times import LEAST_MARGIN, LEAST_PAIRS
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.refs import PACKAGE
from flowbench.measure.schedule import estimate_s
from flowbench.record.run import Engine, Protocol, RunDocument, Side, SidesCompared

ORDER = "in turns"
PAIRS = 20
LEAST_STEPS = 10
# A quarter more may pass to confirm, then come a last round, of 11 s at most on an H200, and eight processes that profile
# what is worse: ten minutes in all.
WALL_CAP_S = 400.0

# After another side's turn the caches hold its data: where steps are short that shows as some per cent, so that each turn
# begins with a step that does not count. On a GPU a turn has more steps, as the host runs ahead of the device within it.
SHORT_S = 0.2
SHORT_STEPS_PER_TURN = 8
GPU_STEPS_PER_TURN = 10

SIDES = ("base", "head")


def plan_comparison(
    request: Request,
    command: Sequence[str],
    base: Side,
    head: Side,
    noise_floors: Mapping[str, float],
    extra_sides: Sequence[str] = (),
    with_canary: bool = True,
    sitting_shifts: Mapping[str, float] | None = None,
) -> RunDocument:
    """The document of a sitting in which each of the repository's engines stands for base and for head.

    `noise_floors` and `sitting_shifts` are by `ENGINE/CASE`. `extra_sides` are measured beside, at every case; the canary is
    base once more, at the cheapest case. Raises FlowbenchError for engines that are of no side, and for fewer pairs than can
    show anything.
    """
    if request.pairs is not None and request.pairs < LEAST_PAIRS:
        raise FlowbenchError(
            f"{request.pairs} pairs were asked for, expected at least {LEAST_PAIRS}: with fewer the exact sign-flip test can"
            " show nothing"
        )
    run = plan_run(replace(request, pairs=request.pairs or PAIRS), command)
    subjects = [engine for engine in run.engines if engine.library == PACKAGE and engine.name != run.reference]
    asked_in_vain = [
        name for name in request.engines if name not in {engine.name for engine in subjects} | {run.reference}
    ]
    if not subjects or asked_in_vain:
        named = f"engine {', '.join(asked_in_vain)}" if asked_in_vain else f"the reference, {run.reference}, alone"
        raise FlowbenchError(
            f"{named} has no base and head: two refs of this repository differ in its engines that import {PACKAGE}; give one"
            " of them, such as --engine flow-eager"
        )
    cells = [cell for cell in run.cells if cell.engine in {engine.name for engine in subjects}]
    cheapest = min(cells, key=lambda cell: estimate_s(cell, 1))
    return replace(
        run,
        engines=tuple(_engines(run, subjects, (*SIDES, *extra_sides, *(["canary"] if with_canary else [])))),
        cells=tuple(_cells(run, subjects, cheapest if with_canary else None, extra_sides)),
        protocol=_protocol(run.protocol, request, cheapest, on_gpu=any(cell.device == "cuda" for cell in cells)),
        comparison=SidesCompared(
            base=base,
            head=head,
            least_margin=LEAST_MARGIN,
            least_pairs=LEAST_PAIRS,
            confirmation_pairs=LEAST_PAIRS,
            noise_floors=dict(noise_floors),
            stopped={},
            sitting_shifts=dict(sitting_shifts or {}),
        ),
    )


def _protocol(of_run: Protocol, request: Request, cheapest: Cell, *, on_gpu: bool) -> Protocol:
    """A run's protocol with the turns of a comparison: as short as its shortest steps allow."""
    short = on_gpu or estimate_s(cheapest, 1) - estimate_s(cheapest, 0) < SHORT_S
    return replace(
        of_run,
        order=ORDER,
        steps=request.steps or max(of_run.steps, LEAST_STEPS),
        pairs=of_run.pairs + LEAST_PAIRS,
        steps_per_turn=GPU_STEPS_PER_TURN if on_gpu else SHORT_STEPS_PER_TURN if short else 1,
        untimed_per_turn=1 if short else 0,
        wall_cap_s=request.wall_cap_s or (None if request.pairs else WALL_CAP_S),
    )


def _engines(run: RunDocument, subjects: Sequence[Engine], sides: Sequence[str]) -> Iterator[Engine]:
    for engine in subjects:
        for side in sides:
            yield replace(engine, name=f"{engine.name}@{side}", display_name=f"{engine.display_name}@{side}", side=side)
    yield from (engine for engine in run.engines if engine.name == run.reference)


def _cells(
    run: RunDocument, subjects: Sequence[Engine], canary: Cell | None, extra_sides: Sequence[str]
) -> Iterator[Cell]:
    """Case by case, base and head beside each other, the reference last."""
    for case in run.cases:
        own = {cell.engine for cell in run.cells_of(case)}
        for engine in subjects:
            if engine.name in own:
                yield from (_side_cell(case, engine, side) for side in (*SIDES, *extra_sides))
                if Cell.of(case, engine.name) == canary:
                    yield _side_cell(case, engine, "canary")
        if run.reference in own:
            yield Cell.of(case, str(run.reference))


def _side_cell(case: Case, engine: Engine, side: str) -> Cell:
    return Cell.of(case, f"{engine.name}@{side}")
