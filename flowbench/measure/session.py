"""One sitting: runs the turns of a document that are missing, and writes each sample down before the next is measured."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from flowbench.cell import Case, Cell
from flowbench.engine_registry import load_engine
from flowbench.errors import FlowbenchError
from flowbench.measure.disturbance import (
    UNEVEN_STEPS,
    Counters,
    awakened,
    disturbances,
    read_counters,
    uneven_steps,
)
from flowbench.measure.gpu_memory import foreign_memory
from flowbench.measure.gpus import GpuWatch, gpu_disturbances
from flowbench.measure.guard import Guard
from flowbench.measure.processes import end_marked
from flowbench.measure.rank_group import GroupResult
from flowbench.measure.rounds_ahead import RoundsAhead
from flowbench.measure.schedule import Turn, estimate_s, plan_turns
from flowbench.measure.wire import Job, job_of
from flowbench.nvml import Driver, open_driver
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.gpu import FOREIGN_MEMORY, GpuConditions
from flowbench.record.run import Ending, Engine, Finding, NotMeasured, RunDocument
from flowbench.record.sample import Sample
from flowbench.workload.losses import compare_losses

# How the reason begins of what a sitting did not come to; one that goes on takes it back.
UNREACHED = "the sitting ended before it"

# How the reasons begin of what a cap kept from being measured, and what a machine that was suspended.
CAPPED = "the cap of"
SLEPT = "the machine slept through"


class Watcher(Protocol):
    """Who is told how the sitting goes."""

    def turn(self, turn: Turn, number: int, turns: int, left_s: float) -> None:
        """A turn begins: its number of all, and about how long all that is left will take."""

    def step(self, step: int) -> None:
        """A step, warm-up included, is done."""

    def sample(self, sample: Sample) -> None:
        """A turn has ended."""


def run_session(path: Path, document: RunDocument, watcher: Watcher, found: RunDocument | None = None) -> RunDocument:
    """Measure what is missing in `document`, kept at `path`; returns it with its ending.

    KeyboardInterrupt passes through after all processes are gone and the document says how far it came. `found` is what
    `path` held when `document` was made from it, to be gone on with.
    """
    return Session(path, document, watcher).carry_out(found)


class Session:
    """The state of a sitting: its document, written after each round, and the time it takes."""

    def __init__(self, path: Path, document: RunDocument, watcher: Watcher) -> None:
        self.document = document
        self._path, self._watcher = path, watcher
        self._began = time.monotonic()
        self._estimated_s = self._spent_s = 0.0
        timeout_s, cores = document.protocol.timeout_s, document.machine.usable_cores
        self._ahead = RoundsAhead(self.job, document.run_id, timeout_s, cores)
        # How long a round has waited for its processes to start, and for those of others that started with them.
        self._starting_s: dict[tuple[Case, int], float] = {}
        self._driver: Driver | None = None
        if document.on_gpu:
            self._open_driver()

    def _open_driver(self) -> None:
        driver = open_driver()
        if isinstance(driver, Driver):
            self._driver = driver
            return
        message = f"clocks, throttling and other processes on the GPU are not watched: {driver}"
        if message not in {finding.message for finding in self.document.findings}:
            finding = Finding("GPU not watched", message, None, None)
            self.document = replace(self.document, findings=(*self.document.findings, finding))

    def carry_out(self, found: RunDocument | None = None) -> RunDocument:
        """Run the sitting with its document held and its processes guarded; returns the document with its ending.

        FlowbenchError where its file no longer says what was `found` there: what another process has added would be lost.
        """
        run_id = self.document.run_id
        with store.held(self._path), Guard(run_id):
            if found is not None and read_document(self._path) != found:
                raise FlowbenchError(f"{self._path}: another process has gone on with this run meanwhile: start again")
            try:
                self.run()
            except KeyboardInterrupt:
                self.finish("interrupted", "stopped by the user or the system")
                raise
            finally:
                self._ahead.close()
                end_marked(run_id)
        return self.document

    def run(self) -> None:
        """Measure what is missing, turn by turn, then write the ending."""
        turns = plan_turns(self.document.cells, self.document.protocol.pairs)
        done = {(sample.cell, sample.pair) for sample in self.document.samples}
        missing = [turn for turn in turns if (turn.cell.key, turn.pair) not in done]
        round_of = None
        for index, turn in enumerate(missing):
            if turn.cell.key in given_up(self.document.samples):
                continue
            if round_of != (turn.cell.case, turn.pair) and self.over_wall_cap():
                self.finish("wall_cap", f"{CAPPED} {self.document.protocol.wall_cap_s:g} s was reached")
                return
            round_of = (turn.cell.case, turn.pair)
            self._watcher.turn(turn, index + 1, len(missing), self._left_s(missing[index:]))
            lost = given_up(self.document.samples)
            self.measure([turn], [[later] for later in missing[index + 1 :] if later.cell.key not in lost])
        self.finish("complete", None)

    def finish(self, how: Literal["complete", "interrupted", "wall_cap"], reason: str | None) -> None:
        """Write the ending, and what was not reached."""
        turns = plan_turns(self.document.cells, self.document.protocol.pairs)
        reached = {sample.cell for sample in self.document.samples}
        unreached = dict.fromkeys(turn.cell for turn in turns if turn.cell.key not in reached)
        left_out = tuple(
            NotMeasured(cell.label, f"{UNREACHED}: {self.closed(cell.case) or reason or how}") for cell in unreached
        )
        before = tuple(one for one in self.document.not_measured if not one.reason.startswith(UNREACHED))
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        self.write(not_measured=(*before, *left_out), ending=Ending(how, finished, reason))

    def closed(self, case: Case) -> str | None:
        """Why no more is measured of `case` though the sitting goes on; None where nothing but its end keeps from it."""
        return None

    def measure(self, turns: Sequence[Turn], later: Sequence[Sequence[Turn]] = ()) -> None:
        """Measure turns of one round and case: one alone, or several whose groups take turns step by step.

        `later` are the rounds that are sure to follow, unless something fails: some may be started now.
        """
        first, protocol = turns[0], self.document.protocol
        watch = None
        if self._driver and first.cell.device == "cuda":
            watch = GpuWatch(self._driver, range(first.cell.world_size))
        started, before = datetime.now(UTC).isoformat(timespec="milliseconds"), self._counters()
        taken = self._ahead.take(turns, later)
        ready = self._counters()
        self._starting_s[first.cell.case, first.pair] = ready.wall_s - before.wall_s
        results = taken.run(
            [self._watcher.step, *(lambda step: None for _ in turns[1:])],
            watch.look if watch else lambda phase: None,
            build_together=self._may_build_together(turns),
        )
        after = self._counters()
        gpus = watch.finish() if watch else ()
        wall_s = after.wall_s - before.wall_s
        self._estimated_s += sum(estimate_s(turn.cell, protocol.steps + protocol.warmup) for turn in turns)
        self._spent_s += wall_s
        new = tuple(_sample(turn, result, started, wall_s, gpus) for turn, result in zip(turns, results, strict=True))
        samples = _judged((*self.document.samples, *new), self.document, first)
        findings, engines = self.document.findings, self.document.engines
        left_behind = results[0].left_behind  # of all groups: nobody can tell whose it was
        findings = (*findings, *self._round_findings(first, (before, ready, after), gpus, left_behind))
        for turn, result in zip(turns, results, strict=True):
            findings = (*findings, *self._findings(turn, result))
            engines = _versioned(engines, turn.cell, result.library_version)
        self.write(samples=samples, findings=findings, engines=engines)
        for sample in samples[-len(new) :]:
            self._watcher.sample(sample)

    def _may_build_together(self, turns: Sequence[Turn]) -> bool:
        """Whether their first steps disturb nobody. On a CPU they would fight for its cores; ranks wait for one another."""
        cell = turns[0].cell
        return cell.device == "cuda" and cell.world_size == 1 and not any(map(self._may_tune, turns))

    def _may_tune(self, turn: Turn) -> bool:
        """Whether the turn's engine may time algorithms while it builds."""
        tunes = load_engine(self.document.engine(turn.cell.engine).registered_name).tunes
        return tunes == "always" or (tunes == "once" and not self.document.samples_of(turn.cell))

    def _counters(self) -> Counters:
        """The counters now, where what waits for its round counts as ours too."""
        counters, waiting_s = read_counters(), self._ahead.cpu_s()
        return replace(counters, ours_s=counters.ours_s + waiting_s, waiting_s=waiting_s)

    def job(self, turn: Turn) -> Job:
        """What the ranks of a turn are to do."""
        protocol = self.document.protocol
        return replace(
            job_of(self.document, turn.cell),
            launcher=protocol.launcher if turn.cell.ddp else None,
            launcher_options=protocol.launcher_options,
        )

    def _findings(self, turn: Turn, result: GroupResult) -> Iterable[Finding]:
        known = {(finding.message, finding.cell) for finding in self.document.findings}
        for note in dict.fromkeys(result.notes):
            if (note, turn.cell.key) not in known:
                yield Finding("remark", note, turn.cell.key, turn.pair)
        told = {(finding.kind, finding.cell) for finding in self.document.findings}
        if turn.cell.device == "cpu" and turn.cell.threads > 1 and (UNEVEN_STEPS, turn.cell.key) not in told:
            messages = [message for rank in result.ranks if (message := uneven_steps(rank.steps_ms))]
            yield from (Finding(UNEVEN_STEPS, message, turn.cell.key, turn.pair) for message in messages[:1])
        for rank in result.ranks:
            for message in foreign_memory(rank):
                if (message, turn.cell.key) not in known:
                    yield Finding(FOREIGN_MEMORY, message, turn.cell.key, turn.pair)

    def _round_findings(
        self,
        first: Turn,
        counters: tuple[Counters, Counters, Counters],
        gpus: tuple[GpuConditions, ...],
        left_behind: Iterable[str],
    ) -> Iterable[Finding]:
        """What befell all turns that were measured together: told once, of the first.

        `counters` are those before their processes started, when all were ready, and when they had ended.
        """
        (before, ready, after), cores = counters, self.document.machine.usable_cores
        for kind, message in (*disturbances(before, after, cores), *awakened(ready, after, cores)):
            yield Finding(kind, message, first.cell.key, first.pair)
        known = {finding.message for finding in self.document.findings if finding.pair == first.pair}
        for kind, message in gpu_disturbances(gpus):
            if message not in known:  # a neighbour that stays is told once a round
                yield Finding(kind, message, first.cell.key, first.pair)
        for command in left_behind:
            message = f"the engine left a process running, it was ended: {command[:200]}"
            yield Finding("left behind", message, first.cell.key, first.pair)

    def over_wall_cap(self, share: float = 1.0) -> bool:
        """Whether no further round may begin: `share` of the cap has passed."""
        return self.cap_left_s(share) < 0

    def cap_left_s(self, share: float = 1.0) -> float:
        """What is left of `share` of the cap; infinite without one."""
        return share * (self.document.protocol.wall_cap_s or math.inf) - (time.monotonic() - self._began)

    def _left_s(self, turns: Iterable[Turn]) -> float:
        """The estimate, corrected by how the ones before came out; no round begins after the wall cap."""
        protocol = self.document.protocol
        ratio = self._spent_s / self._estimated_s if self._estimated_s else 1.0
        left_s = ratio * sum(estimate_s(turn.cell, protocol.steps + protocol.warmup) for turn in turns)
        cap_left_s = self.cap_left_s()
        return min(left_s, cap_left_s) if cap_left_s > 0 else left_s

    def write(self, **changes: object) -> None:
        """Write the document's next state."""
        self.document = dataclasses.replace(self.document, **changes)  # type: ignore[arg-type]
        store.replace(self._path, self.document)


