"""NVML's Python bindings as a double: it answers from the file that GPU_DOUBLE names, the same in every process.

    {"driver": "580.1", "cuda": 13000, "gpus": [{"uuid": "GPU-aa", "sm": 1980, "processes": [[7, 1024]], …}]}

A figure that the file does not have is one the GPU does not support.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "mem", 0

# What this process holds, by GPU, under which id: an engine's double says so.
held: defaultdict[int, dict[int, int]] = defaultdict(dict)


class NVMLError(Exception):
    """What the bindings raise."""


def _state() -> dict[str, Any]:
    return json.loads(Path(os.environ["GPU_DOUBLE"]).read_text())


def _figure(handle: int, name: str) -> Any:
    gpu = _state()["gpus"][handle]
    if gpu.get(name) is None:
        raise NVMLError("Not Supported")
    return gpu[name]


def nvmlInit() -> None:
    if "GPU_DOUBLE" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:
    return len(_state()["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlSystemGetDriverVersion() -> bytes:  # older bindings answer with bytes
    return _state()["driver"].encode()


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return _state()["cuda"]


def nvmlDeviceGetUUID(handle: int) -> str:
    return _figure(handle, "uuid")


def nvmlDeviceGetName(handle: int) -> str:
    return _figure(handle, "name")


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    used = _figure(handle, "used") + sum(held[handle].values())
    return SimpleNamespace(total=_figure(handle, "memory"), used=used)


def nvmlDeviceGetMaxClockInfo(handle: int, kind: str) -> int:
    return _figure(handle, f"{kind}_max")


def nvmlDeviceGetClockInfo(handle: int, kind: str) -> int:
    return _figure(handle, kind)


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    return _figure(handle, "power_limit_mw")


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return _figure(handle, "power_mw")


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return _figure(handle, "temperature")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:  # the older name
    return _figure(handle, "reasons")


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=_figure(handle, "busy"))


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    listed = [*_figure(handle, "processes"), *held[handle].items()]
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in listed]


def nvmlDeviceGetGraphicsRunningProcesses(handle: int) -> list[Any]:
    raise NVMLError("Not Supported")
