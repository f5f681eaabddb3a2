"""One step of PyTorch as its own profiler sees it: the time of each op, and as much of its memory as has a public interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flowbench.engine import OpCall, StepProfile

_MODULES = "modules: PyTorch's profiler does not say which module an op works for"
_TENSORS = "tensors at the peak, memory timeline: PyTorch has no public interface that tells them"
_PEAK = "peak: PyTorch does not count memory on a CPU"


def profile_step(step: Callable[[], None], on_gpu: bool) -> StepProfile:
    """Run `step` under torch.profiler; an op's time is its own, without the ops that it calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = time.perf_counter()
    with profile(activities=activities, record_shapes=True) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
        step_ms = 1000 * (time.perf_counter() - before)
    calls = [call for event in seen.events() if (call := _call(event, on_gpu)) is not None]
    missing = (_MODULES, _TENSORS) if on_gpu else (_MODULES, _TENSORS, _PEAK)
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return StepProfile(step_ms, calls, peak, step_ms if on_gpu else None, (), (), missing)


def _call(event: Any, on_gpu: bool) -> OpCall | None:
    """An event that took time of its own; on a GPU, the time of the kernels that it started."""
    own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
    if own_us <= 0 or not event.name.startswith("aten::"):
        return None
    shapes = [list(shape) for shape in event.input_shapes or () if shape]
    return OpCall(event.name, ", ".join(map(str, shapes[:2])), "", own_us / 1000)
