"""What else the machine did while something was measured: other processes, a hypervisor's other guests, swapping."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")

# The kind of finding that `uneven_steps` is told as.
UNEVEN_STEPS = "uneven steps"

# GNU's OpenMP reads it when it is loaded; for every engine alike.
SPIN_LESS = "GOMP_SPINCOUNT=1000 in the environment shortens them"

# Below these, what others did does not show beside the spread of the measurement itself.
BUSY_SHARE = 0.1
STEAL_SHARE = 0.02

# Steps of one process that differ by this factor, the longest of which is no blink either, were not all of the same kind.
UNEVEN = 5.0
UNEVEN_MS = 50.0

# By so much clocks may part in a measurement before one says that the machine slept, or that the time of day was set.
SLEPT_S = 1.0
CLOCK_JUMPED_S = 2.0


@dataclass(frozen=True)
class Counters:
    """The system's counters at one moment: seconds of CPU time busy and stolen of the cores to use, of ours, pages swapped.

    `wall_s` is of the clock that stands still while the machine sleeps, `awake_or_asleep_s` of the one that does not, and
    `time_of_day_s` of the one that can be set. `waiting_s` is the part of `ours_s` that those used who wait for their round.
    """

    wall_s: float
    busy_s: float
    stolen_s: float
    ours_s: float
    swapped_pages: int
    awake_or_asleep_s: float = 0.0
    time_of_day_s: float = 0.0
    waiting_s: float = 0.0


def read_counters() -> Counters:
    """The counters now; without /proc only the clock runs."""
    ours = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    )
    busy, stolen = _cpu_seconds(_usable())
    now_s = time.monotonic()
    since_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else now_s
    return Counters(now_s, busy, stolen, ours, _swapped_pages(), since_boot_s, time.time())


def slept_s(before: Counters, after: Counters) -> float:
    """For how long the machine slept between two readings."""
    return (after.awake_or_asleep_s - before.awake_or_asleep_s) - (after.wall_s - before.wall_s)


def disturbances(before: Counters, after: Counters, cores: int) -> Iterator[tuple[str, str]]:
    """Kind and text of what disturbed the time between two readings, where the parent's children have been waited for."""
    wall_s = after.wall_s - before.wall_s
    if wall_s <= 0:
        return
    others = (after.busy_s - before.busy_s - (after.ours_s - before.ours_s)) / wall_s
    stolen = (after.stolen_s - before.stolen_s) / wall_s
    swapped = after.swapped_pages - before.swapped_pages
    if others > BUSY_SHARE * cores:
        yield "other load", f"other processes used {others:.1f} of {cores} cores"
    if stolen > STEAL_SHARE * cores:
        yield "stolen time", f"the hypervisor gave {stolen:.2f} of {cores} cores to others"
    if swapped > 0:
        yield "swapping", f"{swapped} pages were swapped"
    slept, passed_s = slept_s(before, after), after.awake_or_asleep_s - before.awake_or_asleep_s
    if slept > SLEPT_S:
        yield "sleep", f"the machine slept for {slept:.0f} s"
    jumped = after.time_of_day_s - before.time_of_day_s - passed_s
    if abs(jumped) > CLOCK_JUMPED_S:
        yield "clock", f"the time of day was set by {jumped:+.0f} s: times of day are off here, durations are not"


def awakened(ready: Counters, after: Counters, cores: int) -> Iterator[tuple[str, str]]:
    """Kind and text of what processes did that should have slept, from when they were ready until one round had been run."""
    wall_s = after.wall_s - ready.wall_s
    awake = (after.waiting_s - ready.waiting_s) / wall_s if wall_s > 0 else 0.0
    if awake > BUSY_SHARE * cores:
        yield (
            "other load",
            f"processes that wait for their round used {awake:.1f} of {cores} cores: something runs on after load()",
        )


def uneven_steps(steps_ms: Sequence[float]) -> str | None:
    """What to say of steps on several threads of which some took many times as long as others; None where none did.

    Where something else takes the core of one thread, all others of an operation wait for it, and most libraries' threads wait
    busily: they may keep it from the very core it needs.
    """
    least, most = min(steps_ms, default=0.0), max(steps_ms, default=0.0)
    if most < max(UNEVEN * least, UNEVEN_MS):
        return None
    return f"steps of one process took {least:.0f} to {most:.0f} ms: {SPIN_LESS} where threads wait for each other"


def _usable() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _cpu_seconds(cores: Iterable[int]) -> tuple[float, float]:
    """Busy (user, nice, system, interrupts) and stolen seconds since boot: proc(5), /proc/stat.

    Of `cores`, those that may be used here, or of all where they are not told apart.
    """
    try:
        lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return 0.0, 0.0
    rows = {name: [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[:8]] for name, *fields in lines}
    names = [f"cpu{core}" for core in cores]
    own = [rows[name] for name in names] if names and rows.keys() >= set(names) else [rows["cpu"]]
    user, nice, system, _, _, interrupt, soft_interrupt, steal = (sum(column) for column in zip(*own, strict=True))
    return user + nice + system + interrupt + soft_interrupt, steal


def _swapped_pages() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout ")))
