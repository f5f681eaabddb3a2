"""The profiled pass: what Flow and PyTorch tell of a step, what is kept of it, and how it is explained."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowbench import cli
from flowbench.cell import Case, Cell
from flowbench.commands import explaining
from flowbench.engine import Batch, HeldTensor, OpCall, StepProfile, Task
from flowbench.engine_registry import load_engine
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.explanation import OUTSIDE, Moved, explain, foremost, worse_cells
from flowbench.judge.verdict import Verdict
from flowbench.measure.bounding import bounded
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.processes import marked, measuring_environment
from flowbench.measure.profiling import profile_cell
from flowbench.measure.wire import job_of
from flowbench.record import store
from flowbench.record.document import document_text, read_document
from flowbench.record.profile import MOST_OPS, MOST_POINTS, MOST_TENSORS, Profile
from flowbench.record.run import Ending, Finding, Git, RunDocument, Side, SidesCompared
from flowbench.record.sample import Memory, RankSample, Sample
from flowbench.report import profiles
from flowbench.workload.data import make_weights
from flowbench.workload.models import describe_model

CASE = Case("resnet18", (1, 3, 64, 64), "float32", "eager", 1, False, True, True, 1)
DONE = Ending("complete", "2026-11-29T13:01:00+00:00", None)


def step_profile(engine: str) -> StepProfile:
    """One profiled step in this process."""
    images = np.random.default_rng(0).standard_normal(CASE.input_shape, np.float32)
    task = Task(
        Cell.of(CASE, engine), make_weights(describe_model(CASE.model, CASE.input_shape[1:]), 0),
        [Batch(images, np.zeros(1, np.int64))], 1e-4, 0.9, 0, 1,
    )  # fmt: skip
    training = load_engine(engine).build(task)
    training.step(0)
    seen = training.profile(1)
    assert seen is not None
    return seen


def test_flow_tells_ops_modules_and_the_tensors_at_the_peak() -> None:
    import framework as flow

    seen = step_profile("flow-eager")
    assert seen.missing == ()
    calls = {(call.op, call.module): call for call in seen.calls}
    assert calls["conv2d", "layer1.0.conv1"].shape == "float32[1, 64, 16, 16]"
    assert ("conv2d_backward_weight", "layer1.0.conv1") in calls
    assert calls["sgd_step", ""].shape == "62 tensors"  # all parameters at once
    assert seen.step_ms >= sum(call.time_ms for call in seen.calls) * 0.999
    held = sum(one.nbytes for one in seen.held)
    assert seen.peak_bytes == held == max(nbytes for _, nbytes in seen.timeline)
    assert seen.peak_bytes > flow.cpu.memory_allocated() - 2**20
    assert [at for at, _ in seen.timeline] == sorted(at for at, _ in seen.timeline)
    shapes = {(one.op, one.shape) for one in seen.held}
    (momentum,) = [one for one in seen.held if one.op == "SGD.step"]
    assert re.fullmatch(r"float32\[\d+\] in parts", momentum.shape)
    parameters = sum(parameter.numel() for parameter in flow.models.resnet18().parameters())
    assert 4 * parameters <= momentum.nbytes < 4 * parameters * 1.01
    assert ("conv2d backward", "float32[512, 512, 3, 3]") in shapes  # a gradient


def test_flow_finds_working_memory_that_a_kernel_held() -> None:
    import framework as flow
    from flowbench.engines.flow_profile import profile_step
    from framework.dtype import float32
    from framework.vm import Instruction, machine, runtime, scratch

    device = flow.device("cpu")
    out = runtime(device).empty((4, 4), float32)

    def greedy(out: object) -> None:
        scratch(device, 50_000_000)

    greedy.outputs = 1  # as the decorator of kernels says how many of the operands are written
    seen = profile_step(lambda: machine.issue(Instruction(greedy, (out,), {})), "cpu", lambda: None)
    (working,) = (one for one in seen.held if one.shape == "working memory")
    assert working.op == "greedy"
    assert working.nbytes >= 50_000_000
    assert seen.peak_bytes == sum(one.nbytes for one in seen.held)
    assert seen.peak_bytes == max(nbytes for _, nbytes in seen.timeline)


def test_torch_tells_ops_and_says_what_it_cannot() -> None:
    pytest.importorskip("torch")
    seen = step_profile("torch-eager")
    assert {"aten::convolution_backward"} <= {call.op for call in seen.calls}
    assert (seen.peak_bytes, seen.held, seen.timeline) == (None, (), ())
    assert [text.split(":")[0] for text in seen.missing] == [
        "modules", "tensors at the peak, memory timeline", "peak"
    ]  # fmt: skip


def test_what_is_kept_is_bounded_and_keeps_the_peak() -> None:
    calls = [OpCall("op", f"[{number % 30}]", "", 1.0 + number % 30) for number in range(300)]
    held = [HeldTensor("op", f"[{number % 40}]", "m" * 500, 10 * (number % 40)) for number in range(80)]
    timeline = [(float(at), 7 if at != 4321 else 10**9) for at in range(10_000)]
    kept = bounded("cell", StepProfile(9999.0, calls, 10**9, 4321.0, held, timeline, ("x" * 300,)))
    assert (len(kept.ops), len(kept.tensors), len(kept.timeline)) == (MOST_OPS, MOST_TENSORS, MOST_POINTS)
    assert (kept.ops[0].shape, kept.ops[0].calls, kept.ops[0].total_ms) == ("[29]", 10, 300.0)
    assert kept.ops_ms == sum(call.time_ms for call in calls)
    assert (kept.tensors[0].shape, kept.tensors[0].count, kept.tensors[0].total_bytes) == ("[39]", 2, 780)
    assert max(point.allocated_bytes for point in kept.timeline) == 10**9
    assert (kept.timeline[0].at_ms, kept.timeline[-1].at_ms) == (0.0, 9999.0)


def side(cell: str, slow_ms: float, extra_bytes: int, most: int = 4, step_ms: float = 100.0) -> Profile:
    calls = [OpCall("relu", f"[{number}]", "net", 5.0 + number) for number in range(most)]
    calls.append(OpCall("conv", "[8]", "net.conv", slow_ms))
    held = [HeldTensor("relu", "[1]", "net", 100), HeldTensor("conv", "[8]", "net.conv", extra_bytes)]
    return bounded(
        cell, StepProfile(step_ms, calls, 100 + extra_bytes, 50.0, held if extra_bytes else held[:1], (), ())
    )


def test_what_changed_is_what_moved_most() -> None:
    found = explain(side("b", 3.0, 0), side("h", 9.0, 5000, step_ms=106.0))
    assert [(one.op, one.base, one.head) for one in found.ops] == [("conv", 3.0, 9.0)]
    assert (found.step_ms, found.ops_ms) == ((100.0, 106.0), (29.0, 35.0))
    (tensor,) = found.tensors
    assert (tensor.module, tensor.base, tensor.head, tensor.least_change) == ("net.conv", None, 5000, 5000)
    assert found.peak_bytes == (100, 5100)


def test_what_a_side_does_not_list_is_below_what_it_lists() -> None:
    found = explain(side("b", 1.0, 0, most=25), side("h", 20.0, 0, most=25))
    moves = {(one.op, one.shape): one for one in found.ops}
    conv = moves["conv", "[8]"]
    assert conv.base is None
    assert conv.unlisted_below == 10.0  # the smallest of base's twenty largest
    assert conv.least_change == 10.0
    assert ("relu", "[5]") not in moves  # pushed out of head's list by conv: no change one can be sure of


@pytest.mark.parametrize(
    ("base_ms", "head_ms", "found"),
    [
        (100.0, 101.0, [(OUTSIDE, 71.0, 66.5), ("conv", 3.0, 8.5)]),
        (100.0, 120.0, [(OUTSIDE, 71.0, 85.5), ("conv", 3.0, 8.5)]),
        (100.0, 34.5, [(OUTSIDE, 71.0, 0.0), ("conv", 3.0, 8.5)]),
        (100.0, 34.0, [("conv", 3.0, 8.5)]),  # ops that overlap do not say what lies outside
    ],
)
def test_the_time_outside_ops_stands_among_them(base_ms: float, head_ms: float, found: list[Any]) -> None:
    moved = explain(side("b", 3.0, 0, step_ms=base_ms), side("h", 8.5, 0, step_ms=head_ms)).ops
    assert [(one.op, one.base, one.head) for one in moved] == sorted(found, key=lambda one: -abs(one[2] - one[1]))


def test_what_is_not_listed_is_not_outside() -> None:
    """Of 26 ops twenty are listed, and those below take 35 ms."""
    profile = side("b", 1.0, 0, most=25, step_ms=500.0)
    assert len(profile.ops) == 20
    assert profile.outside_ms == 500.0 - sum(range(5, 30)) - 1.0


def test_half_of_what_is_shown_of_a_slower_cell_takes_longer() -> None:
    down = [Moved(f"down{number}", "", "", 20.0 - number, 1.0, None) for number in range(12)]
    moves = [*down, Moved("up0", "", "", 1.0, 3.0, None)]
    assert [one.op for one in foremost(moves, 4, 1)] == ["down0", "down1", "down2", "up0"]
    assert [one.op for one in foremost(moves, 4, 0)] == ["down0", "down1", "down2", "down3"]
    assert [one.op for one in foremost(moves, 4, -1)] == ["down0", "down1", "down2", "down3"]
    assert len(foremost(moves, 20, 1)) == len(moves)


def test_shares_are_of_the_step_that_is_named_above() -> None:
    case = Cell.of(CASE, "flow-eager")
    head, *lines = profiles.profile_lines(case, side(case.key, 20.9, 0))
    assert head.endswith(": one step op by op, 100.0 ms (observed, which slows it)")
    assert [" ".join(line.split()) for line in lines[:3]] == [
        f"53.10 ms 53.1 % {OUTSIDE}", "20.90 ms 20.9 % 1 x conv [8] in net.conv", "8.00 ms 8.0 % 1 x relu [3] in net"
    ]  # fmt: skip


@pytest.fixture
def document(toys: Path) -> RunDocument:
    """A finished run of Flow's linear model and the toy."""
    request = Request(models=("linear",), engines=("flow-eager", "toy"), reference="none", batch_sizes=(2,), threads=1,
                      image_shape=(3, 4, 4), steps=2, warmup=1, pairs=1)  # fmt: skip
    return replace(plan_run(request, ("test",)), git=None, ending=DONE)


