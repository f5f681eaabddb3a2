"""What a sitting shows while it runs: who took how long in which pair, and a time left that goes down, within the terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from flowbench.cell import Cell
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.schedule import Turn
from flowbench.record.run import RunDocument, Side
from flowbench.record.sample import Memory, RankSample, Sample

pytestmark = pytest.mark.usefixtures("toys")

REQUEST = Request(
    engines=("toy-sided",), reference="toy", models=("linear",), image_shape=(3, 4, 4), batch_sizes=(2,), steps=3, warmup=1,
    pairs=6, threads=1,
)  # fmt: skip
CASE = "linear [2, 3, 4, 4]"


class Shown:
    """A display of `document` on a console of its own, whose clock stands until it is set."""

    def __init__(self, document: RunDocument, *, terminal: bool = False, columns: int = 80, **options: object) -> None:
        self.document, self.now = document, 1000.0
        self.file = io.StringIO()
        console = Console(file=self.file, force_terminal=terminal, width=columns, highlight=False, color_system=None)
        self.display = ProgressDisplay(document, console=console, clock=lambda: self.now, **options)

    def round(self, pair: int, number: int = 1, turns: int = 6, left_s: float = 17.0) -> None:
        cells = self.document.cells
        self.display.turn(Turn(cells[0], pair, 0), number, turns, left_s)
        for index, cell in enumerate(cells):
            memory = Memory(None, None, None, 2**20)
            rank = RankSample(0, 1, "cpu", (), (20.0 + index,) * 3, (1.0,) * 3, memory)
            self.display.sample(Sample(cell.key, pair, index, "now", 1.0, "ok", None, None, (rank,)))

    def live_line(self) -> str:
        console = Console(file=io.StringIO(), width=self.display._console.width, color_system=None)
        console.print(self.display._bar.get_renderable())
        return console.file.getvalue().rstrip("\n")


@pytest.fixture
def comparison() -> RunDocument:
    return plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {})


def test_without_a_terminal_each_figure_of_a_comparison_names_its_engine(comparison: RunDocument) -> None:
    shown = Shown(comparison)
    shown.round(0)
    assert shown.file.getvalue().splitlines() == [
        f"[1/6] {CASE}, pair 1 of 6 (and up to 6 to confirm), up to 17 s left",
        "    toy-sided@base: 20.0 ms per step (median of 3)",
        "    toy-sided@head: 21.0 ms per step (median of 3)",
        "    toy-sided@canary: 22.0 ms per step (median of 3)",
        "    toy: 23.0 ms per step (median of 3)",
    ]
    shown.round(7, number=8, turns=12)
    assert f"[8/12] {CASE}, pair 2 of 6 to confirm, up to 17 s left\n" in shown.file.getvalue()


def test_on_a_terminal_each_figure_of_a_comparison_names_its_engine(comparison: RunDocument) -> None:
    shown = Shown(comparison, terminal=True, columns=120)
    shown.round(2)
    for engine, time in (("toy-sided@base", 20), ("toy-sided@head", 21), ("toy", 23)):
        assert (
            f"[1/6] {CASE} {engine}, pair 3 of 6 (and up to 6 to confirm): {time}.0 ms per step"
            in shown.file.getvalue()
        )


def test_the_time_left_goes_down_during_a_turn(comparison: RunDocument) -> None:
    shown = Shown(comparison, terminal=True)
    shown.round(0)
    for passed_s, said in ((0, "up to 17 s left"), (5, "up to 12 s left"), (17, "longer than thought")):
        shown.now = 1000.0 + passed_s
        assert shown.live_line().rstrip().endswith(said)


@pytest.mark.parametrize("left_s", [17.0, 3599.0])
def test_eighty_columns_have_the_pair_and_the_time_left(comparison: RunDocument, left_s: float) -> None:
    case = dataclasses.replace(comparison.cells[0].case, model="resnet50", input_shape=(16, 3, 224, 224))
    cell = Cell.of(case, comparison.cells[0].engine)
    run = plan_run(dataclasses.replace(REQUEST, engines=("toy",)), ())
    for document, options in ((comparison, {}), (comparison, {"prefix": "sitting 12 of 60: "}), (run, {})):
        shown = Shown(document, terminal=True, **options)
        shown.display.turn(Turn(cell, 5, 0), 12, 12, left_s)
        line = shown.live_line()
        assert len(line) <= 80
        assert "\n" not in line
        assert line.startswith(options.get("prefix", "[12/12] ") + "resnet50")
        assert ", pair 6 of 6 " in line
        assert line.rstrip().endswith("17 s left" if left_s < 60 else "59 min 59 s left")


def test_where_many_sittings_run_without_a_terminal_a_line_comes_now_and_then(comparison: RunDocument) -> None:
    shown = Shown(comparison, prefix="sitting 2 of 3: ", every_s=20)
    for passed_s, pair in ((0, 0), (9, 1), (19, 2), (20, 3)):
        shown.now = 1000.0 + passed_s
        shown.round(pair, number=pair + 1)
    heads = [
        line.split(",")[-2]
        for line in shown.file.getvalue().splitlines()
        if line.startswith("sitting 2 of 3: linear [")
    ]
    assert heads == [" pair 1 of 6 (and up to 6 to confirm)", " pair 4 of 6 (and up to 6 to confirm)"]
    assert len(shown.file.getvalue().splitlines()) == 2 * (1 + len(comparison.cells))


def test_a_round_is_done_with_its_last_step_those_that_do_not_count_too(comparison: RunDocument) -> None:
    for untimed, per_turn, last in ((1, 2, 5), (1, 1, 6), (0, 1, 3), (0, None, 3)):
        protocol = dataclasses.replace(comparison.protocol, untimed_per_turn=untimed, steps_per_turn=per_turn)
        shown = Shown(dataclasses.replace(comparison, protocol=protocol), terminal=True)
        shown.round(1, number=2)
        shown.display.step(last)
        assert shown.display._bar.tasks[0].completed == 2, (untimed, per_turn)
