"""`flowbench history` on a store of runs: the table, the data, and what is said where there is nothing to show."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench import history
from flowbench.archive.folder import Archive
from flowbench.cell import Cell
from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run
from flowbench.record.run import Ending, Git, RunDocument, Side, SidesCompared
from flowbench.record.sample import Memory, RankSample, Sample

MIB = 2**20


def run(number: int, toy_ms: float, status: str = "ok") -> RunDocument:
    """A run of day `number`, in which the toy took `toy_ms` and its reference 10 ms, in two pairs."""
    plan = plan_run(
        Request(models=("linear",), engines=("toy",), reference="toy-score", threads=1, batch_sizes=(4,)), ("test",)
    )
    plan = replace(plan, protocol=replace(plan.protocol, pairs=2, steps=1, warmup=0))
    samples = []
    for pair in range(2):
        for position, cell in enumerate(plan.cells):
            time_ms = (toy_ms if cell.engine == "toy" else 10.0) * (1 + 0.002 * pair)
            memory = Memory(None, None, 50 * MIB, 10 * MIB)
            rank = RankSample(0, cell.threads, "cpu", (), (time_ms,), (1.0,), memory)
            failed = status == "failed" and cell.engine == "toy"
            ranks = () if failed else (rank,)
            samples.append(
                Sample(cell.key, pair, position, "2026-11-29T10:00:00Z", 1.0, "failed" if failed else "ok", "died" if failed else None,
                       None, ranks)
            )  # fmt: skip
    return replace(
        plan,
        run_id=f"run-{number:02}",
        created=f"2026-11-{number:02}T10:00:00+00:00",
        git=Git(f"{number:040x}", None, number == 2),
        samples=tuple(samples),
        ending=Ending("complete", None, None),
    )


@pytest.fixture
def store(toys: Path, tmp_path: Path) -> Path:
    archive = Archive(tmp_path / "store")
    for number in range(1, 13):
        archive.add(run(number, 10.0 if number < 8 else 11.0, "failed" if number == 3 else "ok"))
    return archive.folder


def test_the_table_has_a_line_per_run_and_one_where_the_level_shifts(store: Path) -> None:
    pytest.importorskip("ruptures")
    text, notes = history.show(store, "toy", None, "table")
    assert notes == []
    blocks = {block.splitlines()[0]: block.splitlines() for block in text.split("\n\n")}
    assert len(blocks) == 2
    (toy,) = (lines for label, lines in blocks.items() if label.endswith(" toy"))
    assert toy[1].endswith("12 points")
    assert "failed" in toy[5]
    assert toy[4].endswith("0000000000 (dirty)")
    (shift,) = (index for index, line in enumerate(toy) if "----" in line)
    assert toy[shift].strip() == "---- step time +10.0 % from here: 10.01 -> 11.01 ms"
    assert "2026-11-08 10:00" in toy[shift + 1]
    assert toy[shift + 1].split()[2:11] == "11.01 11.00 - 11.02 0.91 0.909 - 0.909 50".split()


def test_json_and_csv_have_every_point(store: Path) -> None:
    tree = json.loads(history.show(store, None, None, "json")[0])
    assert tree["schema"] == "flowbench.history"
    assert sorted(len(one["points"]) for one in tree["series"]) == [12, 12]
    rows = list(csv.DictReader(io.StringIO(history.show(store, "*toy", None, "csv")[0])))
    assert len(rows) == 12
    assert rows[2]["status"] == "failed"
    assert rows[2]["time_ms"] == ""
    assert {row["origin"] for row in rows} == {"measured"}
    assert [row["when"][:10] for row in rows if row["shift"]] == ["2026-11-08"]


def test_a_relative_speed_of_too_few_pairs_is_marked(toys: Path, tmp_path: Path) -> None:
    archive = Archive(tmp_path / "store")
    whole, uneven = run(1, 10.0), run(2, 10.0)
    archive.add(replace(whole, samples=tuple(sample for sample in whole.samples if sample.pair == 0)))
    slow = [replace(rank, steps_ms=(40.0,)) for sample in uneven.samples[-1:] for rank in sample.ranks]
    archive.add(replace(uneven, samples=(*uneven.samples[:-1], replace(uneven.samples[-1], ranks=tuple(slow)))))
    index = archive.folder / "index.json"
    for _ in range(2):
        lines = history.show(archive.folder, "*toy", None, "table")[0].splitlines()
        marks = ["one pair only", "too few pairs"]
        assert [mark in line for line, mark in zip(lines[-2:], marks, strict=True)] == [True, True]
        # An index from before the interval was known is made anew.
        index.write_text(re.sub(r'"relative_speed_(low|high)": [^,]*, ', "", index.read_text()))
        assert "relative_speed_low" not in index.read_text()
    rows = list(csv.DictReader(io.StringIO(history.show(archive.folder, "*toy", None, "csv")[0])))
    assert [bool(row["relative_speed_low"]) for row in rows] == [False, True]
    low, high = (float(rows[1][f"relative_speed_{end}"]) for end in ("low", "high"))
    assert low < float(rows[1]["relative_speed"]) < high
    (one,) = json.loads(history.show(archive.folder, "*toy", None, "json")[0])["series"]
    assert [point["relative_interval"] for point in one["points"]] == [None, [low, high]]


def test_a_series_is_of_one_machine(store: Path) -> None:
    document = run(20, 10.0)
    Archive(store).add(replace(document, machine=replace(document.machine, cpu_model="Another CPU")))
    kernel = run(21, 10.0)
    Archive(store).add(replace(kernel, machine=replace(kernel.machine, system="Linux 99")))
    sizes = [len(one.points) for one in history.read(store, cell="*toy")]
    assert sizes == [13, 1]  # a newer kernel is the same hardware
    (other,) = history.read(store, cell="*toy", machine="another")
    assert other.machine.startswith("Another CPU")


def test_what_is_not_there_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowbenchError, match=r"fits --cell 'resnet'; it has linear .* toy"):
        history.show(store, "resnet", None, "table")
    with pytest.raises(
        FlowbenchError, match="holds no run and nothing imported; put runs there with flowbench store add"
    ):
        history.show(tmp_path / "none", None, None, "table")
    (store / "runs" / "odd.json").write_text("{")
    assert "odd.json: left alone: " in history.show(store, "toy", None, "csv")[1][0]


def test_names_cannot_break_the_table(store: Path) -> None:
    document = run(25, 10.0)
    Archive(store).add(replace(document, git=Git("=1+1\n\x1b[2J", None, False)))
    text = history.show(store, "*toy", None, "table")[0]
    assert "\x1b" not in text
    assert len(text.splitlines()) == 3 + 13 + 1
    rows = list(csv.DictReader(io.StringIO(history.show(store, "*toy", None, "csv")[0])))
    assert "'=1+1\n\x1b[2J" in {row["commit"] for row in rows}  # no formula for a spreadsheet


def test_the_sides_of_a_comparison_are_points_of_two_commits(toys: Path, tmp_path: Path) -> None:
    document = two_sides(slow_ms=20.0)
    archive = Archive(tmp_path / "store")
    archive.add(document)
    archive.add(run(20, 10.0))
    (series,) = (one for one in history.read(archive.folder, cell="*toy") if "score" not in one.cell)
    assert [(point.commit, round(point.time_ms or 0)) for point in series.points] == [
        ("b" * 40, 10), ("c" * 40, 20), (f"{20:040x}", 10)
    ]  # fmt: skip


def two_sides(slow_ms: float) -> RunDocument:
    """The toy at two commits in one sitting, with a canary."""
    document = run(15, 10.0)
    names = {"base": 10.0, "head": slow_ms, "canary": 10.0}
    engine = next(engine for engine in document.engines if engine.name == "toy")
    case = document.cells[0].case
    cells = {name: Cell.of(case, f"toy@{name}") for name in names}
    samples = []
    for pair in range(2):
        for position, (name, time_ms) in enumerate(names.items()):
            memory = Memory(None, None, 50 * MIB, 10 * MIB)
            rank = RankSample(0, case.threads, "cpu", (), (time_ms,), (1.0,), memory)
            samples.append(
                Sample(cells[name].key, pair, position, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, (rank,))
            )
    sides = [Side(name, Git(digit * 40, None, False)) for name, digit in (("main", "b"), ("topic", "c"))]
    return replace(
        document,
        reference=None,
        engines=tuple(replace(engine, name=f"toy@{name}", side=name) for name in names),
        cells=tuple(cells.values()),
        samples=tuple(samples),
        comparison=SidesCompared(*sides, 0.01, 6, 0, {}, {}),
    )