def given_up(samples: Iterable[Sample]) -> set[str]:
    """Cells that failed or are void: what happened once is not tried in every round."""
    return {sample.cell for sample in samples if sample.status != "ok"}


def _sample(turn: Turn, result: GroupResult, started: str, wall_s: float, gpus: tuple[GpuConditions, ...]) -> Sample:
    return Sample(
        cell=turn.cell.key,
        pair=turn.pair,
        position=turn.position,
        started=started,
        wall_s=wall_s,
        status="failed" if result.error else "void" if result.disagreement else "ok",
        error=result.error or result.disagreement,
        loss_difference=None,
        ranks=result.ranks,
        gpus=gpus,
    )


def _versioned(engines: tuple[Engine, ...], cell: Cell, version: str | None) -> tuple[Engine, ...]:
    return tuple(
        replace(engine, version=version) if engine.name == cell.engine and version else engine for engine in engines
    )


def _loss_reference(document: RunDocument, cell: Cell) -> str | None:
    """Whose losses count as right: the reference's; without one, those of the base of a comparison."""
    if document.reference is not None:
        return Cell.of(cell.case, document.reference).key
    base = next((engine.name for engine in document.engines if engine.side == "base"), None)
    return base and Cell.of(cell.case, base).key


def _judged(samples: tuple[Sample, ...], document: RunDocument, turn: Turn) -> tuple[Sample, ...]:
    """The samples, with this round's losses compared as soon as the reference's are there."""
    reference = _loss_reference(document, turn.cell)
    round_of = {sample.cell: sample for sample in samples if sample.pair == turn.pair and sample.status == "ok"}
    if reference not in round_of:
        return samples
    theirs = round_of[reference]

    def judge(sample: Sample) -> Sample:
        if sample.cell == reference or sample is not round_of.get(sample.cell) or sample.loss_difference is not None:
            return sample
        if document.by_key[sample.cell].case != turn.cell.case:
            return sample
        for ours, reference_rank in zip(sample.ranks, theirs.ranks, strict=True):
            difference, reason = compare_losses(ours.losses, reference_rank.losses, document.protocol.loss_tolerance)
            sample = replace(sample, loss_difference=max(difference or 0.0, sample.loss_difference or 0.0))
            if reason is not None:
                text = f"{reason}; a wrong result has no speed"
                return replace(sample, status="void", error=text, loss_difference=difference)
        return sample

    return tuple(judge(sample) for sample in samples)
