"""Runs groups of rank processes to their end: one alone, or several in turns; none of their processes is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from flowbench.measure.processes import end_marked, marked
from flowbench.measure.rank_group import GroupResult, RankGroup
from flowbench.measure.wire import Job, Phase

# What the ranks of a group may leave running after themselves, before it is ended.
LEFT_BEHIND_S = 1.0


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
    (result,) = run_in_turns([job], mark, silence_s, [on_step], on_look)
    return result


def run_in_turns(
    jobs: Sequence[Job],
    mark: str,
    silence_s: float | None = None,
    on_steps: Sequence[Callable[[int], None]] = (),
    on_look: Callable[[Phase], None] = lambda phase: None,
) -> list[GroupResult]:
    """Run one group per job, all alive together, of which only one works at a time: what disturbs one disturbs all.

    Up to their first barrier, before they build, all work at once. From then on they go from one barrier to the next in
    turns: forwards, then backwards, and so on. `on_steps` has a function per job.
    """
    groups = [
        RankGroup(job, mark, silence_s, tell, on_look)
        for job, tell in zip(jobs, on_steps or [_ignore] * len(jobs), strict=True)
    ]
    try:
        for group in groups:
            group.start()
        waiting = [group for group in groups if group.advance()]
        while waiting:
            order = waiting
            waiting = []
            for group in order:
                group.release()
                if group.advance():
                    waiting.append(group)
            waiting.reverse()
    finally:
        left_behind = _end(groups, mark)
    return [group.result(left_behind) for group in groups]


def _ignore(step: int) -> None:
    """Nobody is told of the step."""


def _end(groups: Sequence[RankGroup], mark: str) -> tuple[str, ...]:
    """Kill what still runs; returns the command lines of processes that outlived ranks which ended by themselves."""
    clean = all(group.clean for group in groups)
    until = time.monotonic() + LEFT_BEHIND_S
    while clean and marked(mark) and time.monotonic() < until:
        time.sleep(0.02)  # helpers of an engine end when they see that it is gone
    left_behind = end_marked(mark)
    for group in groups:
        group.close()
    return tuple(left_behind) if clean else ()
