"""Run documents of the situations a report has to cope with, built by hand."""

from __future__ import annotations

import dataclasses

import pytest

from flowbench.cell import Case, Cell
from flowbench.record import run

MIB = 1024 * 1024
FLOW = run.Engine("flow-eager", "Flow", "framework", "0.1.0")
TORCH = run.Engine("torch-eager", "PyTorch", "torch", "2.14.0")
NHWC = run.Engine("torch-channels-last", "PyTorch-NHWC", "torch", "2.14.0")
CASE = Case("resnet50", (4, 3, 224, 224), "float32", "eager", 1, False, True, True, 2)
PROTOCOL = run.Protocol(2, 1, 2, 2, "ABBA", 1, 0.01, 0.9, 1e-4, 600.0, None)
CPU_BOX = run.Machine("AMD EPYC 9B14", "x86_64", 2, 4, 2, 16 * 1024**3, (), None, "Linux 6.8", "3.11.9")
GPU_BOX = dataclasses.replace(
    CPU_BOX, gpus=(run.Gpu("NVIDIA H200", 140 * 1024**3), run.Gpu("NVIDIA H200", 140 * 1024**3)), gpu_driver="580.65"
)
STEPS = {"flow-eager": 500.0, "torch-eager": 700.0, "torch-channels-last": 550.0}


def batch(size: int, **changes: object) -> Case:
    return dataclasses.replace(CASE, input_shape=(size, 3, 224, 224), **changes)


def rank_sample(engine: str, scale: float, rank: int) -> run.RankSample:
    allocated = None if engine.startswith("torch") else int(800 * scale * MIB)
    memory = run.Memory(allocated, allocated, int((1700 if allocated is None else 1100) * scale * MIB), 200 * MIB)
    step = STEPS.get(engine, 600.0) * scale + 10 * rank
    return run.RankSample(rank, 2, "cpu", (step * 2,), (step, step * 1.02), (6.9, 6.8, 6.7), memory)


def sample(cell: Cell, pair: int, scale: float, status: str = "ok", error: str | None = None) -> run.Sample:
    ranks = (
        () if status == "failed" else tuple(rank_sample(cell.engine, scale, rank) for rank in range(cell.world_size))
    )
    position = pair % 2
    difference = {"void": 0.31, "ok": 1e-6}.get(status)
    return run.Sample(cell.key, pair, position, f"2026-11-29T10:0{pair}:00Z", 9.5, status, error, difference, ranks)


def document(cases: list[Case], engines: list[run.Engine], **changes: object) -> run.RunDocument:
    """All cells measured in two pairs; `spoiled` maps (engine, batch size) to a status and an error."""
    spoiled = changes.pop("spoiled", {})
    cells = tuple(Cell.of(case, engine.name) for case in cases for engine in engines)
    samples = []
    for cell in cells:
        for pair in range(2):
            status, error = spoiled.get((cell.engine, cell.input_shape[0]), ("ok", None))
            scale = cell.input_shape[0] / 4 * (1 + 0.01 * pair * (cell.engine != "torch-eager"))
            if status != "missing" and not (status == "half" and pair == 1):
                samples.append(sample(cell, pair, scale, "ok" if status == "half" else status, error))
    fields = {
        "run_id": "20261129-100000-abcd",
        "created": "2026-11-29T10:00:00Z",
        "flowbench_version": "0.1.0",
        "command": ("flowbench", "run"),
        "preset": "cpu",
        "reference": "torch-eager" if TORCH in engines else None,
        "engines": tuple(engines),
        "protocol": PROTOCOL,
        "git": run.Git("0123456789abcdef0123456789abcdef01234567", "main", True),
        "machine": CPU_BOX,
        "versions": {"numpy": "2.3.5", "torch": "2.14.0"},
        "cells": cells,
        "samples": tuple(samples),
        "findings": (),
        "not_measured": (),
        "ending": run.Ending("complete", "2026-11-29T10:05:00Z", None),
    }
    return run.RunDocument(**fields | changes)


def hostile() -> run.RunDocument:
    name = "`x` | <!-- flowbench --> @someone\n](http://evil.example) <br>Relative speed: 9.99 \x1b[31m\\n"
    engines = [run.Engine("toy", name, name, name), run.Engine("torch-eager", f"{name}!", "torch", "2.14.0")]
    return document(
        [batch(4, model=name), batch(4, model=name + "?")],
        engines,
        reference="torch-eager",
        machine=dataclasses.replace(CPU_BOX, cpu_model=name),
        versions={name: name},
        git=run.Git(name, name, False),
        findings=(run.Finding(name, name, None, None),),
        not_measured=(run.NotMeasured(name, name + "\nRelative speed: 8.88\nGPU Name: forged\nFlow: 38.0ms"),),
    )


@pytest.fixture(scope="session")
def documents() -> dict[str, run.RunDocument]:
    """One run document per situation."""
    both = [FLOW, TORCH]
    killed = run.Ending("running", None, None)
    graph = batch(4, precision="bfloat16", mode="graph", backward=False, device="cuda")
    ranks = batch(16, world_size=2, ddp=True, broadcast_buffers=False, device="cuda")
    same_name = [FLOW, dataclasses.replace(FLOW, name="flow-graph"), dataclasses.replace(FLOW, name="flow-old"), TORCH]
    wrong = {("flow-eager", 4): ("void", "losses differ from PyTorch's by 0.31 at step 2, allowed are 0.0001")}
    died = {("flow-eager", 4): ("failed", "rank 0 died of SIGKILL (out of memory?)\nlast words: none")}
    return {
        "two_cells": document([batch(4), batch(1)], [FLOW, TORCH, NHWC]),
        "void": document([batch(4), batch(1)], both, spoiled=wrong),
        "failed": document([batch(4), batch(1)], both, spoiled=died),
        "reference_failed": document([batch(4)], both, spoiled={("torch-eager", 4): ("failed", "no memory left")}),
        "no_reference": document(
            [batch(4)], [FLOW], not_measured=(run.NotMeasured("torch-eager", "torch is not installed: pip install torch"),)
        ),
        "nothing_measured": document(
            [batch(4)], both, spoiled={("flow-eager", 4): ("missing", None), ("torch-eager", 4): ("missing", None)}
        ),
        "interrupted": document(
            [batch(4), batch(2), batch(1)], both,
            spoiled={("torch-eager", 2): ("half", None), ("flow-eager", 1): ("missing", None),
                     ("torch-eager", 1): ("missing", None)},
            ending=run.Ending("interrupted", "2026-11-29T10:02:00Z", "Ctrl-C"),
        ),
        "killed": document([batch(4)], both, spoiled={("torch-eager", 4): ("missing", None)}, ending=killed),
        "same_names": document([batch(4), batch(4, threads=1)], same_name),
        "two_ranks": document([ranks, graph], both, machine=GPU_BOX),
        "disturbed": document(
            [batch(4)], both, findings=(run.Finding("load", "another process used 1.4 cores", None, None),), git=None
        ),
        "hostile_names": hostile(),
        "many_cells": document([batch(size) for size in range(1, 41)], both),
        "no_cells": document([], both),
    }  # fmt: skip


@pytest.fixture(scope="session")
def many() -> run.RunDocument:
    """Five hundred cells."""
    return document([batch(size) for size in range(1, 251)], [FLOW, TORCH])
