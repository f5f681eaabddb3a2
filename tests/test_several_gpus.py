"""The script for several GPUs: a real run on the CPU, and the figures of a machine with GPUs from a document built by hand."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flowbench.cell import Case, Cell
from flowbench.errors import FlowbenchError
from flowbench.measure.processes import child_environment
from flowbench.measure.session import UNREACHED
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.gpu import FOREIGN_MEMORY, Gpu, GpuUse
from flowbench.record.machine import read_machine
from flowbench.record.run import Ending, Engine, Finding, NotMeasured, Protocol, RunDocument
from flowbench.record.sample import Memory, RankSample, Sample
from suites import several_gpus, several_gpus_child, several_gpus_figures, several_gpus_parts
from suites.several_gpus_figures import BEST, FLOW, PYTORCH, Figure
from suites.several_gpus_setting import CPU, GPU, TIME_IS_UP, Deadline

CASE = Case("resnet50", (64, 3, 224, 224), "float32", "eager", 2, True, True, True, 16, "cuda")
STEP_MS = {FLOW: 10.0, PYTORCH: 22.0, BEST: 11.5}
ALLOCATED = {FLOW: 840, PYTORCH: 1000, BEST: 900}
TINY = replace(
    CPU,
    model="linear",
    image_shape=(3, 8, 8),
    batch_sizes=((2,),),
    world_sizes=(2,),
    all_reduce_bytes=(4000,),
    steps=2,
)


def sample(cell: Cell, pair: int, losses: Callable[[int], float] = float) -> Sample:
    ranks = []
    for rank in range(cell.world_size):
        uses = (GpuUse(rank, 2 * ALLOCATED[cell.engine]),)
        memory = Memory(ALLOCATED[cell.engine] + rank, 2000, 500, 100, uses, "by its process id")
        # Each step takes the slower rank's time; with two ranks 2 % more than with one.
        time_ms = STEP_MS[cell.engine] * (1 + 0.02 * rank)
        ranks.append(RankSample(rank, 16, f"cuda:{rank}", (), (time_ms,), (losses(rank),), memory))
    return Sample(cell.key, pair, 0, "2026-11-29T10:00:00Z", 9.5, "ok", None, None, tuple(ranks))


def document(**changes: object) -> RunDocument:
    """Two pairs of three engines on one rank and on two; four ranks were not to be had."""
    cells = [Cell.of(replace(CASE, world_size=size), engine) for size in (2, 1) for engine in STEP_MS]
    absent = [Cell.of(replace(CASE, world_size=4), engine) for engine in STEP_MS]
    fields = {
        "run_id": "20261129-100000-abcdef",
        "created": "2026-11-29T10:00:00Z",
        "flowbench_version": "0.1.0",
        "command": (),
        "preset": None,
        "reference": PYTORCH,
        "engines": tuple(Engine(name, name, name, None) for name in STEP_MS),
        "protocol": Protocol(1, 0, 2, 16, "mirrored", 0, 1e-4, 0.9, 2e-5, None, None),
        "git": None,
        "machine": replace(read_machine(), gpus=(Gpu("NVIDIA H200", 2**37),) * 2),
        "versions": {},
        "cells": tuple(cells),
        "samples": tuple(sample(cell, pair) for pair in range(2) for cell in cells),
        "findings": (),
        "not_measured": tuple(NotMeasured(cell.label, "4 ranks need a GPU each, here are 2") for cell in absent),
        "ending": Ending("complete", None, None),
    }
    return RunDocument(**fields | changes)


def said(lines: list[Figure]) -> list[tuple[str, str]]:
    return [(line.value, line.verdict) for line in lines]


def own(whole: RunDocument, world_size: int = 2) -> Cell:
    return several_gpus_figures.cell_of(whole, FLOW, 64, world_size)


def without(whole: RunDocument, engine: str, status: str, error: str) -> RunDocument:
    """The document with the two ranks of an engine spoiled."""
    key = Cell.of(CASE, engine).key
    bad = [replace(one, status=status, error=error) if one.cell == key else one for one in whole.samples]
    return replace(whole, samples=tuple(bad))


def test_speed_is_judged_against_both_and_a_missing_cell_has_its_reason() -> None:
    whole = document()
    assert said(list(several_gpus_figures.speeds(whole, own(whole), (PYTORCH, BEST)))) == [
        ("2.20 (2.20 - 2.20 in 2 pairs; 10.2 / 22.4 ms)", "met"),
        ("1.15 (1.15 - 1.15 in 2 pairs; 10.2 / 11.7 ms)", "missed"),
    ]
    assert said(list(several_gpus_figures.speeds(whole, own(whole, 4), (PYTORCH,)))) == [
        ("flow-eager: 4 ranks need a GPU each, here are 2", "not measured")
    ]
    failed = without(whole, BEST, "failed", "rank 1: died of SIGSEGV")
    assert said(list(several_gpus_figures.speeds(failed, own(whole), (PYTORCH, BEST))))[1] == (
        "torch-channels-last-static: failed: rank 1: died of SIGSEGV",
        "not measured",
    )


def test_memory_is_that_of_the_largest_rank_and_a_kind_nobody_tells_is_not_measured() -> None:
    whole = document()
    lines = list(several_gpus_figures.memory(whole, own(whole), ("peak allocated", "GPU used")))
    assert [line.verdict for line in lines] == ["met", "met"]
    assert lines[0].value.startswith("0.840 (")
    bare = [
        replace(one, ranks=tuple(replace(r, memory=replace(r.memory, gpu_uses=(), gpu_uses_how="no NVML")) for r in one.ranks))
        for one in whole.samples
    ]  # fmt: skip
    blind = replace(whole, samples=tuple(bare))
    assert said(list(several_gpus_figures.memory(blind, own(whole), ("GPU used",)))) == [("no NVML", "not measured")]
    assert several_gpus_figures.foreign_memory(blind, [64]).value == "no NVML"


def test_scaling_is_one_ranks_time_over_that_of_several() -> None:
    assert said(list(several_gpus_figures.scaling(document(), 64, (4, 2, 1)))) == [
        ("4 ranks need a GPU each, here are 2", "not measured"),
        ("0.980 (10.0 / 10.2 ms)", "met"),
    ]


def test_memory_on_anothers_gpu_is_missed_only_where_it_is_flows() -> None:
    assert several_gpus_figures.foreign_memory(document(), [64]).met is True
    for engine, met in ((FLOW, False), (PYTORCH, True)):
        finding = Finding(
            FOREIGN_MEMORY, "rank 1 holds 312 MiB on GPU 0, its own is GPU 1", Cell.of(CASE, engine).key, 0
        )
        line = several_gpus_figures.foreign_memory(document(findings=(finding,)), [64])
        assert (line.met, line.value) == (met, f"{engine}: {finding.message}")


def test_ranks_that_differ_miss_the_bar_and_ranks_with_the_same_data_show_nothing() -> None:
    whole = document()
    assert several_gpus_figures.agreement(whole, "ranks", own(whole)).met is True
    differs = without(whole, FLOW, "void", "the ranks disagree: fc.weight of rank 1 is not that of rank 0")
    line = several_gpus_figures.agreement(differs, "ranks", own(whole))
    assert (line.met, "fc.weight" in line.value) == (False, True)
    alike = replace(whole, samples=(sample(own(whole), 0, lambda rank: 7.0),))
    assert several_gpus_figures.agreement(alike, "ranks", own(whole)).met is None


@pytest.mark.parametrize(("flow", "met"), [(96e9, True), (94e9, False)])
def test_bandwidth_may_be_five_percent_less(flow: float, met: bool) -> None:
    assert several_gpus_figures.bandwidth("all-reduce", flow, 100e9).met is met
    assert several_gpus_parts.all_reduce.bus_bandwidth(400, 2e-3, 4) == 300e6


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_what_matters_most_fits_into_eight_minutes(gpus: int) -> None:
    parts = several_gpus.plan(replace(GPU, ranks=gpus), 480 - several_gpus.RESERVE_S)
    assert [part.title.partition(",")[0] for part in parts[:2]] == [
        f"all-reduce among {gpus} ranks",
        f"{gpus} ranks train",
    ]
    assert "N = 64 per rank" in parts[2].title
    assert sum(part.about_s for part in parts[:5]) < 480
    # On two GPUs all of it does.
    assert (sum(part.about_s for part in parts) < 480) is (gpus == 2)


def test_a_run_on_the_cpu_measures_everything_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(several_gpus, "CPU", TINY)
    status = several_gpus.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "10"])
    out, err = capfd.readouterr()
    plan, _, rest = out.partition("\n\n")
    assert plan.startswith("up to 2 ranks on cpu, linear, in 10 min 00 s at most:")
    lines = [line for line in rest.splitlines() if " (bar: " in line]
    assert [line.rpartition(": ")[2] for line in lines if "speed" not in line and "bandwidth" not in line] == [
        "met", "met", "met", "not measured", "met",
    ], out + err  # fmt: skip
    # Values, the killed rank, memory, scaling from a single rank that was not asked for, agreement.
    assert sum("speed" in line or "bandwidth" in line for line in lines) == 2
    assert status in (1, 2)
    table = (tmp_path / "several-gpus.md").read_text()
    assert all(f"| {line.partition(': ')[0]} | " in table for line in lines)
    documents = sorted(tmp_path.glob("*/*.json"))
    assert [path.parent.name for path in documents] == ["agreement", "n-2"]
    assert len({rank.losses for rank in read_document(documents[0]).samples[0].ranks}) == 2

    # Without any time left, the figures of whole documents are there all the same.
    several_gpus.main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0.01"])
    again = [line for line in capfd.readouterr().out.splitlines() if " (bar: " in line]
    assert sum(line.endswith("there was no time left for it (bar: -): not measured") for line in again) == 2
    assert again[2:] == lines[3:]


def test_world_sizes_beyond_the_gpus_are_a_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = document(ending=Ending("wall_cap", None, "the cap was reached"), samples=())
    monkeypatch.setattr(several_gpus, "read_machine", lambda: whole.machine)
    monkeypatch.setattr(several_gpus_parts, "sit", lambda *_: whole)
    for name in ("all_reduced", "killed", "agreed"):
        monkeypatch.setattr(several_gpus_parts, name, lambda *_: [Figure("another", "1", ">= 1", True)])
    assert several_gpus.main(["--out", str(tmp_path)]) == 2
    rows = [row for row in (tmp_path / "several-gpus.md").read_text().splitlines() if row.endswith("not measured |")]
    assert [row for row in rows if "8 ranks" in row or "4 ranks" in row] == [
        f"| {size} ranks | each needs a GPU of its own, and there are fewer here | - | not measured |"
        for size in (8, 4)
    ]
    # Two speeds and two kinds of memory for each N and world size, the scaling, and memory on another's GPU thrice.
    assert len(rows) == 2 + 6 * 2 * 4 + 1 + 3


def test_without_a_gpu_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(several_gpus, "read_machine", lambda: replace(read_machine(), gpus=()))
    with pytest.raises(SystemExit) as ended:
        several_gpus.main([])
    assert ended.value.code == 2
    assert "here is no GPU that answers: take fewer --world-sizes, or --device cpu" in capsys.readouterr().err


def test_a_part_that_fails_is_a_line_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> list[dict[str, object]]:
        raise OSError("no space left")

    monkeypatch.setattr(several_gpus, "CPU", TINY)
    monkeypatch.setattr(several_gpus_parts.all_reduce, "measure", fail)
    later = [Figure("later", "1.3", ">= 1.2", True)]
    for name in ("killed", "trained", "agreed"):
        monkeypatch.setattr(several_gpus_parts, name, lambda *_: later)
    assert several_gpus.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    table = (tmp_path / "several-gpus.md").read_text()
    assert "| all-reduce among 2 ranks | no space left | - | not measured |" in table
    assert table.count("| later | 1.3 | >= 1.2 | met |") == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--minutes", "nan"], "--minutes nan: expected a number above 0"),
        (["--minutes", "inf"], "--minutes inf: expected a number above 0"),
        (["--pairs", "-1"], "--pairs and --world-sizes are numbers above 0"),
        (["--world-sizes", "100000"], "world sizes 4096 at most"),
        (["--out", __file__], "File exists; expected a folder that can be written"),
        (["--out", "/proc/x"], "No such file or directory; expected a folder that can be written"),
        (["--out", "/proc"], "No such file or directory; expected a folder that can be written"),
        (["--model", "nope"], "unknown model 'nope': known are linear"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(several_gpus, "measured", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit) as ended:
        several_gpus.main(["--device", "cpu", "--out", str(tmp_path), *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_output_that_cannot_be_written_is_no_missed_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise FlowbenchError("cannot write it:\nno space left")

    monkeypatch.setattr(several_gpus, "measured", lambda *_: [Figure("one", "1", ">= 2", False)])
    monkeypatch.setattr(several_gpus, "write_whole", full)
    assert several_gpus.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "several_gpus: cannot write it: no space left\n"


def test_what_its_own_time_ended_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    assert several_gpus_child.run_child(sleeping, Deadline(time.monotonic())) is None

    def run(*_: object, **__: object) -> None:
        cell = several_gpus_figures.cell_of(document(), FLOW, 64, 2)
        unreached = NotMeasured(cell.label, f"{UNREACHED}: stopped by the user or the system")
        cut = document(samples=(), not_measured=(unreached,), ending=Ending("interrupted", None, "stopped by the user"))
        store.create(tmp_path / "n-64", cut)

    monkeypatch.setattr(several_gpus_child, "run_child", run)
    setting, until = (
        replace(GPU, world_sizes=(2,), ranks=2, out=tmp_path, device="cpu"),
        Deadline(time.monotonic() + 600),
    )
    lines = several_gpus_parts.trained(setting, (64,), 1, until)
    assert lines
    assert all(TIME_IS_UP in line.value for line in lines if line.met is None), lines
    assert "stopped by" not in str(lines)
    monkeypatch.setattr(several_gpus_parts, "run_child", lambda *_: None)
    (killed,) = several_gpus_parts.killed(setting, "killed", until.or_after(100))
    assert (killed.value, killed.met) == ("it had not ended after 100 s", None)
    (killed,) = several_gpus_parts.killed(setting, "killed", until.or_after(1000))
    assert killed.value == TIME_IS_UP


def test_the_parts_that_are_no_sittings_cannot_take_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    for name in ("all_reduced", "killed", "agreed"):
        monkeypatch.setattr(several_gpus_parts, name, lambda *arguments: given.append(arguments[2]) or [])
    monkeypatch.setattr(several_gpus_parts, "trained", lambda *_: [])
    until = Deadline(time.monotonic() + 465)
    for part in several_gpus_parts.plan(replace(GPU, ranks=2), 465):
        part.run(until)
    assert [deadline.words for deadline in given] == ["it had not ended after 120 s"] * 3
    assert all(deadline.left_s <= 120 for deadline in given)


def test_ranks_that_fail_and_what_nobody_thought_of_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(several_gpus_parts, "run_child", lambda *_: 1)
    until = Deadline(time.monotonic() + 600)
    parts = several_gpus_parts.plan(replace(GPU, ranks=2, out=tmp_path), 465)
    (line,) = several_gpus_parts.measured(parts[0], until)
    assert (line.value, line.met) == ("the ranks ended with status 1, see above", None)
    monkeypatch.setattr(several_gpus_parts, "sit", lambda *_: document(cells=(), samples=()))
    (line,) = several_gpus_parts.measured(parts[2], until)
    assert (line.value, line.met) == ("IndexError: tuple index out of range", None)
    assert "Traceback" in capfd.readouterr().err


def test_a_document_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    store.create(tmp_path / "n-64", document())
    for changes in ({"device": "cpu"}, {"model": "resnet18"}, {"world_sizes": (8,), "ranks": 8}):
        setting = replace(GPU, **{"world_sizes": (2, 1), "ranks": 2, "out": tmp_path} | changes)
        with pytest.raises(FlowbenchError, match="is of another --device, --model or --world-sizes"):
            several_gpus_child.sit(setting, "n-64", setting.world_sizes, [], Deadline(time.monotonic() + 600), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="children that die with their parent are Linux's")
def test_a_killed_script_leaves_no_child_and_a_table_that_says_what_is_missing(tmp_path: Path) -> None:
    code = f"""
import sys, os
from pathlib import Path
from suites import several_gpus, several_gpus_parts
from suites.several_gpus_child import run_child
def hangs(setting, title, until):
    run_child([sys.executable, "-S", "-c", "import os, time; open({str(tmp_path / "child")!r}, 'w').write(str(os.getpid())); time.sleep(600)"], until)
several_gpus_parts.all_reduced = hangs
several_gpus.main(["--device", "cpu", "--out", {str(tmp_path)!r}])
"""
    script = subprocess.Popen([sys.executable, "-c", code], env=child_environment(), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert script.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    script.kill()
    script.wait()
    child = int((tmp_path / "child").read_text())
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)
    rows = (tmp_path / "several-gpus.md").read_text()
    assert "| all-reduce among 2 ranks | not reached yet | - | not measured |" in rows
    assert rows.count("not reached yet") == 5
