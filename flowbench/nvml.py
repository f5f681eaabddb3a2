"""What NVIDIA's driver says of its GPUs, through NVML: which there are, how they run, who holds memory. Makes no CUDA context.

GPUs are numbered as CUDA numbers them in a process of ours: those that CUDA_VISIBLE_DEVICES leaves, in its order, by bus.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

INSTALL = "python -m pip install nvidia-ml-py"

# Why clocks are lower than they could be: nvmlClocksEventReason… in nvml.h. What is no slowing down (idle, clocks that were
# set) is left out.
SLOWDOWNS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Device:
    """What does not change of a GPU; None where the driver does not tell. Without memory of its own it has the machine's."""

    name: str
    memory_bytes: int
    sm_clock_max_mhz: int | None
    memory_clock_max_mhz: int | None
    power_limit_w: float | None


@dataclass(frozen=True)
class Reading:
    """How a GPU runs at one moment; `slowed_by` are the reasons for clocks lower than they could be."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    slowed_by: tuple[str, ...]


@dataclass(frozen=True)
class Holders:
    """Who holds memory of a GPU: bytes by process id as the driver counts them (None untold), and bytes in use in all."""

    processes: Mapping[int, int | None]
    used_bytes: int | None


class Driver:
    """NVML, opened. What one GPU or driver does not support reads as None."""

    def __init__(self, library: Any) -> None:
        self._nvml = library
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        self._handles = _visible(handles, [self._text(library.nvmlDeviceGetUUID, handle) or "" for handle in handles])

    def __len__(self) -> int:
        return len(self._handles)

    def version(self) -> str | None:
        """The driver's version."""
        return self._text(self._nvml.nvmlSystemGetDriverVersion)

    def cuda_version(self) -> str | None:
        """The newest CUDA the driver runs, such as `13.0`."""
        number = self._ask(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def device(self, gpu: int) -> Device:
        """What GPU `gpu` is."""
        nvml, handle = self._nvml, self._handles[gpu]
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        limit_mw = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Device(
            name=self._text(nvml.nvmlDeviceGetName, handle) or "unknown",
            # One that shares the machine's memory (DGX Spark, Jetson) has none of its own to tell of.
            memory_bytes=psutil.virtual_memory().total if memory is None else int(memory.total),
            sm_clock_max_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_max_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )

    def read(self, gpu: int) -> Reading:
        """How GPU `gpu` runs now; takes about a millisecond."""
        nvml, handle = self._nvml, self._handles[gpu]
        power_mw = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        # Renamed in 2023; older bindings know the older name.
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._ask(reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return Reading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if power_mw is None else power_mw / 1000,
            slowed_by=tuple(reason for bit, reason in SLOWDOWNS.items() if bits & bit),
        )

    def holders(self, gpu: int) -> Holders:
        """Who holds memory of GPU `gpu` now, computing or drawing."""
        nvml, handle = self._nvml, self._handles[gpu]
        listed = [
            *(self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
            *(self._ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()),
        ]
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        return Holders(
            {process.pid: process.usedGpuMemory for process in listed}, None if memory is None else int(memory.used)
        )

    def busy_percent(self, gpu: int) -> int | None:
        """In how many of the last moments something ran on GPU `gpu`."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._handles[gpu])
        return None if rates is None else int(rates.gpu)

    def _ask(self, question: Callable[..., Any], *about: Any) -> Any:
        try:
            return question(*about)
        except self._nvml.NVMLError:  # not supported by this GPU or driver, or not permitted in this container
            return None

    def _text(self, question: Callable[..., Any], *about: Any) -> str | None:
        answer = self._ask(question, *about)
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def open_driver() -> Driver | str:
    """NVML, or why it cannot be asked, with the way out where there is one."""
    try:
        import pynvml
    except ImportError:
        return f"NVML's Python bindings are not installed ({INSTALL})"
    try:
        return Driver(pynvml)
    except pynvml.NVMLError as error:
        return f"NVML does not answer: {error}"


def process_ids() -> frozenset[int]:
    """Every number this process goes by: its own, and those in outer containers where the kernel tells (NSpid, proc(5))."""
    numbers = {os.getpid()}
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        numbers |= {int(word) for line in status if line.startswith("NSpid:") for word in line.split()[1:]}
    return frozenset(numbers)


def _visible(handles: list[Any], uuids: list[str]) -> list[Any]:
    """The handles that CUDA_VISIBLE_DEVICES leaves: numbers or UUIDs, up to the first that names no GPU, as CUDA reads it."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return handles
    visible = []
    for word in (word.strip() for word in chosen.split(",")):
        matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if word and uuid.startswith(word)]
        if word.isdecimal() and int(word) < len(handles):
            matches = [handles[int(word)]]
        if len(matches) != 1:
            break
        visible += matches
    return visible
