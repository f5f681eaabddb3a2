"""Ends processes for certain: children, their children, and those that hid in a session of their own.

Every process of a sitting carries a mark in its environment, inherited by whatever it starts. A process group can be left
and a parent can die; the mark stays. A mark may have parts: `SITTING/ROUND` is one of SITTING's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

# What launchers draw around a message.
_SHORTEST_RULE = 20
MARK = "FLOWBENCH_SITTING"

# OpenMP and the libraries of linear algebra read these once, when they are loaded.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def child_environment() -> dict[str, str]:
    """The environment for a child that imports what this process imports, from wherever it is started."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return environment


def measuring_environment(mark: str, threads: int) -> dict[str, str]:
    """The environment for a child that measures: it carries `mark`, and its libraries find their number of threads there."""
    environment = child_environment() | dict.fromkeys(THREAD_VARIABLES, str(threads)) | {MARK: mark}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # GPUs are numbered as their driver numbers them
    return environment


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the guard alone sees to it)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew what to do
        os.kill(os.getpid(), signal.SIGKILL)


def offer_to_memory_killer() -> None:
    """Where the system runs out of memory, let it be this process that is killed, not the one that keeps the record."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # not Linux, or not permitted: the kernel then takes the largest, which this one is likely to be


def end_group(group: int) -> None:
    """Kill a process group; one that is gone already is fine."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_marked(mark: str, patience_s: float = 5.0) -> list[str]:
    """Kill every process that carries `mark`, until none is left; returns their command lines."""
    ended: dict[int, str] = {}
    until = time.monotonic() + patience_s
    while found := marked(mark):
        for pid, command in found.items():
            ended[pid] = command
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > until:
            break
        time.sleep(0.01)
    return list(ended.values())


def marked(mark: str) -> dict[int, str]:
    """The living processes that carry `mark`, or a part of it, other than this one: pid and command line."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        try:
            if pid == os.getpid() or not _carries((directory / "environ").read_bytes(), wanted):
                continue
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # it ended while we looked, or is another user's
        if command:  # a process that has ended and waits to be collected has none
            found[pid] = command
    return found


def _carries(environment: bytes, mark: bytes) -> bool:
    return any(entry == mark or entry.startswith(mark + b"/") for entry in environment.split(b"\0"))


def last_words(tail: bytes) -> str:
    """The last line with words of what a process printed, to be put behind an error; empty where it printed none.

    Where a rule closes it, as launchers frame what they say, it is the last paragraph above.
    """
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    is_framed = False
    while lines and not _has_words(lines[-1]):
        is_framed = is_framed or len(lines.pop()) >= _SHORTEST_RULE
    paragraph: list[str] = []
    while lines and _has_words(lines[-1]) and (is_framed or not paragraph):
        paragraph.insert(0, lines.pop())
    return f"; its last words: {' '.join(paragraph)[:500]}" if paragraph else ""


def _has_words(line: str) -> bool:
    return any(character.isalnum() for character in line)
