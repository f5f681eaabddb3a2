"""What each rank does in the part of `several_gpus.py` in which one is killed: it trains until that happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from flowbench.cell import Case, Cell
from flowbench.engine import Task
from flowbench.engine_registry import load_engine
from flowbench.workload.data import make_batches, make_weights
from flowbench.workload.losses import LEARNING_RATE, MOMENTUM
from flowbench.workload.models import describe_model
from suites.several_gpus_figures import FLOW

KILLED_AFTER_STEPS = 5


def run_rank(job: dict[str, Any]) -> None:
    """Trains; the last rank is killed with its step under way. The job's folder gets the process ids and the time of that."""
    folder, shape = Path(job["folder"]), tuple(job["shape"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    case = Case(job["model"], shape, "float32", "eager", size, True, True, True, 1, job["device"])
    weights, batches = make_weights(describe_model(case.model, shape[1:]), 0), make_batches(shape, 0, rank)
    task = Task(Cell.of(case, FLOW), weights, batches, LEARNING_RATE, MOMENTUM, rank, size, local_rank=rank)
    training = load_engine(FLOW).build(task)
    for step in range(1_000_000):
        training.step(step)
        if step == KILLED_AFTER_STEPS and rank == size - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
