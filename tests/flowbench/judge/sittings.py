"""Documents of sittings of two sides, built by hand: 6 rounds, and 6 that confirm."""

from __future__ import annotations

from collections.abc import Mapping

from flowbench.cell import Case, Cell
from flowbench.record import run
from flowbench.record.sample import Memory, RankSample, Sample

MIB = 2**20
NOISE = (1.004, 0.997, 1.001, 0.996, 1.003, 0.999)
CASE = Case("resnet18", (4, 3, 64, 64), "float32", "eager", 1, False, True, True, 2)
SMALL = Case("resnet18", (1, 3, 64, 64), "float32", "eager", 1, False, True, True, 2)
MACHINE = run.Machine("AMD EPYC", "x86_64", 2, 2, 2, 16 * 1024**3, (), None, "Linux 6.8", "3.11.9")
STEP_MS = {"base": 100.0, "head": 100.0, "canary": 100.0, None: 120.0}


def sample(cell: Cell, pair: int, step_ms: float, peak_bytes: int, status: str = "ok", steps: int = 4) -> Sample:
    """One process group whose steps all take `step_ms`, on all its ranks."""
    memory = Memory(peak_bytes, 4 * peak_bytes, 10 * peak_bytes, MIB)
    ranks = tuple(
        RankSample(rank, 2, "cpu", (), (step_ms,) * steps, (6.9,) * steps, memory) for rank in range(cell.world_size)
    )
    error = None if status == "ok" else f"it is {status}"
    return Sample(
        cell.key, pair, 0, "2026-11-29T10:00:00Z", 1.0, status, error, None, () if status == "failed" else ranks
    )


def sitting(
    times: Mapping[str, float] | None = None,
    peaks: Mapping[str, int] | None = None,
    *,
    confirming: Mapping[str, float] | None = None,
    spoiled: Mapping[tuple[str, Case], str] | None = None,
    lacks: tuple[tuple[str, Case], ...] = (),
    cases: tuple[Case, ...] = (CASE, SMALL),
    floors: Mapping[str, float] | None = None,
    shifts: Mapping[str, float] | None = None,
    reference: bool = True,
) -> run.RunDocument:
    """`times` multiplies a side's steps at `CASE`, `confirming` in the rounds that confirm (else alike); `peaks` adds bytes."""
    times, peaks, spoiled = times or {}, peaks or {}, spoiled or {}
    again = times if confirming is None else confirming
    engines = [
        run.Engine(f"flow-eager@{side}", f"Flow@{side}", "framework", "0.1.0", side)
        for side in ("base", "head", "canary")
    ]
    engines += [run.Engine("torch-eager", "PyTorch", "torch", "2.14.0")] if reference else []
    cells, samples = [], []
    for case in cases:
        for engine in engines:
            if (engine.side, case) in lacks or (engine.side == "canary" and case != cases[-1]):
                continue
            cells.append(cell := Cell.of(case, engine.name))
            for pair in range(12 if engine.side in ("base", "head") else 6):
                factor = (
                    (times if pair < 6 else again).get(engine.side, 1.0)
                    if case == CASE or engine.side == "canary"
                    else 1.0
                )
                noise = NOISE[pair % 6] if engine.side in ("head", "canary") else 1.0
                status = spoiled.get((engine.side, case), "ok")
                step_ms = STEP_MS[engine.side] * factor * noise
                samples.append(sample(cell, pair, step_ms, 100 * MIB + peaks.get(engine.side, 0), status))
                if status != "ok":
                    break
    git = run.Git("0123456789abcdef0123456789abcdef01234567", None, False)
    plan = run.SidesCompared(
        run.Side("main", git), run.Side("working tree", run.Git("f" * 40, "work", True)), 0.01, 6, 6, dict(floors or {}),
        {case.key: "all 6 pairs were measured" for case in cases}, sitting_shifts=dict(shifts or {}),
    )  # fmt: skip
    protocol = run.Protocol(4, 0, 12, 2, "in turns", 0, 1e-4, 0.9, 2e-5, None, None, steps_per_turn=1)
    return run.RunDocument(
        "20261129-100000-abcdef", "2026-11-29T10:00:00Z", "0.1.0", ("flowbench", "compare", "main"), "smoke",
        "torch-eager" if reference else None, tuple(engines), protocol, None, MACHINE, {}, tuple(cells), tuple(samples), (), (),
        run.Ending("complete", "2026-11-29T10:05:00Z", None), comparison=plan,
    )  # fmt: skip


def plain(step_ms: Mapping[str, float], pairs: int = 6, **changes: object) -> run.RunDocument:
    """A document of an ordinary run: `step_ms` by engine, the reference is torch-eager where it is one of them."""
    engines = tuple(run.Engine(name, name, name.partition("-")[0], "1.0") for name in step_ms)
    cells = tuple(Cell.of(CASE, name) for name in step_ms)
    samples = tuple(
        sample(cell, pair, step_ms[cell.engine] * (NOISE[pair % 6] if cell.engine != "torch-eager" else 1.0), 100 * MIB)
        for cell in cells
        for pair in range(pairs)
    )
    fields: dict[str, object] = {
        "run_id": "20261129-100000-abcdef", "created": "2026-11-29T10:00:00Z", "flowbench_version": "0.1.0",
        "command": ("flowbench", "run"), "preset": "smoke", "reference": "torch-eager" if "torch-eager" in step_ms else None,
        "engines": engines, "protocol": run.Protocol(4, 0, pairs, 2, "mirrored", 0, 1e-4, 0.9, 2e-5, None, None),
        "git": None, "machine": MACHINE, "versions": {}, "cells": cells, "samples": samples, "findings": (),
        "not_measured": (), "ending": run.Ending("complete", None, None),
    }  # fmt: skip
    return run.RunDocument(**fields | changes)
