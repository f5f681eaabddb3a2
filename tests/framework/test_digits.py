"""A small convolutional net learns scikit-learn's handwritten digits as well as it does in PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from framework import nn

torch = pytest.importorskip("torch", reason="compares with PyTorch")
datasets = pytest.importorskip("sklearn.datasets", reason="learns scikit-learn's digits")

EPOCHS, BATCH, RATE, MOMENTUM = 3, 32, 0.05, 0.9


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images [N, 1, 8, 8] and classes, four fifths of them to learn from, the rest to be tried with."""
    loaded = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images, target = (loaded.images[order, None] / 8 - 1).astype(np.float32), loaded.target[order]
    cut = len(target) * 4 // 5
    return images[:cut], target[:cut], images[cut:], target[cut:]


def my_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def their_net() -> Any:
    layers = torch.nn
    return layers.Sequential(
        layers.Conv2d(1, 16, 3, padding=1, bias=False), layers.BatchNorm2d(16), layers.ReLU(), layers.MaxPool2d(2),
        layers.Conv2d(16, 32, 3, padding=1), layers.BatchNorm2d(32), layers.ReLU(), layers.Flatten(), layers.Linear(512, 10),
    )  # fmt: skip


def train(net: Any, optimizer: Any, loss: Any, tensor: Any, images: np.ndarray, target: np.ndarray) -> list[float]:
    """The mean loss of each epoch. Both frameworks go through these very lines."""
    random = np.random.default_rng(1)
    means = []
    for _ in range(EPOCHS):
        order = random.permutation(len(target))
        losses = []
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            value = loss(net(tensor(images[chosen])), tensor(target[chosen]))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        means.append(float(np.mean(losses)))
    return means


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["float64", "float32"])
def test_digits_are_learned_as_well_as_in_pytorch(name: str) -> None:
    images, target, other_images, other_target = digits()
    dtype = np.dtype(name)
    images, other_images = images.astype(dtype), other_images.astype(dtype)
    flow.manual_seed(2)
    mine, theirs = my_net().to(getattr(flow, name)), their_net().to(getattr(torch, name))
    theirs.load_state_dict({key: torch.tensor(value.numpy().copy()) for key, value in mine.state_dict().items()})

    my_optimizer = flow.optim.SGD(mine.parameters(), RATE, momentum=MOMENTUM)
    my_losses = train(mine, my_optimizer, nn.CrossEntropyLoss(), flow.tensor, images, target)
    their_optimizer = torch.optim.SGD(theirs.parameters(), RATE, momentum=MOMENTUM)
    their_losses = train(theirs, their_optimizer, torch.nn.CrossEntropyLoss(), torch.tensor, images, target)

    with flow.no_grad():
        my_answers = mine.eval()(flow.tensor(other_images)).argmax(1).numpy()
    with torch.no_grad():
        their_answers = theirs.eval()(torch.tensor(other_images)).argmax(1).numpy()
    my_accuracy, their_accuracy = np.mean(my_answers == other_target), np.mean(their_answers == other_target)
    assert their_accuracy > 0.95
    if name == "float64":
        np.testing.assert_allclose(my_losses, their_losses, rtol=1e-6)
        np.testing.assert_array_equal(my_answers, their_answers)
    else:
        # Roundings grow over 180 steps: the nets differ in the end, and answer a few of the 360 images differently.
        np.testing.assert_allclose(my_losses, their_losses, rtol=0.02)
        assert my_accuracy >= their_accuracy - 0.015
