"""The run document's records: what one sitting measured, on what, and what it could not measure. Typed, frozen, pure."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from flowbench.cell import Case, Cell, Count, Name
from flowbench.codec import CodecError, Limit, describe
from flowbench.record.gpu import Gpu
from flowbench.record.profile import Profile
from flowbench.record.quantities import Bytes, Index, Moment, Seconds, Text
from flowbench.record.sample import Sample


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
    (`ENGINE/CASE`), how large a change the same commit has shown against itself on this machine, `sitting_shifts` how far such
    sittings were off beyond what their intervals tell; in `aa_alarms` of `aa_sittings` it was judged to have changed.
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
    sitting_shifts: dict[str, Annotated[float, Limit(minimum=0, maximum=10)]] = field(default_factory=dict)

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

    def differences(self, other: Machine) -> list[str]:
        """The fields in which two machines differ, each as `name: own / other's`."""
        return [
            f"{field.name}: {getattr(self, field.name)} / {getattr(other, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]


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
    finished: Moment | None
    reason: Text | None


@dataclass(frozen=True)
class RunDocument:
    """One sitting. Samples refer to their cell by its key."""

    run_id: Name
    created: Moment
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

        plan, pairs = self.comparison, self.protocol.pairs
        if plan is not None and plan.confirmation_pairs >= pairs:
            raise CodecError(
                "$.comparison.confirmation_pairs",
                str(plan.confirmation_pairs),
                f"less than the protocol's {pairs} pairs",
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
        # A world size may say anything: nothing is made of that size.
        if sample.status != "failed" and (len(ranks) != cell.world_size or ranks != list(range(len(ranks)))):
            raise CodecError(f"{path}.ranks", f"ranks {ranks}"[:80], f"ranks 0 to {cell.world_size - 1} in order")
        protocol = self.protocol
        if sample.pair >= protocol.pairs:
            raise CodecError(f"{path}.pair", str(sample.pair), f"less than the protocol's {protocol.pairs} pairs")
        for index, rank in enumerate(sample.ranks):
            for name, most in (("warmup_ms", protocol.warmup), ("steps_ms", protocol.steps)):
                times = len(getattr(rank, name))
                if times > most:
                    raise CodecError(
                        f"{path}.ranks[{index}].{name}", f"{times} times", f"at most the protocol's {most} steps"
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

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        """The cases in the order of the cells, each once."""
        return tuple(dict.fromkeys(cell.case for cell in self.cells))

    @functools.cached_property
    def labels(self) -> Mapping[str, int]:
        """The labels of the cases, with how many share each."""
        return Counter(case.label for case in self.cases)

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