def test_a_cell_is_profiled_in_a_process_of_its_own_and_kept(
    document: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowbench.measure.plan.fingerprint.read_git", lambda directory: None)
    path = tmp_path / "run.json"
    path.write_text(document_text(document))
    text = explaining.show(path, "flow", keep=True)
    assert text.startswith("linear [2, 3, 4, 4] flow-eager: one step op by op, ")
    assert "cross_entropy" in text
    kept = read_document(path)
    (profile,) = kept.profiles
    assert profile.cell == kept.cells[0].key
    assert profile.tensors
    assert explaining.show(path, "flow", keep=False).splitlines()[1:] == text.splitlines()[1:]
    for pattern, said in (
        ("toy", "engine toy has no profile"),
        ("linear", "several cells fit"),
        ("resnet", "no cell fits"),
    ):
        with pytest.raises(FlowbenchError, match=said):
            explaining.show(path, pattern, keep=False)


@pytest.mark.usefixtures("toys")
def test_of_a_comparison_both_sides_are_explained_and_the_reference_where_it_is_named() -> None:
    request = Request(
        engines=("toy-sided",),
        reference="toy",
        models=("linear",),
        image_shape=(3, 4, 4),
        batch_sizes=(4, 2),
        threads=1,
    )
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})

    def fitting(pattern: str) -> list[str]:
        return [cell.label for cell in explaining._sides(document, pattern, "run.json")]

    sides = ["linear [4, 3, 4, 4] toy-sided@base", "linear [4, 3, 4, 4] toy-sided@head"]
    assert fitting("[4, 3, 4, 4]") == sides
    assert fitting("linear [4, 3, 4, 4] toy-sided") == sides
    assert fitting("linear [4, 3, 4, 4] toy") == ["linear [4, 3, 4, 4] toy"]
    assert fitting("linear [2, 3, 4, 4] toy-sided@canary") == ["linear [2, 3, 4, 4] toy-sided@canary"]
    with pytest.raises(
        FlowbenchError,
        match=re.escape(
            "several cells fit 'linear': linear [4, 3, 4, 4] toy-sided; linear [4, 3, 4, 4] toy; linear [2, 3, 4, 4] toy-sided;"
            " linear [2, 3, 4, 4] toy; give one of these labels"
        ),
    ):
        fitting("linear")


