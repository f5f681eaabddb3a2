"""Watches GPUs while a cell is measured: clocks, temperature, power, what slows them down, and who else is on them."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from flowbench.nvml import Driver, Holders, Reading
from flowbench.record.gpu import GpuConditions, GpuProcess, Range

# A reading keeps the driver for some milliseconds: seldom enough not to show in the steps.
READ_EVERY_S = 1.0
WORKING = ("warm-up", "steps", "end")

# In this share of the readings, or in more, a slowdown is said to have disturbed.
SLOWED_SHARE = 0.1
# The driver's own bookkeeping comes and goes by less.
NOT_GIVEN_BACK_BYTES = 64 * 2**20


class GpuWatch:
    """The GPUs of one round: made before its processes open them, asked to `look` while they run, finished after."""

    def __init__(self, driver: Driver, gpus: Sequence[int]) -> None:
        self._driver = driver
        self._before = {gpu: driver.holders(gpu) for gpu in gpus}
        self._readings: dict[int, list[Reading]] = {gpu: [] for gpu in gpus}
        self._phase, self._read_at, self._works = "", -READ_EVERY_S, False

    def look(self, phase: str) -> None:
        """Read, where it is time; at the end of the steps always: the GPUs still run as they did.

        Also while a process waits at a barrier, but for those before the first step: until then the GPU is as idle as it was.
        """
        ended = phase == "end" != self._phase
        self._phase, self._works = phase, self._works or phase in WORKING
        busy = phase in WORKING or (phase == "barrier" and self._works)
        if busy and (ended or time.monotonic() - self._read_at >= READ_EVERY_S):
            for gpu, readings in self._readings.items():
                readings.append(self._driver.read(gpu))
            self._read_at = time.monotonic()

    def finish(self) -> tuple[GpuConditions, ...]:
        """What was seen, after the last process of the group has ended."""
        return tuple(
            conditions(gpu, readings, self._before[gpu], self._driver.holders(gpu))
            for gpu, readings in self._readings.items()
        )


def conditions(gpu: int, readings: Sequence[Reading], before: Holders, after: Holders) -> GpuConditions:
    """Readings of one GPU in one record."""
    slowed = Counter(reason for reading in readings for reason in reading.slowed_by)
    others = {**before.processes, **after.processes}
    return GpuConditions(
        gpu=gpu,
        readings=len(readings),
        sm_clock_mhz=_range(reading.sm_clock_mhz for reading in readings),
        memory_clock_mhz=_range(reading.memory_clock_mhz for reading in readings),
        temperature_c=_range(reading.temperature_c for reading in readings),
        power_w=_range(reading.power_w for reading in readings),
        slowed_by={reason: count / len(readings) for reason, count in sorted(slowed.items())},
        others=tuple(GpuProcess(pid, size, _name(pid)) for pid, size in sorted(others.items())),
        used_before_bytes=before.used_bytes,
        used_after_bytes=after.used_bytes,
    )


def gpu_disturbances(seen: Iterable[GpuConditions]) -> Iterator[tuple[str, str]]:
    """Kind and text of what disturbed a measurement on these GPUs."""
    for each in seen:
        for reason, share in each.slowed_by.items():
            if share >= SLOWED_SHARE:
                yield (
                    "GPU slowed down",
                    f"GPU {each.gpu}: {reason} in {share:.0%} of {each.readings} readings{_clock(each)}",
                )
        for other in each.others:
            held = "" if other.memory_bytes is None else f", holding {other.memory_bytes / 2**20:.0f} MiB"
            yield (
                "GPU shared",
                f"GPU {each.gpu}: process {other.pid} ({other.name or 'name unknown'}) was on it too{held}",
            )
        before, after = each.used_before_bytes, each.used_after_bytes
        if before is not None and after is not None and after - before > NOT_GIVEN_BACK_BYTES:
            more = f"{(after - before) / 2**20:.0f} MiB more are in use than before"
            yield "GPU memory", f"GPU {each.gpu}: {more}, though the cell's processes have ended"


def _clock(each: GpuConditions) -> str:
    clock = each.sm_clock_mhz
    return "" if clock is None else f", SM clock {clock.lowest:.0f} to {clock.highest:.0f} MHz"


def _range(figures: Iterable[Any]) -> Range | None:
    told = [float(figure) for figure in figures if figure is not None]
    return Range(min(told), statistics.median(told), max(told)) if told else None


def _name(pid: int) -> str | None:
    """The name of a process that uses CUDA here; another container's process may go by the number of one here that does not."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        return psutil.Process(pid).name()[:200] if "libcuda" in maps else None
    except (OSError, psutil.Error):  # it has ended, or is another user's or container's
        return None
