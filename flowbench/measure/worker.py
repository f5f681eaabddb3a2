"""One rank of one cell in a process of its own: builds, warms up, waits for the others, times steps, tells the parent.

Started as `python -m flowbench.measure.worker COMMANDS EVENTS` with two inherited file descriptors; or by a launcher without
them, and then it calls its parent.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flowbench.engine import Engine, Task, Training
from flowbench.engine_registry import load_engine
from flowbench.measure.bounding import bounded
from flowbench.measure.clock import time_by_events, time_issue, time_step
from flowbench.measure.gpu_memory import DriverMeter
from flowbench.measure.launchers import call_parent, meet
from flowbench.measure.memory import ResidentMeter
from flowbench.measure.processes import die_with_parent, offer_to_memory_killer
from flowbench.measure.slowdown import slow_down
from flowbench.measure.wire import Event, Job, Phase, RankState, event_line, read_job
from flowbench.record.sample import Memory, RankSample
from flowbench.workload.data import make_batches, make_weights
from flowbench.workload.models import describe_model

# Nothing comes between steps that events time: the parent hears of progress this often at most.
TELL_S = 1.0
# After those, so many further steps show the host's time alone.
HOST_STEPS = 5


def main(commands: int, events: int) -> None:
    """Run the job read from `commands`; whatever the engine raises goes to the parent, then to standard error."""
    for descriptor in (commands, events):
        os.set_inheritable(descriptor, False)  # what the engine starts must not keep the parent waiting
    rank = Rank(commands, events)
    try:
        rank.run()
    except BaseException as error:
        rank.tell(error=_describe(error), origin=_origin(error))
        raise


class Rank:
    """The work of one rank, phase by phase."""

    def __init__(self, commands: int, events: int) -> None:
        self._commands = os.fdopen(commands, "rb", buffering=0)
        self._events = events
        self._phase: Phase = "start"

    def tell(self, **what: object) -> None:
        """Send the parent an event of the present phase."""
        line = event_line(Event(phase=self._phase, **what))  # type: ignore[arg-type]
        while line:
            line = line[os.write(self._events, line) :]

    def run(self) -> None:
        """Do the whole job."""
        job = read_job(self._commands.readline())
        if job.master:
            meet(job.master, os.environ)
        if job.cell.device == "cpu":
            self._stay_on(job.cores)
        self._enter("import")
        engine = load_engine(job.engine)
        meter = ResidentMeter()
        on_gpu = DriverMeter(job.local_rank, job.cell.world_size) if job.cell.device == "cuda" else None
        training, held_before = self._build(job, engine, meter)
        self._enter("warm-up")
        losses: list[float | None] = []
        warmup_ms = self._steps(training, meter, losses, range(min(job.warmup, 1)))
        self._wait()
        if job.cell.device == "cuda" and job.warmup:
            # This thread alone: those that the engine started in its first step, such as PyTorch's for backward, go where they
            # like. What it starts later would stay here too.
            self._stay_on(job.cores[job.local_rank : job.local_rank + 1])
        self._enter("warm-up")
        warmup_ms += self._steps(training, meter, losses, range(1, job.warmup))
        if job.profile:
            self._profile(training, job)
        if job.slowdown:
            slow_down(training, job.slowdown, warmup_ms)
        self._wait()
        self._reset_peaks(training, meter)
        by_events = training.event() is not None
        steps_ms = self._timed_steps(training, meter, losses, job, by_events)
        self._enter("end")
        gpu_uses, how = on_gpu.read() if on_gpu else ((), None)
        memory = Memory(
            training.allocated_peak_bytes(), training.reserved_peak_bytes(), meter.peak(), held_before, gpu_uses, how
        )
        self._check(training, job)
        last = job.warmup + job.steps
        host_ms = [time_issue(training, index) for index in range(last, last + HOST_STEPS)] if by_events else []
        if job.cell.world_size > 1:
            self._tell_state(training, job)
        training.close()
        self.tell(
            result=RankSample(
                rank=job.rank,
                threads=job.cell.threads,
                device=training.device,
                warmup_ms=tuple(warmup_ms),
                steps_ms=tuple(steps_ms),
                host_ms=tuple(host_ms) or None,
                losses=tuple(losses),
                memory=memory,
            )
        )
        self._wait()  # a process that ends gives its memory back, which is work for the device and the host
        self._enter("exit")
        gc.freeze()  # an ending interpreter collects garbage several times: among PyTorch's objects that takes most of a second

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.tell()

    def _stay_on(self, cores: Sequence[int]) -> None:
        """Let this thread, and those that it starts from now on, run on these cores only; none given: wherever it may."""
        if not cores:
            return
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:  # a container's cores can become fewer while a sitting lasts
            self.tell(note=f"it ran on any core, not on {', '.join(map(str, cores))} alone: {error.strerror}")

    def _profile(self, training: Training, job: Job) -> None:
        seen = training.profile(job.warmup)  # in all ranks: they wait for one another within a step
        if seen is not None and job.rank == 0:
            self.tell(profile=bounded(job.cell.key, seen))

    def _wait(self) -> None:
        """Until the parent lets this rank go on: all other ranks wait too, and it is this group's turn."""
        self._enter("barrier")
        if self._commands.readline() != b"go\n":
            raise RuntimeError("the parent went away while this rank waited for its turn")

    def _build(self, job: Job, engine: Engine, meter: ResidentMeter) -> tuple[Training, int]:
        """The training, and what was resident just before its weights were made."""
        engine.load(job.cell.device)
        self.tell(library_version=str(engine.version())[:200])
        self._enter("data")
        cell = job.cell
        batches = make_batches(cell.input_shape, job.seed, job.rank)
        held_before = meter.held()
        task = Task(
            cell=cell,
            weights=make_weights(describe_model(cell.model, cell.input_shape[1:]), job.seed),
            batches=batches,
            learning_rate=job.learning_rate,
            momentum=job.momentum,
            rank=job.rank,
            world_size=cell.world_size,
            local_rank=job.local_rank,
            gpu_memory_limit_bytes=job.gpu_memory_limit_bytes,
        )
        self._wait()  # up to here others of later rounds may have come too: from here on only those of this round are at work
        if job.steps_per_turn:
            self._enter("open")
            engine.open(task)
        self._wait()
        self._enter("build")
        return engine.build(task), held_before

    def _reset_peaks(self, training: Training, meter: ResidentMeter) -> None:
        gc.collect()
        training.reset_peaks()
        meter.reset()
        if not meter.resets:
            self.tell(
                note="the peak of resident memory includes building and warm-up: the system does not let it be reset"
            )

    def _timed_steps(
        self, training: Training, meter: ResidentMeter, losses: list[float | None], job: Job, by_events: bool
    ) -> list[float]:
        """The times of all timed steps, turn by turn."""
        index = job.warmup
        steps_ms: list[float] = []
        while len(steps_ms) < job.steps:
            if steps_ms:
                self._wait()
            self._enter("steps")
            self._steps(training, meter, losses, range(index, index + job.untimed_per_turn))
            index += job.untimed_per_turn
            turn = range(index, index + min(job.steps_per_turn or job.steps, job.steps - len(steps_ms)))
            index = turn.stop
            steps_ms += (self._steps_by_events if by_events else self._steps)(training, meter, losses, turn)
        return steps_ms

    def _steps(
        self, training: Training, meter: ResidentMeter, losses: list[float | None], steps: Sequence[int]
    ) -> list[float]:
        """Time each step; what is not the step (the loss, the memory, the message) comes between the timed parts."""
        times_ms = []
        for index in steps:
            times_ms.append(time_step(training, index))
            losses.append(_finite(training.loss()))
            meter.sample()
            self.tell(step=index)
        return times_ms

    def _steps_by_events(
        self, training: Training, meter: ResidentMeter, losses: list[float | None], steps: Sequence[int]
    ) -> list[float]:
        """Time the steps on the device, with nothing between them; losses are read afterwards."""
        pending = []
        told = time.monotonic()

        def issued(index: int) -> None:
            nonlocal told
            pending.append(training.later_loss())
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                self.tell(step=index)

        times_ms = time_by_events(training, steps, issued)
        losses += [_finite(loss()) for loss in pending]
        meter.sample()
        self.tell(step=steps[-1])
        return times_ms

    def _tell_state(self, training: Training, job: Job) -> None:
        """What the parent compares between the ranks: they have seen different data, and must hold the same weights."""
        parameters = training.parameters()
        if parameters is None:
            self.tell(note="the engine shows no parameters, so whether the ranks agree is not known")
            return
        digests = {
            name: hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]
            for name, values in parameters.items()
        }
        shared = make_batches(job.cell.input_shape, job.seed, rank=0)[0]
        loss = training.loss_on(shared)
        self.tell(state=RankState(digests, None if loss is None else _finite(loss)))

    def _check(self, training: Training, job: Job) -> None:
        """Raise RuntimeError where the engine did not do what the cell asks for."""
        if training.device.partition(":")[0] != job.cell.device:
            raise RuntimeError(f"the engine trained on {training.device}, the cell asks for {job.cell.device}")
        threads = training.threads()
        if threads is not None and threads != job.cell.threads and job.cell.device == "cpu":
            raise RuntimeError(f"the engine uses {threads} threads, the cell asks for {job.cell.threads}")
        if threads is None and job.cell.device == "cpu":
            self.tell(note="the engine cannot tell how many threads it uses")


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    return f"{type(error).__name__}: {text[:2000]}" if text else type(error).__name__


def _origin(error: BaseException) -> str | None:
    """The line that raised it, as `framework/optim/sgd.py:88`; None for one of the harness's own, whose words say all."""
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(frames[-1].filename) if frames else Path(__file__)
    if path.is_relative_to(Path(__file__).parent):
        return None
    roots = [entry for entry in sys.path if entry and path.is_relative_to(entry)]
    return f"{path.relative_to(max(roots, key=len)) if roots else path}:{frames[-1].lineno}"


if __name__ == "__main__":
    die_with_parent()
    offer_to_memory_killer()
    main(*(map(int, sys.argv[1:]) if sys.argv[1:] else call_parent()))
