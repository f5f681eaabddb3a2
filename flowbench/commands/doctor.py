"""What this machine can measure, which engines are there, and what disturbs measurements, each with the way out."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from flowbench import nvml
from flowbench.engine_registry import ask, engine_names, load_engine, skipped_engines
from flowbench.errors import FlowbenchError
from flowbench.measure.disturbance import BUSY_SHARE, SPIN_LESS, STEAL_SHARE, Counters, read_counters
from flowbench.measure.memory import ResidentMeter
from flowbench.presets import PRESETS, REFERENCE, default_preset
from flowbench.record import machine as fingerprint
from flowbench.record.run import Machine

_WATCH_S = 1.0
_BUSY_PERCENT = 5
# The first driver that runs CUDA 13.
_CUDA_13_DRIVER = 580
_LOW_MEMORY_BYTES = 4 * 2**30
_LOW_DISK_BYTES = 100 * 2**20


@dataclass(frozen=True)
class Check:
    """One finding: `bad` stands in the way of measuring, `note` may make it worse; both have a way out."""

    level: Literal["ok", "note", "bad"]
    subject: str
    message: str
    way_out: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What a machine does besides measuring, read once."""

    governors: tuple[str, ...]
    swap_used_bytes: int
    available_bytes: int
    free_disk_bytes: int
    before: Counters
    after: Counters
    busiest: tuple[str, ...]
    openmp_threads: str | None
    peak_resets: bool


def examine() -> list[Check]:
    """All checks of this machine; takes about a second, in which other load is watched."""
    machine = fingerprint.read_machine()
    found = [*machine_checks(machine), *engine_checks(on_gpu=bool(machine.gpus))]
    if machine.gpus:
        found += [*library_checks(machine, fingerprint.read_versions()), *gpu_checks(nvml.open_driver())]
    return [*found, *disturbance_checks(machine, read_surroundings())]


def format_examination(checks: Sequence[Check]) -> str:
    """The checks as lines for people."""
    words = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    lines = []
    for check in checks:
        lines.append(f"{words[check.level]}  {check.subject}: {check.message}")
        if check.way_out:
            lines.append(f"      -> {check.way_out}")
    return "\n".join(lines)


