"""CUDA devices: which there are, waiting for them, their memory, streams and events.

Functions that take a device mean the current one where none is given: the first, or what `set_device` was given.
"""

from framework.cuda.devices import (
    DeviceProperties,
    current_device,
    get_device_capability,
    get_device_name,
    get_device_properties,
    group_launches,
    is_available,
    launch_blocking,
    set_device,
    synchronize,
    why,
)
from framework.cuda.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_peak_memory_stats,
    set_memory_limit,
)
from framework.cuda.streams import Event, Stream, current_stream, default_stream, stream
from framework.vm.cuda import CudaError, CudaUnavailableError, device_count

__all__ = [
    "CudaError",
    "CudaUnavailableError",
    "DeviceProperties",
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "group_launches",
    "is_available",
    "launch_blocking",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
    "set_device",
    "set_memory_limit",
    "stream",
    "synchronize",
    "why",
]
