"""PyTorch as an engine: with its defaults, which is the reference of every ratio, and in channels_last memory format."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowbench.cell import Case
from flowbench.engine import Engine, Task, Training


class TorchTraining(Training):
    """A PyTorch model being trained with PyTorch's SGD."""

    def __init__(self, task: Task, channels_last: bool) -> None:
        import torch

        from flowbench.engines.torch_models import build_model

        self._torch = torch
        self.device = "cpu"
        self._model = build_model(task.cell.model, {name: array.shape for name, array in task.weights.items()})
        self._model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in task.weights.items()})
        self._model.train()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._model.to(memory_format=memory_format)
        self._batches = [
            (torch.from_numpy(batch.images).contiguous(memory_format=memory_format), torch.from_numpy(batch.labels))
            for batch in task.batches
        ]
        self._criterion = torch.nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=task.learning_rate, momentum=task.momentum)
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

    def threads(self) -> int:
        return self._torch.get_num_threads()


class TorchEager(Engine):
    """PyTorch as it comes: default memory format, default settings."""

    display_name = "PyTorch"
    library = "torch"
    channels_last = False

    def build(self, task: Task) -> TorchTraining:
        return TorchTraining(task, self.channels_last)

    def unsupported(self, case: Case) -> str | None:
        if case.precision != "float32":
            return f"{self.display_name} is measured in float32, not in {case.precision}"
        if case.mode != "eager":
            return f"{self.display_name} is measured op by op, not in mode {case.mode}"
        if case.world_size != 1:
            return f"{self.display_name} is measured with one rank"
        return None


class TorchChannelsLast(TorchEager):
    """PyTorch in channels_last memory format (NHWC)."""

    display_name = "PyTorch-NHWC"
    channels_last = True
