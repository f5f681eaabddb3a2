"""From what was asked to what will be measured: the cells, the protocol, and what is left out with the reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import flowbench
from flowbench.cell import Case, Cell, Count, Device
from flowbench.codec import CodecError
from flowbench.engine import Engine
from flowbench.engine_registry import ask, device_refusal, load_engine, skipped_engines
from flowbench.errors import FlowbenchError
from flowbench.measure.launchers import find_launcher
from flowbench.measure.schedule import ORDER
from flowbench.presets import Preset, RankGrid, default_preset, find_preset
from flowbench.record import machine as fingerprint
from flowbench.record.quantities import Index, Seconds
from flowbench.record.run import Ending, Finding, Machine, NotMeasured, Protocol, RunDocument
from flowbench.record.run import Engine as EngineRecord
from flowbench.record.store import new_run_id
from flowbench.workload import losses
from flowbench.workload.data import BATCHES
from flowbench.workload.models import check_input, describe_model, last_norm_values

# Given as the reference: measure the engines asked for and compare with nothing.
NO_REFERENCE = "none"

# Batch norm over fewer values magnifies differences of rounding until losses of equal training part.
_FEW_VALUES = 8


@dataclass(frozen=True)
class Request:
    """What a user asks for; None or empty takes the preset's (or the machine's) value, or the resumed document's."""

    preset: str | None = None
    engines: tuple[str, ...] = ()
    reference: str | None = None
    models: tuple[str, ...] = ()
    batch_sizes: tuple[Count, ...] = ()
    image_shape: tuple[Count, Count, Count] | None = None
    steps: Count | None = None
    warmup: Index | None = None
    pairs: Count | None = None
    threads: Count | None = None
    seed: Index | None = None
    timeout_s: Seconds | None = None
    wall_cap_s: Seconds | None = None
    device: Device | None = None
    gpu_memory_limit_bytes: Count | None = None
    world_sizes: tuple[Count, ...] = ()
    ddp: bool | None = None
    broadcast_buffers: bool | None = None
    launcher: str | None = None
    launcher_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.image_shape is not None and len(self.image_shape) != 3:
            raise CodecError("$.image_shape", f"{len(self.image_shape)} numbers", "three: channels, height, width")


def plan_run(request: Request, command: Sequence[str]) -> RunDocument:
    """The document of a sitting before its first sample; raises FlowbenchError for what cannot be measured at all."""
    machine = fingerprint.read_machine()
    name = request.preset or default_preset(machine.gpus if request.device != "cpu" else ())
    preset = _with_request(find_preset(name), request, machine)
    threads = request.threads or fingerprint.default_threads(machine)
    _check_size(preset, machine, request.launcher)
    engines, not_measured = _available(preset)
    cells = []
    for cell in preset.cells(threads, shared=request.threads is None):
        if cell.engine not in engines:
            continue
        engine = engines[cell.engine]
        reason = (
            device_refusal(engine, cell.device)
            or why_not(engine, "unsupported", cell.case)
            or _too_many_ranks(cell, machine, request.launcher)
        )
        if reason is not None:
            not_measured.append(NotMeasured(cell.label, reason))
        else:
            cells.append(cell)
    if not cells:
        reasons = "; ".join(f"{left_out.what}: {left_out.reason}" for left_out in not_measured)
        raise FlowbenchError(f"nothing can be measured here: {reasons}")
    if request.launcher is not None:
        _check_launcher(request.launcher, cells)
    elif request.launcher_options:
        raise FlowbenchError(
            f"--launcher-option {request.launcher_options[0]} is for --launcher, which is not given: name torchrun, mpirun or"
            " srun, or leave it out"
        )
    created, here = datetime.now(UTC), Path(flowbench.__file__).parent
    git = fingerprint.read_git(here)
    unknown = fingerprint.why_no_commit(here) if git is None else None
    return RunDocument(
        run_id=new_run_id(created),
        created=created.isoformat(timespec="seconds"),
        flowbench_version=flowbench.__version__,
        command=tuple(word.encode(errors="replace").decode() for word in command),
        preset=name,
        reference=preset.reference if preset.reference in engines else None,
        engines=tuple(
            EngineRecord(engine_name, engine.display_name, engine.library, None)
            for engine_name, engine in engines.items()
        ),
        protocol=_protocol(preset, request, threads),
        git=git,
        machine=machine,
        versions=fingerprint.read_versions(),
        cells=tuple(cells),
        samples=(),
        findings=tuple(_notes(cells, machine, unknown)),
        not_measured=tuple(not_measured),
        ending=Ending("running", None, None),
    )


