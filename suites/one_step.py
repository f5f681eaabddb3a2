"""A training step of a ResNet in Flow, for scripts that look at one process."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Step = Callable[[], Any]


def device_of(parser: argparse.ArgumentParser, device: str) -> Any:
    """Flow, where it has such a device; otherwise the parser says why not, and ends the process."""
    import framework as flow

    if device == "cuda" and not flow.cuda.is_available():
        parser.error(flow.cuda.why() or "there is no CUDA device")
    return flow


def training_step(
    flow: Any,
    model_name: str,
    shape: tuple[int, int, int, int],
    device: str,
    wrap: Callable[[Any], Any] = lambda module: module,
) -> Step:
    """A function that trains what `wrap` makes of a model for one step, on one batch. ValueError for a model that is none."""
    models = [name for name in flow.models.__all__ if name.islower()]
    if model_name not in models:
        raise ValueError(f"there are {', '.join(models)}")
    flow.manual_seed(0)
    model = wrap(getattr(flow.models, model_name)().to(device))
    optimizer = flow.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    images, labels = flow.randn(*shape).to(device), flow.zeros(shape[0], dtype=flow.int64).to(device)
    criterion = flow.nn.CrossEntropyLoss()

    def step() -> Any:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def synchronize(flow: Any, device: str) -> None:
    """Returns when the device has nothing to do any more."""
    if device != "cpu":
        flow.cuda.synchronize()
