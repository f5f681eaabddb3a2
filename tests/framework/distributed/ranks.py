"""Runs a few lines of Python on several ranks, each a process of its own, and gives back what they said."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
import os, sys, time
import numpy as np
import framework as flow
dist = flow.distributed
"""
# Ranks share the test machine's few cores.
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it printed to both its outputs."""

    status: int
    text: str


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what a launcher may have set, with `variables`."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    foreign = ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if name not in own and not name.startswith(foreign)}
    return kept | THREADS | {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"} | variables


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(code: str, world_size: int, ranks: list[int] | None = None, port: int = 0) -> list[subprocess.Popen[str]]:
    """Starts `code` on ranks (all of them), without waiting."""
    port = port or free_port()
    variables = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + dedent(code)],
            env=environment(**variables, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (range(world_size) if ranks is None else ranks)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 60.0) -> list[Ended]:
    """How they ended; kills what does not end in time, which the test then sees by its status."""
    ended = []
    for process in processes:
        try:
            text, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
        ended.append(Ended(process.returncode, text))
    return ended


def run(code: str, world_size: int, ranks: list[int] | None = None) -> list[str]:
    """What each rank printed; fails where one did not end well."""
    ended = finish(start(code, world_size, ranks))
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank} ended with {one.status}:\n{one.text}"
    return [one.text for one in ended]
