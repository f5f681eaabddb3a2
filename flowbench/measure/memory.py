"""Resident memory of this process and its children, and its peak; what is free here."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def free_bytes() -> int:
    """What may be taken now: of the machine's memory, and of what its container leaves (cgroup 2 or 1; caches are given up)."""
    free = psutil.virtual_memory().available
    for folder, limit, used, cache in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            caches = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # another version, or no limit: `max`
        free = min(free, max(0, most - taken + int(caches.get(cache, 0))))
    return free


class ResidentMeter:
    """The peak of resident memory, in bytes, of this process and of its children since `reset`.

    The kernel keeps this process's own peak (VmHWM) and misses nothing. Children are looked at where `sample` is called,
    so their peaks between two calls are missed.
    """

    def __init__(self) -> None:
        self._children_peak = 0
        self.resets = True

    def held(self) -> int:
        """What this process and its children hold now."""
        return psutil.Process().memory_info().rss + _children_held()

    def reset(self) -> None:
        """Begin the peak anew; `resets` turns false where the system does not permit it (the peak is then of all time)."""
        self._children_peak = 0
        try:
            _CLEAR.write_text("5")  # proc(5): 5 sets the peak to what is held now
        except OSError:
            self.resets = False
        self.sample()

    def sample(self) -> None:
        """Look at the children; to be called outside the timed part."""
        self._children_peak = max(self._children_peak, _children_held())

    def peak(self) -> int:
        """The peak since `reset`."""
        return _own_peak() + self._children_peak


def _own_peak() -> int:
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _children_held() -> int:
    held = 0
    # Looking through all processes for children takes milliseconds, and so cools the caches of the next step.
    if _has_children() is False:
        return 0
    for child in psutil.Process().children(recursive=True):
        try:
            held += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended while we looked
    return held


def _has_children() -> bool | None:
    """Whether a thread of this process has a child now (proc(5), task/TID/children); None where the kernel does not tell."""
    try:
        texts = [(thread / "children").read_text() for thread in Path("/proc/self/task").iterdir()]
    except OSError:
        return None
    return any(texts)
