"""Starts processes of rounds ahead of time, on a machine with cores for it: imports and data take seconds, and no GPU.

They start together while nothing is measured, and sleep until their round. Each is as fresh then as one that was just started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import psutil

from flowbench.measure.memory import free_bytes
from flowbench.measure.ranks import Round, get_ready
from flowbench.measure.schedule import Turn
from flowbench.measure.wire import Job
from flowbench.workload.data import BATCHES
from flowbench.workload.models import describe_model

# What a process holds beside its batches and weights until it opens a GPU; and the share of the free memory for all that were
# started ahead.
_LIBRARIES_BYTES = 2**30
_SHARE_OF_MEMORY = 0.25
# Each has three pipes to us, of the 1024 files that a process may usually open.
_MOST_PROCESSES = 64


class RoundsAhead:
    """The rounds of a sitting, by their turns. `job_of` says what a turn's ranks are to do, `mark` is the sitting's."""

    def __init__(
        self,
        job_of: Callable[[Turn], Job],
        mark: str,
        silence_s: float | None,
        cores: int,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self._job_of, self._mark, self._silence_s = job_of, mark, silence_s
        self._most_processes, self._free_bytes = min(cores, _MOST_PROCESSES), free
        self._rounds: dict[tuple[Turn, ...], Round] = {}
        self._numbers = count()

    def take(self, turns: Sequence[Turn], later: Iterable[Sequence[Turn]] = ()) -> Round:
        """The round of `turns`, to be run next. Where it has not started, it starts now, and some of `later` with it.

        So many that the cores have a process each, and the free memory is enough. What waits and is none of `later` is ended;
        what was killed while it waited starts anew. Where the system lets no process of `turns` start, their results say so.
        """
        to_come = [tuple(one) for one in later]
        for outdated in self._rounds.keys() - {tuple(turns), *to_come}:
            self._rounds.pop(outdated).close()
        if tuple(turns) in self._rounds and not self._rounds[tuple(turns)].waits:
            self._rounds.pop(tuple(turns)).close()
        if tuple(turns) not in self._rounds:
            self._start([tuple(turns), *(one for one in to_come if one not in self._rounds)])
        return self._rounds.pop(tuple(turns))

    def cpu_s(self) -> float:
        """The CPU time so far of all that wait; what has ended counts as a child that was waited for."""
        spent_s = 0.0
        for pid in (pid for started in self._rounds.values() for pid in started.process_ids):
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue  # it died, which its round will tell
            spent_s += times.user + times.system + times.children_user + times.children_system
        return spent_s

    def close(self) -> None:
        """End what waits."""
        while self._rounds:
            self._rounds.popitem()[1].close()

    def _start(self, rounds: Sequence[tuple[Turn, ...]]) -> None:
        waiting = [turn for turns in self._rounds for turn in turns]
        processes, nbytes = sum(turn.cell.world_size for turn in waiting), sum(map(_held_bytes, waiting))
        most_bytes = _SHARE_OF_MEMORY * (self._free_bytes() + nbytes)
        started: list[Round] = []
        for turns in rounds:
            jobs = [self._job_of(turn) for turn in turns]
            nbytes += sum(map(_held_bytes, turns))
            full = processes >= self._most_processes or nbytes > most_bytes
            if started and (full or not all(map(_can_wait, jobs))):
                break
            self._rounds[turns] = Round(jobs, f"{self._mark}/{next(self._numbers)}", self._silence_s)
            self._rounds[turns].start()
            if started and self._rounds[turns].has_failed:  # too many processes, or open files
                self._rounds.pop(turns).close()
                break  # it starts when it is to be run, and there is room again
            started.append(self._rounds[turns])
            processes += sum(turn.cell.world_size for turn in turns)
        get_ready(started)


def _can_wait(job: Job) -> bool:
    """Several ranks meet at a port, which others may take while they wait; a launcher may start them anywhere."""
    return not job.cell.ddp and job.cell.world_size == 1 and job.launcher is None


def _held_bytes(turn: Turn) -> int:
    cell = turn.cell
    weights = sum(math.prod(one.shape) for one in describe_model(cell.model, cell.input_shape[1:]).parameters)
    return cell.world_size * (_LIBRARIES_BYTES + 4 * (BATCHES * math.prod(cell.input_shape) + weights))