def _check_launcher(launcher: str, cells: Sequence[Cell]) -> None:
    """Refuse a launcher that is not installed, or that would start nothing."""
    if not any(cell.ddp for cell in cells):
        raise FlowbenchError(
            f"--launcher {launcher} starts ranks that train together, and no cell here has any: give --world-size or --ddp, or"
            " leave --launcher out"
        )
    find_launcher(launcher)


def _device(preset: Preset, request: Request, machine: Machine) -> Device:
    """Where it is measured: as asked for, as the preset has it, else on a GPU where there is one."""
    device = request.device or preset.device or ("cuda" if machine.gpus else "cpu")
    if device == "cuda" and not machine.gpus:
        raise FlowbenchError(
            "device cuda was asked for, but no GPU answers here (nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides it): "
            "take --device cpu, and a preset for it (smoke, cpu, seed, full)"
        )
    if device == "cpu" and request.gpu_memory_limit_bytes is not None:
        raise FlowbenchError("a limit of GPU memory was given, but this runs on the CPU: leave one of the two out")
    return device


def _with_request(preset: Preset, request: Request, machine: Machine) -> Preset:
    reference = _reference(preset, request)
    engines = request.engines or preset.engines
    if reference and (request.engines or request.reference):
        engines = (*(engine for engine in dict.fromkeys(engines) if engine != reference), reference)
    return dataclasses.replace(
        preset,
        engines=tuple(dict.fromkeys(engines)),
        reference=reference,
        models=tuple(dict.fromkeys(request.models)) or preset.models,
        image_shapes=(request.image_shape,) if request.image_shape else preset.image_shapes,
        batch_sizes=tuple(dict.fromkeys(request.batch_sizes)) or preset.batch_sizes,
        steps=request.steps or preset.steps,
        warmup=preset.warmup if request.warmup is None else request.warmup,
        pairs=request.pairs or preset.pairs,
        device=_device(preset, request, machine),
        world_sizes=tuple(dict.fromkeys(request.world_sizes)) or preset.world_sizes,
        ddp=preset.ddp if request.ddp is None else request.ddp,
        broadcast_buffers=preset.broadcast_buffers if request.broadcast_buffers is None else request.broadcast_buffers,
        rank_grids=_rank_grids(preset, request),
    )


def _reference(preset: Preset, request: Request) -> str | None:
    return None if request.reference == NO_REFERENCE else request.reference or preset.reference


def _rank_grids(preset: Preset, request: Request) -> tuple[RankGrid, ...]:
    """The preset's, unless another grid was asked for; by the engines asked for, if any."""
    if request.world_sizes or request.models or request.batch_sizes or request.image_shape or request.ddp is not None:
        return ()
    if not request.engines and not request.reference:
        return preset.rank_grids
    reference = _reference(preset, request)
    engines = tuple(dict.fromkeys([*(request.engines or preset.engines), *([reference] if reference else [])]))
    return tuple(dataclasses.replace(grid, engines=engines) for grid in preset.rank_grids)


def _too_many_ranks(cell: Cell, machine: Machine, launcher: str | None) -> str | None:
    """Why a cell has more ranks than can be started here; None where it has not. A launcher may know other machines."""
    if launcher is None and cell.device == "cuda" and cell.world_size > len(machine.gpus):
        have = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) != 1)}"
        return f"{cell.world_size} ranks need a GPU each, this machine has {have}: --launcher reaches several machines"
    return None


