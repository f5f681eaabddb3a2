"""Flow as an engine: the one seam between the harness and the framework next door."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from flowbench.cell import Case, Device
from flowbench.engine import Batch, Engine, Event, StepProfile, Task, Training, Tunes, ranks_refusal


class FlowTraining(Training):
    """A Flow model being trained with Flow's SGD."""

    def __init__(self, task: Task) -> None:
        import framework as flow

        self.device = task.device
        self._flow = flow
        self._on_gpu = self.device != "cpu"
        self._memory = flow.cuda if self._on_gpu else flow.cpu
        if self._on_gpu:
            flow.cuda.set_device(self.device)
            flow.cuda.set_memory_limit(task.gpu_memory_limit_bytes)
        flow.set_num_threads(task.cell.threads)
        # What would be drawn is replaced at once; a framework of an earlier commit may not know how to leave it out.
        with getattr(flow.nn.init, "skipped", nullcontext)():
            self._model = _build_model(flow, task)
        self._model.load_state_dict(dict(task.weights))
        self._model.to(self.device)
        self._ranks = flow.distributed if task.cell.ddp else None
        if self._ranks is not None:
            self._ranks.init_process_group(timeout=task.timeout_s)
            self._model = flow.nn.parallel.DistributedDataParallel(
                self._model, broadcast_buffers=task.cell.broadcast_buffers
            )
        self._model.train()
        self._batches = [
            (flow.tensor(batch.images, device=self.device), flow.tensor(batch.labels, device=self.device))
            for batch in task.batches
        ]
        self._criterion = flow.nn.CrossEntropyLoss()
        self._optimizer = flow.optim.SGD(self._model.parameters(), lr=task.learning_rate, momentum=task.momentum)
        self._loss: Any = None

    def step(self, index: int) -> None:
        images, labels = self._batches[index % len(self._batches)]
        self._optimizer.zero_grad()
        loss = self._criterion(self._model(images), labels)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def loss(self) -> float:
        return float(self._loss.item())

    def later_loss(self) -> Callable[[], float]:
        loss = self._loss
        return lambda: float(loss.item())

    def event(self) -> Event | None:
        if not self._on_gpu:
            return None
        event = self._flow.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spin(self, milliseconds: float) -> bool:
        from flowbench.engines.spinning import spin
        from framework.vm import cuda as vm_cuda

        spin(vm_cuda.stream_pointer(self._flow.device(self.device)), milliseconds)
        return True

    def profile(self, index: int) -> StepProfile:
        from flowbench.engines.flow_profile import profile_step

        return profile_step(lambda: self.step(index), self.device, self.synchronize)

    def synchronize(self) -> None:
        if self._on_gpu:
            self._flow.cuda.synchronize()

    def parameters(self) -> Mapping[str, np.ndarray]:
        inner = self._model if self._ranks is None else self._model.module
        return {name: np.asarray(p.detach().to("cpu").numpy()) for name, p in inner.named_parameters()}

    def loss_on(self, batch: Batch) -> float:
        inner = self._model if self._ranks is None else self._model.module
        images, labels = (self._flow.tensor(values, device=self.device) for values in (batch.images, batch.labels))
        with self._flow.no_grad():
            return float(self._criterion(inner(images), labels).item())

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.destroy_process_group()

    def threads(self) -> int | None:
        # NumPy's kernels cannot be asked: its library read the number of threads from the environment when it was loaded.
        return self._flow.get_num_threads() if self._flow.backends.onednn.available() else None

    def reset_peaks(self) -> None:
        self._memory.reset_peak_memory_stats()

    def allocated_peak_bytes(self) -> int:
        return self._memory.max_memory_allocated()

    def reserved_peak_bytes(self) -> int:
        return self._memory.max_memory_reserved()


class FlowEager(Engine):
    """Flow run op by op."""

    display_name = "Flow"
    library = "framework"
    devices = ("cpu", "cuda")
    tunes: Tunes = "once"

    def load(self, device: Device) -> None:
        import framework as flow

        # What these say is said by whoever needs the libraries: asked, they load CuPy and cuDNN, or oneDNN.
        if device == "cuda":
            self.gpu_refusal()
        else:
            flow.backends.onednn.available()

    def open(self, task: Task) -> None:
        if task.device == "cpu":
            return
        import framework as flow

        flow.cuda.set_device(task.device)
        with flow.no_grad():
            flow.nn.Conv2d(8, 8, 3).to(task.device)(flow.zeros(1, 8, 8, 8, device=task.device))
        flow.cuda.synchronize()
        flow.cuda.empty_cache()

    def build(self, task: Task) -> FlowTraining:
        return FlowTraining(task)

    def unavailable(self) -> str | None:
        if importlib.util.find_spec(self.library) is None:
            return "framework, Flow's package, is not beside flowbench (python -m pip install . in its repository)"
        return None

    def version(self) -> str:
        import framework as flow

        return flow.__version__

    def advice(self) -> str | None:
        import framework as flow

        if flow.backends.onednn.available():
            return None
        return f"runs on NumPy alone on the CPU, many times slower: {flow.backends.onednn.why()}"

    def gpu_refusal(self) -> str | None:
        import framework as flow

        return flow.cuda.why() or flow.backends.cudnn.why()

    def unsupported(self, case: Case) -> str | None:
        if case.device == "cuda" and importlib.util.find_spec("cupy") is None:
            return (
                "Flow on a GPU needs CuPy: pip install 'flowbench[cuda13]' for drivers from 580 on, 'flowbench[cuda12]' "
                "for older ones"
            )
        if case.precision != "float32":
            return f"flow-eager trains in float32, not in {case.precision}"
        if case.mode != "eager":
            return f"flow-eager runs op by op, not in mode {case.mode}"
        if case.model != "linear" and case.input_shape[1] != 3:
            return f"Flow's ResNets take images of 3 channels, not of {case.input_shape[1]}"
        return ranks_refusal(case)


class FlowEagerUntimed(FlowEager):
    """Flow that takes cuDNN's first suggestion, as PyTorch does by default, in place of timing some of them."""

    display_name = "Flow-untimed"
    tunes = "never"

    def build(self, task: Task) -> FlowTraining:
        import framework as flow

        flow.backends.cudnn.timed_plans = 1
        return FlowTraining(task)

    def unsupported(self, case: Case) -> str | None:
        if case.device != "cuda":
            return "how cuDNN's plans are chosen matters on a GPU only"
        return super().unsupported(case)


class FlowEagerUngrouped(FlowEager):
    """Flow whose launches go to the GPU one by one, also where they come again as they came before."""

    display_name = "Flow-ungrouped"

    def build(self, task: Task) -> FlowTraining:
        import framework as flow

        flow.cuda.group_launches(False)
        return FlowTraining(task)

    def unsupported(self, case: Case) -> str | None:
        if case.device != "cuda":
            return "launches are grouped on a GPU only"
        return super().unsupported(case)


def _build_model(flow: Any, task: Task) -> Any:
    if task.cell.model != "linear":
        return getattr(flow.models, task.cell.model)(num_classes=len(task.weights["fc.bias"]))
    classes, features = task.weights["weight"].shape

    class Linear(flow.nn.Linear):
        """One linear layer on flattened images; it keeps its names, without the prefix a Sequential would give."""

        def forward(self, images: Any) -> Any:
            return super().forward(images.flatten(1))

    return Linear(features, classes)
