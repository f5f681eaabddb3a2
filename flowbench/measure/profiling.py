"""A separate pass over one cell: one step, op by op, in a fresh process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from flowbench.errors import FlowbenchError
from flowbench.measure.guard import Guard
from flowbench.measure.ranks import run_group
from flowbench.measure.wire import Job
from flowbench.record.profile import Profile
from flowbench.record.run import NotMeasured


def profile_cell(job: Job, run_id: str, silence_s: float | None = None) -> Profile:
    """The profile of rank 0 of the job's cell; raises FlowbenchError where the cell fails or its engine cannot tell.

    Its processes are told from those of the run itself, which may go on at the same time.
    """
    job = replace(job, profile=True, steps=1, steps_per_turn=None, slowdown=0.0)
    mark = f"{run_id} profiled by {os.getpid()}"
    with Guard(mark):
        result = run_group(job, mark, silence_s)
    if result.error is not None:
        raise FlowbenchError(f"{job.cell.label} failed while it was profiled: {result.error}")
    if result.profile is None:
        raise FlowbenchError(f"{job.cell.label} cannot be profiled: engine {job.engine} has no profile of its steps")
    return result.profile


def profile_cells(jobs: Iterable[Job], run_id: str) -> tuple[tuple[Profile, ...], tuple[NotMeasured, ...]]:
    """The profiles of the jobs' cells, and what has none, with the reason."""
    profiles, missing = [], []
    for job in jobs:
        try:
            profiles.append(profile_cell(job, run_id))
        except FlowbenchError as error:
            missing.append(NotMeasured(f"profile of {job.cell.label}", str(error)))
    return tuple(profiles), tuple(missing)
