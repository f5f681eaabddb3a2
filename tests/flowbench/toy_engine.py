"""A whole engine: it trains the model `linear` with NumPy. A package of one's own looks like this."""

from __future__ import annotations

import numpy as np

from flowbench.cell import Case
from flowbench.engine import Engine, Task, Training


class ToyTraining(Training):
    def __init__(self, task: Task) -> None:
        self.task = task
        self.weight, self.bias = task.weights["weight"].copy(), task.weights["bias"].copy()
        self.velocity = [np.zeros_like(self.weight), np.zeros_like(self.bias)]

    def step(self, index: int) -> None:
        batch = self.task.batches[index % len(self.task.batches)]
        images = batch.images.reshape(len(batch.labels), -1)
        logits = images @ self.weight.T + self.bias
        logits -= logits.max(1, keepdims=True)
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        rows = np.arange(len(batch.labels))
        self.last = float(-np.log(probabilities[rows, batch.labels]).mean())
        probabilities[rows, batch.labels] -= 1
        self.update([probabilities.T @ images / len(rows), probabilities.mean(0)])

    def update(self, gradients: list[np.ndarray]) -> None:
        for parameter, velocity, gradient in zip((self.weight, self.bias), self.velocity, gradients, strict=True):
            velocity[:] = self.task.momentum * velocity + gradient
            parameter -= np.float32(self.task.learning_rate) * velocity

    def loss(self) -> float:
        return self.last

    def threads(self) -> int:
        return self.task.cell.threads


class ToyEngine(Engine):
    display_name = "Toy"
    library = "numpy"

    def build(self, task: Task) -> ToyTraining:
        return ToyTraining(task)

    def unsupported(self, case: Case) -> str | None:
        return None if case.model == "linear" else "the toy knows only the model linear"
