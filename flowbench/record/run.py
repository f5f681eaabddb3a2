"""The run document's records: what one sitting measured, on what, and what it could not measure. Typed, frozen, pure."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from flowbench.cell import Case, Cell, Count, Name
from flowbench.record.codec import CodecError, Limit, describe
from flowbench.record.gpu import Gpu, GpuConditions, GpuUse
from flowbench.record.profile import Profile

# A step of less than a nanosecond or of more than eleven days was not measured: the clock or the file is wrong.
Milliseconds = Annotated[float, Limit(above=0, minimum=1e-6, maximum=1e9)]
Seconds = Annotated[float, Limit(above=0)]
Bytes = Annotated[int, Limit(minimum=0)]
Index = Annotated[int, Limit(minimum=0)]
Text = Annotated[str, Limit(max_length=20_000)]


@dataclass(frozen=True)
class Engine:
    """An engine of this sitting: its registered name, the name shown to people, its library and (once loaded) version."""

    name: Name
    display_name: Name
    library: Name
    version: Name | None
    side: Name | None = None

    @property
    def registered_name(self) -> str:
        """Its name without the side of a comparison that it stands for: `NAME@SIDE`."""
        return self.name.removesuffix(f"@{self.side}") if self.side else self.name


@dataclass(frozen=True)
class Protocol:
    """How it was measured: equal for all cells.

    With `steps_per_turn` all engines of a round are alive together and take turns of so many timed steps, each after
    `untimed_per_turn` steps that do not count.
    """

    steps: Count
    warmup: Index
    pairs: Count
    threads: Count
    order: Name
    seed: Index
    learning_rate: float
    momentum: float
    loss_tolerance: float
    timeout_s: Seconds | None
    wall_cap_s: Seconds | None
    gpu_memory_limit_bytes: Annotated[int, Limit(minimum=1)] | None = None
    steps_per_turn: Count | None = None
    launcher: Name | None = None
    launcher_options: tuple[Text, ...] = ()
    untimed_per_turn: Index = 0


@dataclass(frozen=True)
class Git:
    """The commit of the working tree that was measured; where files differ from it, a digest of the differences."""

    commit: Name
    branch: Name | None
    dirty: bool
    changes: Name | None = None


@dataclass(frozen=True)
class Side:
    """One side of a comparison: what was asked for (a git ref, `working tree`), and the commit that it was."""

    asked: Name
    git: Git | None


@dataclass(frozen=True)
class SidesCompared:
    """What makes a sitting a comparison of two sides, each measured as an engine of its own (`NAME@base`, `NAME@head`).

    Rounds from `protocol.pairs - confirmation_pairs` on confirm what the rounds before them showed. Sampling of a case ends
    before that when all its intervals are narrow: `stopped` says why it ended, by case. `noise_floors` has, by engine and case
    (`ENGINE/CASE`), how large a change the same commit has shown against itself on this machine; in `aa_alarms` of
    `aa_sittings` such sittings it was judged to have changed.
    """

    base: Side
    head: Side
    least_margin: Annotated[float, Limit(minimum=0, maximum=1)]
    least_pairs: Count
    confirmation_pairs: Index
    noise_floors: dict[str, Annotated[float, Limit(minimum=0, maximum=10)]]
    stopped: dict[str, Text]
    aa_sittings: Index = 0
    aa_alarms: Index = 0

    def __post_init__(self) -> None:
        if self.aa_alarms > self.aa_sittings:
            raise CodecError("$.aa_alarms", str(self.aa_alarms), f"at most the {self.aa_sittings} sittings")


@dataclass(frozen=True)
class Machine:
    """What makes two machines alike for a measurement. No present clock speeds: they change on the same box.

    `gpus` are those that may be used here; `gpu_cuda` is the newest CUDA that their driver runs.
    """

    cpu_model: Name
    architecture: Name
    physical_cores: Count
    logical_cores: Count
    usable_cores: Count
    memory_bytes: Bytes
    gpus: tuple[Gpu, ...]
    gpu_driver: Name | None
    system: Name
    python: Name
    gpu_cuda: Name | None = None


@dataclass(frozen=True)
class Memory:
    """Peaks of one rank in bytes: of the engine's allocator (null where it has none) and of its process tree.

    `resident_before_bytes` was held just before the model was built: interpreter, libraries, data. `gpu_uses` is what the
    driver says the process held on each GPU; `gpu_uses_how` says how it was found there, or why not.
    """

    allocated_peak_bytes: Bytes | None
    reserved_peak_bytes: Bytes | None
    resident_peak_bytes: Bytes
    resident_before_bytes: Bytes
    gpu_uses: tuple[GpuUse, ...] = ()
    gpu_uses_how: Text | None = None

    @property
    def gpu_used_bytes(self) -> int | None:
        """What the process held on all GPUs, as the driver says; None where that is not known."""
        return sum(use.held_bytes for use in self.gpu_uses) if self.gpu_uses else None

    @property
    def resident_above_bytes(self) -> int:
        """Peak resident memory above what was held before the model was built."""
        return max(0, self.resident_peak_bytes - self.resident_before_bytes)


@dataclass(frozen=True)
class RankSample:
    """What one rank of one process group measured; times in ms, in the order of the steps, device synchronised.

    `losses` has one entry per step, warm-up first, untimed ones too; null where the loss was not finite. Where steps were
    timed by events on the device, `host_ms` has the times until the call that issued a step returned, of a few further steps
    that each found the device idle.
    """

    rank: Index
    threads: Count
    device: Name
    warmup_ms: tuple[Milliseconds, ...]
    steps_ms: tuple[Milliseconds, ...]
    losses: tuple[float | None, ...]
    memory: Memory
    host_ms: Annotated[tuple[Milliseconds, ...], Limit(max_length=1000)] | None = None


@dataclass(frozen=True)
class Sample:
    """One fresh process group of one cell. `pair` counts the rounds, `position` the place within the round's order.

    `ok` has all ranks; `failed` raised, hung or died; `void` ran, but its losses differ from the reference's.
    """

    cell: Text
    pair: Index
    position: Index
    started: Name
    wall_s: Annotated[float, Limit(minimum=0)]
    status: Literal["ok", "failed", "void"]
    error: Text | None
    loss_difference: Annotated[float, Limit(minimum=0)] | None
    ranks: tuple[RankSample, ...]
    gpus: tuple[GpuConditions, ...] = ()

    def __post_init__(self) -> None:
        if (self.error is None) != (self.status == "ok"):
            raise CodecError(
                "$.error",
                repr(self.error),
                f"{'null' if self.status == 'ok' else 'a reason'} for status {self.status!r}",
            )
        if self.status != "failed" and not self.ranks:
            raise CodecError("$.ranks", "no rank", f"at least one for status {self.status!r}")
        counts = {len(rank.steps_ms) for rank in self.ranks}
        if len(counts) > 1 or 0 in counts:
            raise CodecError("$.ranks", f"{sorted(counts)} step times", "the same number in all ranks, at least one")

    @functools.cached_property
    def steps_ms(self) -> tuple[float, ...]:
        """Each step's time: its slowest rank's."""
        return tuple(max(times) for times in zip(*(rank.steps_ms for rank in self.ranks), strict=True))


# The kind of a finding that says that the sitting was gone on with after a pause.
RESUMED = "resumed"


@dataclass(frozen=True)
class Finding:
    """Something that disturbed the measurement: another load, swapping, a number of threads that did not take."""

    kind: Name
    message: Text
    cell: Text | None
    pair: Index | None


@dataclass(frozen=True)
class NotMeasured:
    """What was left out, and why."""

    what: Text
    reason: Text


@dataclass(frozen=True)
class Ending:
    """How the sitting ended. `running` in a file means that it was killed before it could say."""

    how: Literal["running", "complete", "interrupted", "wall_cap"]
    finished: Name | None
    reason: Text | None


@dataclass(frozen=True)
class RunDocument:
    """One sitting. Samples refer to their cell by its key."""

    run_id: Name
    created: Name
    flowbench_version: Name
    command: tuple[Text, ...]
    preset: Name | None
    reference: Name | None
    engines: tuple[Engine, ...]
    protocol: Protocol
    git: Git | None
    machine: Machine
    versions: dict[str, Name]
    cells: tuple[Cell, ...]
    samples: tuple[Sample, ...]
    findings: tuple[Finding, ...]
    not_measured: tuple[NotMeasured, ...]
    ending: Ending
    profiles: tuple[Profile, ...] = ()
    comparison: SidesCompared | None = None

    def __post_init__(self) -> None:
        keys = [cell.key for cell in self.cells]
        _unique("$.cells", keys)
        _unique("$.engines", [engine.name for engine in self.engines])
        _unique("$.samples", [f"{sample.cell}, pair {sample.pair}" for sample in self.samples])
        known = {engine.name for engine in self.engines}
        for index, cell in enumerate(self.cells):
            if cell.engine not in known:
                raise CodecError(f"$.cells[{index}].engine", repr(cell.engine), "an engine of this document")
        if self.reference is not None and self.reference not in known:
            raise CodecError("$.reference", repr(self.reference), "an engine of this document")
        for index, sample in enumerate(self.samples):
            self._check_sample(sample, f"$.samples[{index}]")
        for index, finding in enumerate(self.findings):
            if finding.cell is not None and finding.cell not in self.by_key:
                raise CodecError(
                    f"$.findings[{index}].cell", describe(finding.cell), "the key of a cell of this document"
                )

        _unique("$.profiles", [profile.cell for profile in self.profiles])
        for index, profile in enumerate(self.profiles):
            if profile.cell not in self.by_key:
                raise CodecError(
                    f"$.profiles[{index}].cell", describe(profile.cell), "the key of a cell of this document"
                )

    def _check_sample(self, sample: Sample, path: str) -> None:
        cell = self.by_key.get(sample.cell)
        if cell is None:
            raise CodecError(f"{path}.cell", describe(sample.cell), "the key of a cell of this document")
        ranks = [rank.rank for rank in sample.ranks]
        if sample.status != "failed" and ranks != list(range(cell.world_size)):
            raise CodecError(f"{path}.ranks", f"ranks {ranks}", f"ranks 0 to {cell.world_size - 1} in order")
        protocol = self.protocol
        if sample.pair >= protocol.pairs:
            raise CodecError(f"{path}.pair", str(sample.pair), f"less than the protocol's {protocol.pairs} pairs")
        for index, rank in enumerate(sample.ranks):
            for field, most in (("warmup_ms", protocol.warmup), ("steps_ms", protocol.steps)):
                times = len(getattr(rank, field))
                if times > most:
                    raise CodecError(
                        f"{path}.ranks[{index}].{field}", f"{times} times", f"at most the protocol's {most} steps"
                    )

    @functools.cached_property
    def by_key(self) -> Mapping[str, Cell]:
        """The cells by their key."""
        return {cell.key: cell for cell in self.cells}

    def profile_of(self, cell: Cell) -> Profile | None:
        """The profile of `cell`; None where there is none."""
        return next((profile for profile in self.profiles if profile.cell == cell.key), None)

    @property
    def on_gpu(self) -> bool:
        """Whether anything of it is measured on a GPU."""
        return any(cell.device == "cuda" for cell in self.cells)

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases in the order of the cells, each once."""
        return tuple(dict.fromkeys(cell.case for cell in self.cells))

    def cells_of(self, case: Case) -> tuple[Cell, ...]:
        """The cells of `case`, one per engine, in the order of the document."""
        return self._cells_by_case.get(case, ())

    def samples_of(self, cell: Cell) -> tuple[Sample, ...]:
        """The samples of `cell` in the order of the pairs, failed and void ones too."""
        return self._samples_by_cell.get(cell.key, ())

    # Reports ask for every cell's samples several times: by search, 500 cells take the better part of a minute.
    @functools.cached_property
    def _samples_by_cell(self) -> Mapping[str, tuple[Sample, ...]]:
        groups: dict[str, list[Sample]] = {}
        for sample in sorted(self.samples, key=lambda sample: sample.pair):
            groups.setdefault(sample.cell, []).append(sample)
        return {cell: tuple(samples) for cell, samples in groups.items()}

    @functools.cached_property
    def _cells_by_case(self) -> Mapping[Case, tuple[Cell, ...]]:
        groups: dict[Case, list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.case, []).append(cell)
        return {case: tuple(cells) for case, cells in groups.items()}

    def engine(self, name: str) -> Engine:
        """The engine registered as `name`; KeyError where the document has none."""
        return {engine.name: engine for engine in self.engines}[name]


def _unique(path: str, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CodecError(path, f"{describe(twice[0])} twice", "each once")