def test_a_profile_that_is_kept_overwrites_nothing_that_others_write(
    document: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile takes a while: the document is held, and is the one that there is then."""
    path = tmp_path / "run.json"
    path.write_text(document_text(document))
    later = replace(document, findings=(*document.findings, Finding("remark", "written meanwhile", None, None)))

    def profiled(seen: RunDocument, cells: list[Cell], source: str) -> RunDocument:
        with pytest.raises(FlowbenchError, match="another process is writing this run"), store.held(path):
            pass
        return replace(seen, profiles=tuple(side(cell.key, 3.0, 0) for cell in cells))

    def held_late(path: Path) -> contextlib.AbstractContextManager[None]:
        path.write_text(document_text(later))
        return held(path)

    held = store.held
    with monkeypatch.context() as patch:
        patch.setattr(explaining, "_profiled", profiled)
        patch.setattr(store, "held", lambda path: held_late(path) if not store.lock_path(path).exists() else held(path))
        explaining.show(path, "flow", keep=True)
    kept = read_document(path)
    assert kept.findings == later.findings
    assert len(kept.profiles) == 1


def test_a_profile_that_cannot_be_kept_says_how_to_see_it(
    document: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text(document_text(document))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        explaining, "_profiled", lambda seen, cells, _: replace(seen, profiles=(side(cells[0].key, 3.0, 0),))
    )
    monkeypatch.setattr(store.os, "fsync", full)
    way_out = "free some space or leave --keep out to see the profile alone"
    with pytest.raises(FlowbenchError, match=rf"^cannot write {path}: No space left on device; {way_out}$"):
        explaining.show(path, "flow", keep=True)
    assert explaining.show(path, "flow", keep=False)
    assert read_document(path) == document


def test_an_old_document_is_not_explained_by_todays_code(document: RunDocument, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(document_text(replace(document, machine=replace(document.machine, cpu_model="Another"))))
    with pytest.raises(FlowbenchError, match=r"cannot be profiled here .*machine's cpu_model: Another / "):
        explaining.show(path, "flow", keep=False)


def test_a_profile_leaves_the_processes_of_a_run_in_progress_alone(document: RunDocument) -> None:
    environment = measuring_environment(document.run_id, 1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], env=environment) as of_the_run:
        try:
            profile_cell(job_of(document, document.cells[0]), document.run_id)
            assert of_the_run.poll() is None
        finally:
            of_the_run.kill()
    assert not marked(f"{document.run_id} profiled by {os.getpid()}")


def test_a_cell_that_fails_is_said(document: RunDocument) -> None:
    cell = replace(document.cells[0], model="linear", input_shape=(2, 3, 4, 4), engine="toy-raises-in-build")
    odd = replace(document, cells=(cell,), engines=(replace(document.engines[0], name=cell.engine),), reference=None)
    with pytest.raises(FlowbenchError, match="failed while it was profiled: MemoryError: asked for 10 GiB"):
        profile_cell(job_of(odd, cell), odd.run_id)


def test_ranks_that_train_together_are_profiled_together(document: RunDocument) -> None:
    cell = replace(document.cells[0], world_size=2, ddp=True)
    profile = profile_cell(job_of(replace(document, cells=(cell,)), cell), document.run_id)
    assert "cross_entropy" in {op.op for op in profile.ops}
    assert profile.timeline


def test_both_sides_are_shown_with_what_changed(
    document: RunDocument, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = document.engines[0]
    engines = tuple(replace(engine, name=f"flow-eager@{name}", side=name) for name in ("base", "head"))
    cells = tuple(Cell.of(document.cells[0].case, engine.name) for engine in engines)
    profiles = (side(cells[0].key, 3.0, 0), side(cells[1].key, 9.0, 3 * 2**20))
    both = replace(document, engines=engines, cells=cells, profiles=profiles, reference=None)
    path = tmp_path / "run.json"
    path.write_text(document_text(both))
    with pytest.raises(SystemExit) as stop:
        cli.main(["explain", str(path), "flow-eager"])
    assert not stop.value.code
    lines = capfd.readouterr().out.splitlines()
    changed = lines[lines.index("what changed from base to head (profiled step: 100.0 -> 100.0 ms):") :]
    assert changed[1] == "  ops whose time moved most, ms (all ops: 29.00 -> 35.00):"
    assert changed[2].split() == "3.00 -> 9.00 +6.00 conv [8] in net.conv".split()
    assert changed[3].split() == f"71.00 -> 65.00 -6.00 {OUTSIDE}".split()
    assert changed[4] == "peak: 100 B -> 3.0 MiB"
    assert changed[6].split() == "none -> 3.0 MiB +3.0 MiB conv [8] in net.conv".split()


def compared(document: RunDocument, slow: float, grown: int = 0) -> RunDocument:
    """A sitting at two batch sizes: at the first, head's steps take `slow` times as long, and `grown` bytes more."""
    engine, case = document.engines[0], document.cells[0].case
    other = replace(case, input_shape=(4, 3, 4, 4))
    engines = tuple(replace(engine, name=f"flow-eager@{name}", side=name) for name in ("base", "head", "canary"))
    cells = [Cell.of(one, engine.name) for one in (case, other) for engine in engines]
    samples = []
    for pair in range(12):
        for position, cell in enumerate(cells):
            changed = cell.engine.endswith("head") and cell.case == case
            times_ms = (10.0 * (slow if changed else 1.0) + 0.01 * (pair % 3),)
            memory = Memory(None, None, 9**8 + grown * changed, 9**7)
            rank = RankSample(0, 1, "cpu", (), times_ms, (1.0,), memory)
            samples.append(Sample(cell.key, pair, position, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, (rank,)))
    sides = [Side(name, Git(digit * 40, None, False)) for name, digit in (("main", "b"), ("topic", "c"))]
    return replace(
        document, engines=engines, cells=tuple(cells), samples=tuple(samples), reference=None,
        protocol=replace(document.protocol, pairs=12), comparison=SidesCompared(*sides, 0.01, 6, 4, {}, {}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "step_ms", "verdict", "remark"),
    [
        (1.5, 105.0, "slower", ""),
        (1.5, 102.6, "slower", ""),
        (1.5, 102.4, "slower", "slower, 1.5"),  # hardly: steps take 5 ms more
        (1.5, 97.0, "slower", "slower, 1.5"),
        (0.5, 95.0, "faster", ""),
        (0.5, 103.0, "faster", "faster, 0.5"),
    ],
)
def test_a_profiled_step_that_does_not_show_the_change_is_said(
    document: RunDocument, slow: float, step_ms: float, verdict: str, remark: str
) -> None:
    sitting = compared(document, slow)
    comparison, (base, head, *_) = judge_document(sitting), sitting.cells
    assert comparison.times[0].verdict == verdict
    seen = replace(sitting, profiles=(side(base.key, 3.0, 0), side(head.key, 9.0, 0, step_ms=step_ms)))
    _, _, *lines = profiles.changes(seen, comparison)
    if remark:
        assert lines[0].startswith(f"  this one profiled step does not show the change ({remark}")
        assert lines[0].endswith("): it is noisy, and what moved in it is no sure explanation")
        del lines[0]
    assert lines[0].startswith("  ops whose time moved most, ms (all ops: 29.00 -> 35.00):")
    assert any("+6.00  conv [8] in net.conv" in line for line in lines)


def test_where_memory_alone_is_larger_ops_are_shown_by_explain_alone(document: RunDocument, tmp_path: Path) -> None:
    sitting = compared(document, 1.0, grown=2**28)
    base, head, *_ = sitting.cells
    assert worse_cells(sitting) == [base, head]
    seen = replace(sitting, profiles=(side(base.key, 3.0, 0), side(head.key, 9.0, 5000, step_ms=104.0)))
    comparison = judge_document(seen)
    assert comparison.times[0].verdict is Verdict.SAME
    _, heading, *lines = profiles.changes(seen, comparison)
    assert heading == "what changed from base to head (profiled step: 100.0 -> 104.0 ms):"
    assert lines[0] == "  ops: not shown, as the verdict on time is same; flowbench explain shows them"
    assert [line.strip().partition(":")[0] for line in lines[1:3]] == ["peak", "tensors alive at the peak that differ"]
    assert "net.conv" in lines[3]
    assert len(lines) == 4
    path = tmp_path / "run.json"
    path.write_text(document_text(seen))
    shown = explaining.show(path, f"{base.case.label} flow-eager", keep=False).partition(heading)[2].splitlines()[1:]
    assert shown[0] == (
        "  the verdict on time is same: what moved in this one profiled step is noise, as far as is known"
    )
    assert shown[2].endswith("+6.00  conv [8] in net.conv")


def test_what_is_worse_in_a_comparison_is_looked_into_on_both_sides(document: RunDocument, tmp_path: Path) -> None:
    case, both = document.cells[0].case, compared(document, 1.5)
    assert both.comparison is not None
    worse = worse_cells(both)
    assert [(cell.case, cell.engine) for cell in worse] == [(case, "flow-eager@base"), (case, "flow-eager@head")]
    assert list(profiles.changes(both, judge_document(both))) == []
    path = tmp_path / "run.json"
    for changed, said in (
        (
            {"comparison": replace(both.comparison, head=Side("topic", Git("c" * 40, None, True)))},
            "topic had uncommitted",
        ),
        ({"machine": replace(both.machine, cpu_model="Another")}, "cpu_model: Another / "),
        ({}, "b{40}"),  # a commit that this repository does not have
    ):
        path.write_text(document_text(replace(both, **changed)))
        with pytest.raises(FlowbenchError, match=said):
            explaining.show(path, f"{case.label} flow-eager", keep=False)
    profiled = replace(both, profiles=(side(worse[0].key, 3.0, 0), side(worse[1].key, 9.0, 0, step_ms=106.0)))
    said = list(profiles.changes(profiled, judge_document(profiled)))
    assert said[0] == "\nlinear [2, 3, 4, 4] flow-eager"
    assert said[3].split()[:3] == ["3.00", "->", "9.00"]
