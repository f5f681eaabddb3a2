"""The parts of `several_gpus.py`, in order and each with its figures: all-reduce, a killed rank, DDP, agreement."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flowbench.errors import FlowbenchError
from suites import several_gpus_figures as figures
from suites import test_all_reduce as all_reduce
from suites.several_gpus_child import run_child, sit, time_left_s
from suites.several_gpus_figures import FLOW, LEAST_BANDWIDTH, MOST_ENDING_S, PYTORCH, Figure
from suites.several_gpus_setting import Deadline, Setting

AGREEMENT_STEPS = 100
MOST_PAIRS = 3
# What hangs in a part that is no sitting must not take the others' time.
MOST_OTHERS_S = 120.0


@dataclass(frozen=True)
class Part:
    """A piece of the work: about how long it takes, and what gives its figures until a time."""

    title: str
    about_s: float
    run: Callable[[Deadline], list[Figure]] = field(repr=False)


def plan(setting: Setting, seconds: float) -> list[Part]:
    """The parts, what matters most first, with as many pairs as there is time for; one at least."""
    reached = len(setting.reached)
    sizes = sum(map(len, setting.batch_sizes))
    fitting = (seconds - 3 * setting.others_s) / (sizes * reached * setting.round_s)
    pairs = setting.pairs or max(1, min(MOST_PAIRS, int(fitting)))

    def sitting(batch_sizes: tuple[int, ...]) -> Part:
        worlds = ", ".join(map(str, setting.reached))
        return Part(
            f"DDP beside PyTorch's, N = {', '.join(map(str, batch_sizes))} per rank, world sizes {worlds}",
            pairs * len(batch_sizes) * reached * setting.round_s,
            lambda until: trained(setting, batch_sizes, pairs, until),
        )

    def other(title: str, run: Callable[[Setting, str, Deadline], list[Figure]]) -> Part:
        return Part(title, setting.others_s, lambda until: run(setting, title, until.or_after(MOST_OTHERS_S)))

    ranks = f"{setting.ranks} ranks"
    first, *rest = setting.batch_sizes
    return [
        other(f"all-reduce among {ranks}", all_reduced),
        other(f"{ranks} train, one is killed, all others end", killed),
        sitting(first),
        other(f"{ranks}, parameters after {AGREEMENT_STEPS} steps with data of their own", agreed),
        *map(sitting, rest),
    ]


def measured(part: Part, until: Deadline) -> list[Figure]:
    """A part's figures; where it fails, or there is no time for it, a line that says so."""
    try:
        return part.run(until)
    except (FlowbenchError, OSError, ValueError, subprocess.SubprocessError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - nobody watches: the other parts go on, and this one's line says what it was
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
    return [Figure(part.title, " ".join(reason.split())[:300], "-", None)]


def all_reduced(setting: Setting, title: str, until: Deadline) -> list[Figure]:
    """Bus bandwidth beside the other library's; both have to give the sum first."""
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", f">= {LEAST_BANDWIDTH}", None)]
    time_left_s(until, setting.others_s)

    def run(command: list[str], variables: dict[str, str]) -> None:
        status = run_child(command, until, variables)
        if status != 0:
            raise FlowbenchError(until.words if status is None else f"the ranks ended with status {status}, see above")

    rows = all_reduce.measure(setting.ranks, setting.device, setting.all_reduce_bytes, run=run)
    lines = [Figure(f"{title}, values", "the sum", "the sum", True)]
    for row in rows:
        flow, other = (
            all_reduce.bus_bandwidth(row["bytes"], row[name][0], setting.ranks) for name in ("flow", "torch")
        )
        lines.append(figures.bandwidth(f"{title}, {row['bytes'] / 1e6:g} MB, bus bandwidth", flow, other))
    return lines


def killed(setting: Setting, title: str, until: Deadline) -> list[Figure]:
    """How long after a rank was killed the launcher and every other rank have ended."""
    bar = f"<= {MOST_ENDING_S:g} s"
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", bar, None)]
    time_left_s(until, setting.others_s)
    with tempfile.TemporaryDirectory() as folder:
        shape = (setting.agreeing_batch_size, *setting.image_shape)
        job = json.dumps({"folder": folder, "device": setting.device, "model": setting.model, "shape": shape})
        launch = [sys.executable, "-m", "framework.distributed.launch", "--nproc-per-node", str(setting.ranks)]
        status = run_child([*launch, "-m", "suites.several_gpus_rank", job], until)
        ended = time.time()
        if status is None:
            return [Figure(title, until.words, bar, None)]
        moment, pids = Path(folder) / "killed", Path(folder).glob("rank*")
        if status != 128 + signal.SIGKILL or not moment.exists():
            return [Figure(title, f"no rank was killed: the launcher ended with status {status}, see above", bar, None)]
        took_s = ended - float(moment.read_text())
        left = sorted(path.name for path in pids if psutil.pid_exists(int(path.read_text())))
    value = f"within {took_s:.1f} s" + (f", but {', '.join(left)} still run" if left else "")
    return [Figure(title, value, bar, took_s <= MOST_ENDING_S and not left)]


def trained(setting: Setting, batch_sizes: tuple[int, ...], pairs: int, until: Deadline) -> list[Figure]:
    """One sitting over all world sizes: speed, memory, and for the first of them the scaling."""
    engines = list(setting.turn_s)
    options = ["--engine", *engines, "--reference", PYTORCH, "--pairs", str(pairs), "--steps", str(setting.steps)]
    options += ["--warmup", str(setting.warmup), "--batch-size", *map(str, batch_sizes)]
    name = f"n-{'-'.join(map(str, batch_sizes))}"
    document = sit(setting, name, setting.world_sizes, options, until, setting.round_s)
    lines: list[Figure] = []
    for size in batch_sizes:
        for world_size in setting.reached:
            own = figures.cell_of(document, FLOW, size, world_size)
            lines += figures.speeds(document, own, engines[1:])
            lines += figures.memory(document, own, setting.memory_kinds)
    if batch_sizes == setting.batch_sizes[0]:
        lines += figures.scaling(document, batch_sizes[0], setting.reached)
    if setting.device == "cuda":
        lines.append(figures.foreign_memory(document, batch_sizes))
    return lines


def agreed(setting: Setting, title: str, until: Deadline) -> list[Figure]:
    """Many steps of ranks that see different data: flowbench compares their parameters bit for bit."""
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", "bit-identical", None)]
    options = ["--engine", FLOW, "--reference", "none", "--pairs", "1", "--warmup", "0"]
    options += ["--steps", str(AGREEMENT_STEPS), "--batch-size", str(setting.agreeing_batch_size)]
    document = sit(setting, "agreement", (setting.ranks,), options, until, setting.others_s)
    cell = figures.cell_of(document, FLOW, setting.agreeing_batch_size, setting.ranks)
    return [figures.agreement(document, title, cell)]
