"""Cells on a GPU, by engines that act as if there were one: which are planned, how they are timed, what fails alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowbench.cell import Case
from flowbench.errors import FlowbenchError
from flowbench.measure import session
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.rank_group import GroupResult
from flowbench.measure.ranks import Round
from flowbench.measure.resumption import check_resumable
from flowbench.measure.schedule import Turn
from flowbench.measure.session import run_session
from flowbench.measure.worker import HOST_STEPS
from flowbench.record import machine, store
from flowbench.record.document import read_document
from flowbench.record.gpu import GpuUse
from flowbench.record.run import Machine, RunDocument
from flowbench.report import render
from flowbench.report.facts import facts_of
from flowbench.report.words import details_of

pytestmark = pytest.mark.usefixtures("toys", "gpu_box")

CASE = Case("resnet50", (4, 3, 224, 224), "float32", "eager", 1, False, True, True, 2)


def planned(*engines: str, **changes: object) -> RunDocument:
    request = {"models": ("linear",), "batch_sizes": (2,), "image_shape": (3, 4, 4), "steps": 3, "warmup": 1} | changes
    return plan_run(Request(preset="smoke", engines=engines, pairs=1, threads=1, **request), ("test",))


def measured(tmp_path: Path, *engines: str, **changes: object) -> RunDocument:
    document = planned(*engines, reference=engines[-1], **changes)
    path = store.create(tmp_path, document)
    document = run_session(path, document, ProgressDisplay(document))
    assert read_document(path) == document
    return document


def test_a_case_on_a_gpu_is_another_case_and_says_so() -> None:
    on_gpu = replace(CASE, device="cuda")
    assert CASE.key == "resnet50/4x3x224x224/float32/eager/world1/single/buffers/backward/threads2"
    assert on_gpu.key == CASE.key + "/cuda"
    assert on_gpu.label == "resnet50 [4, 3, 224, 224], cuda"


def test_where_a_gpu_answers_it_is_used() -> None:
    assert {cell.device for cell in planned("toy-gpu", reference="none").cells} == {"cuda"}
    document = plan_run(Request(engines=("torch-eager",)), ("test",))
    assert document.preset == "gpu"
    assert [cell.input_shape[0] for cell in document.cells] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert {cell.device for cell in document.cells} == {"cuda"}
    assert plan_run(Request(engines=("torch-eager",), device="cpu"), ("test",)).preset == "cpu"


def test_the_preset_for_cpus_stays_on_the_cpu() -> None:
    document = plan_run(Request(preset="cpu", engines=("torch-eager",)), ("test",))
    assert {cell.device for cell in document.cells} == {"cpu"}


def test_without_a_gpu_asking_for_one_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, gpu_box: Machine) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda: replace(gpu_box, gpus=()))
    for request in (Request(device="cuda"), Request(preset="gpu")):
        with pytest.raises(FlowbenchError, match=r"no GPU answers here .* take --device cpu"):
            plan_run(request, ("test",))


def test_a_limit_of_gpu_memory_is_refused_where_there_is_no_gpu_to_limit() -> None:
    with pytest.raises(FlowbenchError, match=r"limit of GPU memory was given, but this runs on the CPU"):
        plan_run(Request(device="cpu", gpu_memory_limit_bytes=2**30), ("test",))


def test_an_engine_for_other_devices_is_left_out_by_name() -> None:
    document = planned("toy", "toy-gpu", reference="none")
    assert [cell.engine for cell in document.cells] == ["toy-gpu"]
    (left_out,) = document.not_measured
    assert left_out.what == "linear [2, 3, 4, 4], cuda toy"
    assert left_out.reason == "it does not run on cuda, but on cpu"
    document = planned("toy", "toy-gpu", reference="none", device="cpu")
    assert [left_out.reason for left_out in document.not_measured] == ["it does not run on cpu, but on cuda"]


def test_autotuning_is_for_gpus() -> None:
    engines = ("torch-eager-benchmark", "torch-channels-last-benchmark")
    with pytest.raises(FlowbenchError, match=r"cudnn\.benchmark is a setting for GPUs"):
        planned(*engines, reference="none", device="cpu")
    assert [cell.engine for cell in planned(*engines, reference="none").cells] == list(engines)


def test_steps_are_timed_by_events_with_the_hosts_time_beside(tmp_path: Path) -> None:
    document = measured(tmp_path, "toy-gpu", steps=5, warmup=2)
    (sample,) = document.samples
    (rank,) = sample.ranks
    assert (sample.status, rank.device) == ("ok", "cuda:0")
    assert (len(rank.warmup_ms), len(rank.steps_ms), len(rank.losses)) == (2, 5, 7)
    assert rank.host_ms is not None
    assert len(rank.host_ms) == HOST_STEPS
    assert len(set(rank.losses)) == 7


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("toy-gpu-elsewhere", "RuntimeError: the device's events account for 0.0 of "),
        ("toy-gpu-on-cpu", "RuntimeError: the engine trained on cpu, the cell asks for cuda (in phase end)"),
        ("toy-gpu-memory", "MemoryError: out of memory on cuda:0: asked for 2.0 GiB, limit 1048576 B, held 1.0 MiB"),
    ],
)
def test_what_goes_wrong_on_a_gpu_fails_its_cell_alone(engine: str, said: str, tmp_path: Path) -> None:
    document = measured(tmp_path, engine, "toy-gpu", gpu_memory_limit_bytes=2**20)
    failed, good = document.samples
    assert failed.error is not None
    assert failed.error.startswith(said)
    assert (failed.status, good.status) == ("failed", "ok")
    assert document.protocol.gpu_memory_limit_bytes == 2**20


def test_a_run_on_a_gpu_is_not_resumed_on_the_cpu() -> None:
    document = planned("toy-gpu", reference="none")
    check_resumable(document, Request(device="cuda"), "run.json")
    with pytest.raises(FlowbenchError, match="device cuda, asked for cpu"):
        check_resumable(document, Request(device="cpu"), "run.json")


@pytest.mark.parametrize(
    ("shift", "how"), [(0, "by its process id"), (100_000, "as the only process that came to its GPU")]
)
def test_the_driver_is_asked_what_the_process_holds_and_how_the_gpu_ran(
    shift: int, how: str, tmp_path: Path, gpu_driver: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_driver({"sm": 1400, "temperature": 86, "reasons": 0x20, "processes": [[2**30, 5 * 2**20]]})
    monkeypatch.setenv("GPU_DOUBLE_SHIFT", str(shift))
    document = measured(tmp_path, "toy-gpu")
    (sample,) = document.samples
    memory = sample.ranks[0].memory
    assert memory.gpu_uses == (GpuUse(0, 700 * 2**20),)
    assert memory.gpu_used_bytes == 700 * 2**20
    assert (memory.gpu_uses_how or "").startswith(how)
    (seen,) = sample.gpus
    assert seen.readings >= 1
    assert seen.slowed_by == {"thermal slowdown": 1}
    assert [(other.pid, other.memory_bytes) for other in seen.others] == [(2**30, 5 * 2**20)]
    assert {finding.kind for finding in document.findings} >= {"GPU slowed down", "GPU shared"}
    assert "thermal slowdown" in render(document, "console")
    assert "GPU used" in render(document, "speed-stats")
    said = f"SM clock 1400 MHz, temperature 86 °C, slowed down at times by thermal slowdown ({seen.readings} reading"
    assert said in dict(details_of(document))["GPU 0 while measured"]
    assert "thermal slowdown" in render(document, "markdown")


def test_where_the_driver_cannot_be_asked_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "open_driver", lambda: "NVML does not answer: Driver Not Loaded")
    document = measured(tmp_path, "toy-gpu", steps=2)
    (finding,) = [finding for finding in document.findings if finding.kind == "GPU not watched"]
    assert finding.message.endswith("are not watched: NVML does not answer: Driver Not Loaded")
    memory = document.samples[0].ranks[0].memory
    assert memory.gpu_uses == ()
    assert memory.gpu_uses_how is not None
    assert memory.gpu_uses_how.startswith("NVML")
    (missing,) = [left_out for left_out in facts_of(document).left_out if left_out.what.startswith("GPU used")]
    assert missing.reason == memory.gpu_uses_how
    assert document.samples[0].gpus == ()


def test_a_rank_with_memory_on_anothers_gpu_is_a_finding(
    tmp_path: Path, gpu_driver: Callable, monkeypatch: pytest.MonkeyPatch, gpu_box: Machine
) -> None:
    monkeypatch.setattr(machine, "read_machine", lambda: replace(gpu_box, gpus=gpu_box.gpus * 2))
    gpu_driver({}, {"uuid": "GPU-bb"})
    document = measured(tmp_path, "toy-gpu-context", world_sizes=(2,))
    first, second = document.samples[0].ranks
    assert first.memory.gpu_uses == (GpuUse(0, 700 * 2**20),)
    assert second.memory.gpu_uses == (GpuUse(0, 312 * 2**20), GpuUse(1, 700 * 2**20))
    (finding,) = [finding for finding in document.findings if finding.kind == "memory on another's GPU"]
    assert finding.message == "rank 1 holds 312 MiB on GPU 0, its own is GPU 1"
    assert "rank 1 holds 312 MiB on GPU 0" in render(document, "console")
    document = measured(tmp_path / "well", "toy-gpu", world_sizes=(2,))
    assert not [finding for finding in document.findings if finding.kind == "memory on another's GPU"]


def test_more_ranks_than_gpus_are_listed_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    document = planned("toy-gpu", reference="toy-gpu", world_sizes=(1, 2, 8), models=("linear",))
    assert {cell.world_size for cell in document.cells} == {1}
    reasons = {missing.what: missing.reason for missing in document.not_measured}
    assert reasons["linear [2, 3, 4, 4], ddp, world size=2, cuda toy-gpu"].startswith(
        "2 ranks need a GPU each, this machine has 1 GPU"
    )
    assert len(reasons) == 2
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert len(planned("toy-gpu", reference="toy-gpu", world_sizes=(2,), launcher="srun").cells) == 1
    assert any("world size=2" in missing.what for missing in plan_run(Request(preset="gpu"), ("test",)).not_measured)


@pytest.mark.parametrize(
    ("tunes", "change", "together"),
    [
        ("never", {}, [True, True]),
        ("once", {}, [False, True]),
        ("always", {}, [False, False]),
        ("never", {"device": "cpu"}, [False, False]),
        ("never", {"world_size": 2, "ddp": True}, [False, False]),
    ],
)
def test_those_that_may_tune_or_disturb_each_other_build_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tunes: str, change: dict[str, Any], together: list[bool]
) -> None:
    document = planned("toy-gpu", reference="none")
    document = replace(document, cells=tuple(replace(cell, **change) for cell in document.cells))
    document = replace(document, protocol=replace(document.protocol, pairs=2))
    sitting = session.Session(store.create(tmp_path, document), document, ProgressDisplay(document))
    seen: list[bool] = []

    def run(self: Round, *_: object, build_together: bool) -> list[GroupResult]:
        seen.append(build_together)
        self.close()
        return [GroupResult((), "not run", (), None, ())]

    monkeypatch.setattr(Round, "run", run)
    monkeypatch.setattr(session, "load_engine", lambda _: SimpleNamespace(tunes=tunes))
    for pair in range(2):
        sitting.measure([Turn(document.cells[0], pair, 0)])
    assert seen == together