def _available(preset: Preset) -> tuple[dict[str, Engine], list[NotMeasured]]:
    engines: dict[str, Engine] = {}
    not_measured = []
    for name in preset.all_engines:
        engine = load_engine(name)
        reason = why_not(engine, "unavailable")
        if reason is None:
            engines[name] = engine
        elif name == preset.reference:
            not_measured.append(NotMeasured(name, f"{reason}; without it there is no reference, and no ratio"))
        else:
            not_measured.append(NotMeasured(name, reason))
    return engines, not_measured


def why_not(engine: Engine, question: Literal["unavailable", "unsupported"], *about: Case) -> str | None:
    """The engine's answer; where it has none, that it has none is the reason."""
    try:
        return ask(engine, question, *about)
    except FlowbenchError as error:
        return str(error)


def _notes(cells: Sequence[Cell], machine: Machine, no_commit: str | None) -> Iterator[Finding]:
    """What is known before anything is measured and may spoil it; `no_commit` is why the commit is not known, if it is not."""
    if no_commit is not None:
        yield Finding("commit", f"the commit that is measured is not known: {no_commit}", None, None)
    skipped = skipped_engines()
    for name in dict.fromkeys(cell.engine for cell in cells):
        if name in skipped:
            yield Finding("engine", skipped[name], None, None)
    threads = max(cell.threads * (1 if cell.device == "cuda" else cell.world_size) for cell in cells)
    if threads > machine.logical_cores:
        message = (
            f"{threads} threads on {machine.logical_cores} logical cores wait for each other: take fewer --threads"
        )
        yield Finding("threads", message, None, None)
    for case in dict.fromkeys(cell.case for cell in cells):
        values = last_norm_values(case.model, case.input_shape)
        if values is not None and values < _FEW_VALUES:
            message = (
                f"{case.label}: its last batch norm sees {values} values per channel, fewer than {_FEW_VALUES}: losses are "
                "chaotic there, and cells may be void for numerical reasons alone; take larger images or a larger batch"
            )
            yield Finding("few values", message, None, None)


def _protocol(preset: Preset, request: Request, threads: int) -> Protocol:
    return Protocol(
        steps=preset.steps,
        warmup=preset.warmup,
        pairs=preset.pairs,
        threads=threads,
        order=ORDER,
        seed=request.seed or 0,
        learning_rate=losses.LEARNING_RATE,
        momentum=losses.MOMENTUM,
        loss_tolerance=losses.GPU_TOLERANCE if preset.device == "cuda" else losses.TOLERANCE,
        timeout_s=request.timeout_s,
        wall_cap_s=request.wall_cap_s or (None if request.pairs else preset.wall_cap_s),
        gpu_memory_limit_bytes=request.gpu_memory_limit_bytes,
        launcher=request.launcher,
        launcher_options=request.launcher_options,
    )


def _check_size(preset: Preset, machine: Machine, launcher: str | None) -> None:
    """Refuse what cannot fit before anything is started: the rest shows when it runs."""
    any_cell: Cell
    for any_cell in preset.cells(threads=1):
        check_input(any_cell.model, any_cell.input_shape)
        model = describe_model(any_cell.model, any_cell.input_shape[1:])
        values = BATCHES * math.prod(any_cell.input_shape) + sum(math.prod(entry.shape) for entry in model.parameters)
        nbytes = values * 4 * (1 if launcher else any_cell.world_size)
        if nbytes > machine.memory_bytes:
            raise FlowbenchError(
                f"{any_cell.case.label}: its batches and weights alone need {nbytes / 2**30:,.0f} GiB, this machine "
                f"has {machine.memory_bytes / 2**30:,.0f} GiB: take a smaller batch size or input shape"
            )
