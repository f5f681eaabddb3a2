"""Runs groups of rank processes to their end: one alone, or several in turns; none of their processes is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from flowbench.measure.processes import end_marked, marked
from flowbench.measure.rank_group import GroupResult, RankGroup
from flowbench.measure.wire import Job, Phase

# What the ranks of a group may leave running after themselves, before it is ended.
LEFT_BEHIND_S = 1.0

# So often ranks are looked at that say nothing; and those that can say no more, since they are ending: no pipe tells when.
LOOK_S = 0.1
LOOK_AT_ENDING_S = 0.01


def run_group(
    job: Job,
    mark: str,
    silence_s: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    on_look: Callable[[Phase], None] = lambda phase: None,
) -> GroupResult:
    """Run `job` in fresh processes, one per rank of its cell; `on_step` is told the steps of rank 0.

    `on_look` is called several times a second, and whenever a rank speaks, with the phase of rank 0. Whatever happens, an
    interruption too, no process of the group is left. `silence_s` replaces the derived limits.
    """
    (result,) = Round([job], mark, silence_s).run([on_step], on_look)
    return result


class Round:
    """One group per job, all alive together, of which only one works at a time: what disturbs one disturbs all.

    `start` it ahead of time and let it `get_ready`, or `run` it at once; `close` one that is not run. Its processes carry
    `mark`, which no others do.
    """

    def __init__(self, jobs: Sequence[Job], mark: str, silence_s: float | None = None) -> None:
        self._mark = mark
        self._groups = [RankGroup(job, mark, silence_s) for job in jobs]
        self._ready: list[RankGroup] | None = None
        self._started = False

    def start(self) -> None:
        """Start all ranks, and come back at once; each goes on until it has done all that takes no GPU."""
        self._started = True
        for group in self._groups:
            group.start()

    @property
    def has_failed(self) -> bool:
        """Whether it is known of a group that it gives no result, such as one whose processes cannot be started."""
        return any(group.has_failed for group in self._groups)

    def run(
        self,
        on_steps: Sequence[Callable[[int], None]] | None = None,
        on_look: Callable[[Phase], None] = lambda phase: None,
        *,
        build_together: bool = False,
    ) -> list[GroupResult]:
        """Run the groups to their end; `on_steps` has a function per job.

        All open the GPU at the same time, and end at the same time; with `build_together` they also build and take their first
        step at the same time. In between they go from one barrier to the next in turns: forwards, then backwards, and so on.
        """
        for group, on_step in zip(self._groups, on_steps or [_ignore] * len(self._groups), strict=True):
            group.begin(on_step, on_look)
        try:
            if not self._started:
                self.start()
            if self._ready is None:
                get_ready([self])
            opened = _all_on(self._ready or ())
            built = _all_on(opened) if build_together else [group for group in opened if _all_on([group])]
            _all_on(_in_turns(built))
        finally:
            left_behind = self.close()
        return [group.result(left_behind) for group in self._groups]

    def close(self) -> tuple[str, ...]:
        """Kill what still runs; returns the command lines of processes that outlived ranks which ended by themselves."""
        clean = all(group.clean for group in self._groups)
        until = time.monotonic() + LEFT_BEHIND_S
        while clean and marked(self._mark) and time.monotonic() < until:
            time.sleep(0.02)  # helpers of an engine end when they see that it is gone
        left_behind = end_marked(self._mark)
        for group in self._groups:
            group.close()
        return tuple(left_behind) if clean else ()

    @property
    def waits(self) -> bool:
        """Whether all ranks live and wait to be run."""
        return all(group.waits for group in self._groups)

    @property
    def process_ids(self) -> list[int]:
        """Of all ranks that were started."""
        return [pid for group in self._groups for pid in group.process_ids]


def get_ready(rounds: Sequence[Round]) -> None:
    """Wait until all ranks of rounds that were started have done all that takes no GPU: now they sleep until `run`."""
    ready = _advance([group for one in rounds for group in one._groups])
    for one in rounds:
        one._ready = [group for group in one._groups if group in ready]


def _ignore(step: int) -> None:
    """Nobody is told of the step."""


def _all_on(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Let all groups go on to their next barrier at the same time; returns those that came there."""
    for group in groups:
        group.release()
    return _advance(groups)


def _in_turns(waiting: Sequence[RankGroup]) -> list[RankGroup]:
    """Let one group at a time go on to its next barrier, until each has its results or has failed; returns the former."""
    finished: list[RankGroup] = []
    while waiting:
        order, waiting = waiting, []
        for group in order:
            if _all_on([group]):
                (finished if group.has_results else waiting).append(group)
        waiting.reverse()
    return finished


def _advance(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Watch all groups until each waits to be released or is over, all at the same time; returns those that wait."""
    outcome: dict[RankGroup, bool] = {}
    for group in groups:
        group.looked = time.monotonic()
    while pending := [group for group in groups if group not in outcome]:
        descriptors = [group.descriptors for group in pending]
        wait([one for some in descriptors for one in some], LOOK_S if all(descriptors) else LOOK_AT_ENDING_S)
        for group in pending:
            waits = group.look()
            if waits is not None:
                outcome[group] = waits
    return [group for group in groups if outcome[group]]
