#!/usr/bin/env python3
"""A srun that is none: it starts its tasks on this machine, with the variables that Slurm's would set, and waits for them."""

from __future__ import annotations

import os
import subprocess
import sys


def main() -> int:
    """The exit status of the first task that failed."""
    words = sys.argv[1:]
    tasks = int(words.pop(0).removeprefix("--ntasks="))
    while words[0].startswith("--"):
        partition = words.pop(0).removeprefix("--partition=")
        if partition == "none":
            print("srun: error: invalid partition specified: none", file=sys.stderr)
            return 1
        if partition == "chatty":  # more than a pipe holds, before any task is started
            print("srun: job 1 queued and waiting for resources\n" * 5000, file=sys.stderr)
    place = {"SLURM_NTASKS": str(tasks), "SLURM_JOB_ID": "1", "SLURM_STEP_NUM_NODES": "1"}
    started = [
        subprocess.Popen(words, env={**os.environ, **place, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(tasks)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main())
