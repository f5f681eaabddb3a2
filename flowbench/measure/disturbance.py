"""What else the machine did while something was measured: other processes, a hypervisor's other guests, swapping."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Below these, what others did does not show beside the spread of the measurement itself.
BUSY_SHARE = 0.1
STEAL_SHARE = 0.02


@dataclass(frozen=True)
class Counters:
    """The system's counters at one moment: seconds of CPU time busy and stolen, seconds of ours, pages swapped."""

    wall_s: float
    busy_s: float
    stolen_s: float
    ours_s: float
    swapped_pages: int


def read_counters() -> Counters:
    """The counters now; without /proc only the clock runs."""
    ours = sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF))
    )
    busy, stolen = _cpu_seconds()
    return Counters(time.monotonic(), busy, stolen, ours, _swapped_pages())


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


def _cpu_seconds() -> tuple[float, float]:
    """Busy (user, nice, system, interrupts) and stolen seconds of all cores since boot: proc(5), /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, interrupt, soft_interrupt, steal = (int(field) / ticks for field in first[1:9])
    return user + nice + system + interrupt + soft_interrupt, steal


def _swapped_pages() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("pswpin ", "pswpout ")))
