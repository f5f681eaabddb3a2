"""Engines that act as if they ran on a GPU: with events, work that is done later, a limit of memory; and wrong ones."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable

from toy_engine import ToyEngine, ToyTraining

from flowbench.engine import Task


class PretendedEvent:
    """An event whose device does everything at once."""

    def __init__(self) -> None:
        self.reached_ns = time.perf_counter_ns()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: PretendedEvent, /) -> float:
        return (end.reached_ns - self.reached_ns) / 1e6


class GpuTraining(ToyTraining):
    device = "cuda:0"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.local_rank:
            self.device = task.device
        if "GPU_DOUBLE" in os.environ:  # tests/flowbench/pynvml_double.py
            import pynvml

            pynvml.held[task.local_rank][os.getpid() + int(os.environ.get("GPU_DOUBLE_SHIFT", "0"))] = 700 * 2**20

    def event(self) -> PretendedEvent | None:
        return PretendedEvent()

    def later_loss(self) -> Callable[[], float]:
        value = self.last
        return lambda: value

    def threads(self) -> None:
        return None


class Gpu(ToyEngine):
    display_name = "ToyGPU"
    devices = ("cuda",)
    training = GpuTraining

    def build(self, task: Task) -> ToyTraining:
        return self.training(task)


class ElsewhereEvents(Gpu):
    """Its events lie on a stream where nothing runs."""

    class training(GpuTraining):
        def event(self) -> PretendedEvent:
            event = PretendedEvent()
            event.reached_ns = 0
            return event

        def step(self, index: int) -> None:
            super().step(index)
            time.sleep(0.02)


class StaysOnCpu(Gpu):
    """Takes the cell for a GPU and runs on the CPU."""

    class training(GpuTraining):
        device = "cpu"


class OutOfMemory(Gpu):
    """Asks for more than its limit."""

    def build(self, task: Task) -> ToyTraining:
        limit = task.gpu_memory_limit_bytes
        raise MemoryError(f"out of memory on cuda:0: asked for 2.0 GiB, limit {limit} B, held 1.0 MiB; by: conv1")


class ContextOnFirstGpu(Gpu):
    """Every rank but the first also holds memory on GPU 0: the context that was never meant to be there."""

    class training(GpuTraining):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            if task.rank:
                import pynvml

                pynvml.held[0][os.getpid()] = 312 * 2**20


class NotesItsCores(Gpu):
    """Appends to a file, per step, its rank and on which cores the thread that trains may run, and one that it starts in its first step."""

    devices = ("cpu", "cuda")

    class training(GpuTraining):
        def __init__(self, task: Task) -> None:
            super().__init__(task)
            self.device = task.device
            self.helper: threading.Thread | None = None

        def event(self) -> PretendedEvent | None:
            return PretendedEvent() if self.device != "cpu" else None

        def step(self, index: int) -> None:
            super().step(index)
            if self.helper is None:
                self.helper = threading.Thread(target=threading.Event().wait, daemon=True)
                self.helper.start()
            cores = [sorted(os.sched_getaffinity(thread or 0)) for thread in (0, self.helper.native_id)]
            with open(os.environ["CORES_FILE"], "a") as file:
                file.write(json.dumps([self.task.rank, index, *cores]) + "\n")