def machine_checks(machine: Machine) -> Iterator[Check]:
    """What the machine is, and what will be measured on it by default."""
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB"
    yield Check(
        "ok", "machine", f"{machine.cpu_model}, {machine.usable_cores} cores to use, {memory}, {machine.system}"
    )
    cuda = f", CUDA {machine.gpu_cuda}" if machine.gpu_cuda else ""
    for gpu in machine.gpus:
        yield Check("ok", "GPU", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, driver {machine.gpu_driver}{cuda}")
    if not machine.gpus:
        yield Check("ok", "GPU", "none answers: cells run on the CPU")
    preset = default_preset(machine.gpus)
    threads = fingerprint.default_threads(machine)
    yield Check("ok", "default run", f"preset {preset} ({PRESETS[preset].summary}), {threads} threads for every engine")


def library_checks(machine: Machine, versions: Mapping[str, str]) -> Iterator[Check]:
    """Which of the libraries that Flow needs on a GPU are installed, and which wheel brings what is missing."""
    major = (machine.gpu_driver or "").partition(".")[0]
    cuda = "12" if major.isdecimal() and int(major) < _CUDA_13_DRIVER else "13"
    for title, package in (("CuPy", "cupy-cuda{}x"), ("cuDNN", "nvidia-cudnn-cu{}"), ("NCCL", "nvidia-nccl-cu{}")):
        names = [package.format(cuda), package.format("12"), package.format("13")]
        there = next((name for name in names if name in versions), None)
        if there:
            yield Check("ok", title, f"{versions[there]} ({there})")
        else:
            yield Check("note", title, "not found among the installed packages; Flow needs it on this GPU",
                        f"python -m pip install {names[0]} (or 'flowbench[cuda{cuda}]', which has all)")  # fmt: skip


def gpu_checks(driver: nvml.Driver | str) -> Iterator[Check]:
    """How the GPUs run now, and who is on them."""
    if isinstance(driver, str):
        yield Check("note", "GPU", f"its clocks and other processes on it cannot be watched: {driver}", nvml.INSTALL)
        return
    for gpu in range(len(driver)):
        reading, holders, busy_percent = driver.read(gpu), driver.holders(gpu), driver.busy_percent(gpu)
        figures = [
            f"{figure:.0f} {unit}"
            for figure, unit in (
                (reading.sm_clock_mhz, "MHz SM"),
                (reading.memory_clock_mhz, "MHz memory"),
                (reading.temperature_c, "°C"),
                (reading.power_w, "W"),
            )
            if figure is not None
        ]
        yield Check(
            "ok", f"GPU {gpu}", ", ".join(figures) or "the driver tells nothing of clocks, temperature or power"
        )
        if reading.slowed_by:
            yield Check(
                "note", f"GPU {gpu}", f"slowed down by {', '.join(reading.slowed_by)}", "cool it, or raise its limit"
            )
        if holders.processes or (busy_percent or 0) > _BUSY_PERCENT:
            who = ", ".join(f"process {pid}" for pid in sorted(holders.processes)) or "nobody that the driver lists"
            busy = "" if busy_percent is None else f"; it is busy {busy_percent} % of the time"
            yield Check("note", f"GPU {gpu}", f"others use it: {who}{busy}", "end them, or wait")


def engine_checks(on_gpu: bool = False) -> Iterator[Check]:
    """Which engines are there, which are not and why, and what would make one faster; `on_gpu` also where a GPU is."""
    usable = []
    for name, message in skipped_engines().items():
        yield Check("note", f"engine {name}", message)
    for name in engine_names():
        try:
            engine = load_engine(name)
            reason = ask(engine, "unavailable")
            if reason is not None:
                yield Check("note", f"engine {name}", f"not usable: {reason}")
                continue
            usable.append(name)
            yield Check("ok", f"engine {name}", f"shown as {engine.display_name}")
            for question in ("advice", "gpu_refusal") if on_gpu else ("advice",):
                answer = ask(engine, question)
                if answer is not None:
                    yield Check("note", f"engine {name}", answer)
        except FlowbenchError as error:
            yield Check("note", f"engine {name}", str(error), "mend or remove the package that brings it")
    if not usable:
        yield Check("bad", "engines", "none is usable: nothing can be measured", "install one of the above")
    elif REFERENCE not in usable:
        yield Check(
            "note",
            "reference",
            f"{REFERENCE} is missing: times and memory, but no ratio",
            "python -m pip install torch",
        )


def read_surroundings() -> Surroundings:
    """Watch the machine for a second."""
    processes = [process for process in psutil.process_iter() if process.pid != os.getpid()]
    for process in processes:
        _cpu_share(process)  # the first reading only starts the count
    before = read_counters()
    time.sleep(_WATCH_S)
    after = read_counters()
    shares = sorted(((_cpu_share(process), process) for process in processes), key=lambda pair: -pair[0])
    meter = ResidentMeter()
    meter.reset()
    return Surroundings(
        governors=tuple(sorted({path.read_text().strip() for path in _governor_files()})),
        swap_used_bytes=psutil.swap_memory().used,
        available_bytes=psutil.virtual_memory().available,
        free_disk_bytes=shutil.disk_usage(Path.cwd()).free,
        before=before,
        after=after,
        busiest=tuple(_name(process) for share, process in shares[:3] if share > 5),
        openmp_threads=os.environ.get("OMP_NUM_THREADS"),
        peak_resets=meter.resets,
    )


def disturbance_checks(machine: Machine, around: Surroundings) -> Iterator[Check]:
    """What makes measurements worse here."""
    yield _load_check(machine, around)
    yield _governor_check(around)
    wall_s = around.after.wall_s - around.before.wall_s
    stolen = (around.after.stolen_s - around.before.stolen_s) / wall_s
    if stolen > STEAL_SHARE * machine.usable_cores:
        yield Check("note", "hypervisor", f"{stolen:.2f} cores are given to other guests", "use a machine of one's own")
    if around.swap_used_bytes:
        used = f"{around.swap_used_bytes / 2**20:.0f} MiB are swapped out"
        yield Check(
            "note", "swap", used, "end what fills the memory, or swapoff -a: a step that waits for a disk shows nothing"
        )
    if around.available_bytes < _LOW_MEMORY_BYTES:
        free = f"{around.available_bytes / 2**30:.1f} GiB are free, ResNet50 at N = 4 takes 2 to 3"
        yield Check("note", "memory", free, "end what fills it, or take a smaller --batch-size")
    if around.free_disk_bytes < _LOW_DISK_BYTES:
        yield Check(
            "bad", "disk", f"{around.free_disk_bytes / 2**20:.0f} MiB are free here", "free some, or --out elsewhere"
        )
    yield _thread_check(machine, around)
    if not around.peak_resets:
        yield Check("note", "memory peaks", "the system does not let them be reset: they include building and warm-up",
                    "allow writing to /proc/self/clear_refs (Linux)")  # fmt: skip


def _load_check(machine: Machine, around: Surroundings) -> Check:
    before, after = around.before, around.after
    others = (after.busy_s - before.busy_s - (after.ours_s - before.ours_s)) / (after.wall_s - before.wall_s)
    if others <= BUSY_SHARE * machine.usable_cores:
        return Check("ok", "other load", "none to speak of")
    who = f" ({', '.join(around.busiest)})" if around.busiest else ""
    return Check(
        "note",
        "other load",
        f"other processes use {others:.1f} of {machine.usable_cores} cores{who}",
        "end them, or wait; ratios of interleaved pairs bear it better than times, and on the CPU steps of several threads"
        f" that others hold up can take many times as long: {SPIN_LESS}",
    )


def _governor_check(around: Surroundings) -> Check:
    if not around.governors:
        return Check("ok", "frequency scaling", "not controlled from here (a virtual machine, or no such driver)")
    if around.governors == ("performance",):
        return Check("ok", "frequency scaling", "governor performance")
    way_out = "sudo cpupower frequency-set -g performance"
    return Check(
        "note", "frequency scaling", f"governor {', '.join(around.governors)}: clocks follow the load", way_out
    )


def _thread_check(machine: Machine, around: Surroundings) -> Check:
    given = around.openmp_threads
    if given is not None and given.isdigit() and int(given) > machine.usable_cores:
        text = f"OMP_NUM_THREADS={given}, but {machine.usable_cores} cores may be used"
        return Check("note", "threads", text, "unset it (runs of flowbench set it to --threads themselves)")
    if machine.usable_cores < machine.logical_cores:
        text = f"{machine.usable_cores} of {machine.logical_cores} cores may be used (affinity or a container's quota)"
        return Check(
            "note", "threads", text, "give the container all cores; more threads than cores wait for each other"
        )
    if machine.logical_cores > machine.physical_cores:
        text = (
            f"{machine.logical_cores} hardware threads on {machine.physical_cores} cores: one thread per core is used"
        )
        return Check("ok", "threads", text)
    return Check("ok", "threads", f"one per core, {machine.physical_cores}")


def _governor_files() -> list[Path]:
    return sorted(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))


def _cpu_share(process: psutil.Process) -> float:
    try:
        return process.cpu_percent()
    except psutil.Error:
        return 0.0  # it ended, or is another user's


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} {process.pid}"
    except psutil.Error:
        return f"process {process.pid}"
