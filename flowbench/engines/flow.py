"""Flow as an engine: the one seam between the harness and the framework next door."""

from __future__ import annotations

import importlib.util
from typing import Any

from flowbench.cell import Case
from flowbench.engine import Engine, Task, Training


class FlowTraining(Training):
    """A Flow model being trained with Flow's SGD."""

    device = "cpu"

    def __init__(self, task: Task) -> None:
        import framework as flow

        flow.set_num_threads(task.cell.threads)
        self._flow = flow
        self._model = _build_model(flow, task)
        self._model.load_state_dict(dict(task.weights))
        self._model.train()
        self._batches = [(flow.tensor(batch.images), flow.tensor(batch.labels)) for batch in task.batches]
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

    def threads(self) -> int | None:
        # NumPy's kernels cannot be asked: its library read the number of threads from the environment when it was loaded.
        return self._flow.get_num_threads() if self._flow.backends.onednn.available() else None

    def reset_peaks(self) -> None:
        self._flow.cpu.reset_peak_memory_stats()

    def allocated_peak_bytes(self) -> int:
        return self._flow.cpu.max_memory_allocated()

    def reserved_peak_bytes(self) -> int:
        return self._flow.cpu.max_memory_reserved()


class FlowEager(Engine):
    """Flow run op by op."""

    display_name = "Flow"
    library = "framework"

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
        return f"runs on NumPy alone, many times slower: {flow.backends.onednn.why()}"

    def unsupported(self, case: Case) -> str | None:
        if case.precision != "float32":
            return f"flow-eager trains in float32, not in {case.precision}"
        if case.mode != "eager":
            return f"flow-eager runs op by op, not in mode {case.mode}"
        if case.world_size != 1:
            return "flow-eager runs one rank"
        return None


def _build_model(flow: Any, task: Task) -> Any:
    if task.cell.model != "linear":
        return getattr(flow.models, task.cell.model)(num_classes=len(task.weights["fc.bias"]))
    classes, features = task.weights["weight"].shape

    class Linear(flow.nn.Linear):
        """One linear layer on flattened images; it keeps its names, without the prefix a Sequential would give."""

        def forward(self, images: Any) -> Any:
            return super().forward(images.flatten(1))

    return Linear(features, classes)
