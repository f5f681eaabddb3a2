"""Sittings on a real GPU: both frameworks timed by events, their memory found, and a cell that runs out of it alone."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.cell import Case, Cell
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.ranks import Round, run_group
from flowbench.measure.session import run_session
from flowbench.measure.wire import Job
from flowbench.record import store
from flowbench.record.machine import read_machine
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    if not read_machine().gpus:
        pytest.skip("no NVIDIA GPU answers here")


def measured(folder: Path, *engines: str, **changes: object) -> RunDocument:
    """A sitting of one pair; the last engine is the reference."""
    request = {
        "models": ("resnet18",),
        "image_shape": (3, 64, 64),
        "batch_sizes": (8,),
        "steps": 5,
        "warmup": 3,
        "pairs": 1,
    }
    plan = plan_run(Request(preset="smoke", engines=engines, reference=engines[-1], **request | changes), ("test",))
    return run_session(store.create(folder, plan), plan, ProgressDisplay(plan))


def of(document: RunDocument, engine: str) -> list[Sample]:
    return [sample for sample in document.samples if document.by_key[sample.cell].engine == engine]


def test_both_frameworks_are_timed_by_events_and_their_memory_is_found(tmp_path: Path) -> None:
    document = measured(tmp_path, "flow-eager", "torch-eager")
    for engine in ("flow-eager", "torch-eager"):
        (sample,) = of(document, engine)
        assert (sample.status, sample.error) == ("ok", None)
        (rank,) = sample.ranks
        assert rank.device == "cuda:0"
        assert rank.host_ms is not None
        memory = rank.memory
        assert memory.allocated_peak_bytes is not None
        assert memory.reserved_peak_bytes is not None
        assert 0 < memory.allocated_peak_bytes <= memory.reserved_peak_bytes
        # Beside the allocator's there are the context and the libraries, which take some hundred MiB.
        (use,) = memory.gpu_uses
        assert memory.reserved_peak_bytes + 100 * MIB < use.held_bytes < memory.reserved_peak_bytes + 2000 * MIB, memory
        (seen,) = sample.gpus
        assert seen.readings >= 1
        assert seen.sm_clock_mhz is not None
        assert seen.temperature_c is not None
    assert [finding for finding in document.findings if finding.kind == "GPU memory"] == []


@pytest.mark.parametrize("build_together", [False, True])
def test_processes_that_take_turns_open_the_gpu_and_hold_no_more_for_it(build_together: bool) -> None:
    case = Case("resnet18", (8, 3, 64, 64), "float32", "eager", 1, False, True, True, 1, "cuda")
    # Engines that time nothing choose the same algorithms each time, which then take the same memory. The losses of a turn's
    # steps are held until it ends, so that this one has all steps, as a process alone.
    jobs = [Job(Cell.of(case, engine), 0, 5, 1, 0, 1e-4, 0.9) for engine in ("flow-eager-untimed", "torch-eager")]
    mark = f"test-of-opening-{os.getpid()}"
    alone = [run_group(job, mark) for job in jobs]
    opened = Round([replace(job, steps_per_turn=job.steps) for job in jobs], mark).run(build_together=build_together)
    assert [result.error for result in (*alone, *opened)] == [None] * 4
    peaks = [[result.ranks[0].memory.allocated_peak_bytes for result in results] for results in (alone, opened)]
    assert peaks[0] == peaks[1]


def test_what_runs_out_of_memory_fails_alone_and_gives_it_back(tmp_path: Path) -> None:
    document = measured(
        tmp_path, "flow-eager", "torch-eager", image_shape=(3, 224, 224), batch_sizes=(64, 1), steps=2, warmup=1,
        gpu_memory_limit_bytes=700 * MIB,
    )  # fmt: skip
    for engine in ("flow-eager", "torch-eager"):
        large, small = of(document, engine)
        assert large.status == "failed"
        assert "OutOfMemoryError" in (large.error or "")
        assert small.status == "ok", small.error
    (flow, _) = of(document, "flow-eager")
    assert re.search(r"asked for .*, limit 700\.0 MiB, .*held [\d.]+ MiB .*most is held by: ", flow.error or "")
    assert [finding for finding in document.findings if finding.kind == "GPU memory"] == []
