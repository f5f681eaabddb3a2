"""Small training programs as people write them, each run by PyTorch and by Flow: the same lines, the same losses.

A program gets the library and gives back what it saw. Where the two differ in how a thing is said, the program asks which it has.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import framework as flow

torch = pytest.importorskip("torch", reason="compares with PyTorch")
pytestmark = pytest.mark.usefixtures("one_thread")

_drawn = np.random.default_rng(0)
ROWS, CLASSES = _drawn.standard_normal((64, 10)).astype(np.float32), _drawn.integers(0, 4, 64)
IMAGES, LABELS = _drawn.standard_normal((16, 3, 8, 8)).astype(np.float32), _drawn.integers(0, 4, 16)


def filled(lib: Any, model: Any) -> Any:
    """The model with weights that are the same for both libraries."""
    drawn = np.random.default_rng(1)
    with lib.no_grad():
        for parameter in model.parameters():
            parameter.copy_(lib.tensor(drawn.standard_normal(tuple(parameter.shape)).astype(np.float32) * 0.3))
    return model


def perceptron(lib: Any) -> Any:
    return filled(lib, lib.nn.Sequential(lib.nn.Linear(10, 8), lib.nn.ReLU(), lib.nn.Linear(8, 4, False)))


def loss_of(lib: Any, model: Any, rows: np.ndarray = ROWS, classes: np.ndarray = CLASSES) -> Any:
    return lib.nn.functional.cross_entropy(model(lib.tensor(rows)), lib.tensor(classes))


def step(lib: Any, model: Any, optimizer: Any, *data: np.ndarray) -> float:
    optimizer.zero_grad()
    loss = loss_of(lib, model, *data)
    loss.backward()
    optimizer.step()
    return loss.item()


def batches_by_numpy(lib: Any) -> list[float]:
    model, order = perceptron(lib), np.random.default_rng(2)
    optimizer = lib.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True)
    losses = []
    for _ in range(3):
        for chosen in order.permutation(64).reshape(4, 16):
            losses.append(step(lib, model, optimizer, ROWS[chosen], CLASSES[chosen]))
    model.eval()
    with lib.no_grad():
        right = model(lib.from_numpy(ROWS)).argmax(1) == lib.from_numpy(CLASSES)
    return [*losses, right.to(lib.float32).mean().item()]


def convolutions(lib: Any) -> list[float]:
    nn, functional = lib.nn, lib.nn.functional

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(3, 8, 3, 1, 1)
            self.norm = nn.BatchNorm2d(8)
            self.conv2 = nn.Conv2d(8, 8, 3, 2)
            self.pool = nn.MaxPool2d(2)
            self.fc = nn.Linear(8, 4)
            self.scale = nn.Parameter(lib.ones(8, 1, 1))
            self.register_buffer("seen", lib.zeros(1))

        def forward(self, x: Any) -> Any:
            self.seen += 1
            x = functional.relu(self.norm(self.conv1(x)) * self.scale)
            x = functional.relu(self.conv2(self.pool(x)))
            return self.fc(lib.flatten(x, 1))

    model = filled(lib, Net())
    optimizer = lib.optim.SGD(model.parameters(), 0.05, 0.9)
    losses = [step(lib, model, optimizer, IMAGES, LABELS) for _ in range(5)]
    model.eval()
    return [*losses, loss_of(lib, model, IMAGES, LABELS).item(), model.seen.item()]


def modules_in_lists(lib: Any) -> list[Any]:
    nn = lib.nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])
            self.layers.append(nn.Linear(10, 10)).extend(nn.Linear(10, 10) for _ in range(2))
            self.layers[1] = nn.Linear(10, 10, bias=False)
            for number in range(2):
                self.add_module(f"act{number}", nn.ReLU())
            self.act2 = self.act0
            self.head = nn.Linear(10, 4)

        def forward(self, x: Any) -> Any:
            for layer, act in zip(self.layers[:2], [self.act0, self.act1], strict=True):
                x = act(layer(x))
            for layer in self.layers[2:-1]:
                x = x + layer(x)
            assert x.size() == (x.size(0), x.size(dim=-1)) == x.shape
            return self.head(self.act2(self.layers[-1](x)))

    model = filled(lib, Net().cpu())
    optimizer = lib.optim.SGD(model.parameters(), 0.05, 0.9)
    losses = [step(lib, model, optimizer) for _ in range(3)]
    names = [*model.state_dict(), *(name for name, _ in model.named_children())]
    # As numbers, for the comparison.
    return [*losses, len(model.layers), len(list(model.children())), *(ord(c) for c in " ".join(names))]


def descent_by_hand(lib: Any) -> list[float]:
    model, losses = perceptron(lib), []
    for _ in range(4):
        loss = loss_of(lib, model)
        loss.backward()
        losses.append(loss.item())
        with lib.no_grad():
            for parameter in model.parameters():
                parameter.grad /= 2
                parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return losses


def weight_decay_for_weights_alone(lib: Any) -> list[float]:
    model = perceptron(lib)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizers = [lib.optim.SGD(weights, lr=0.1, weight_decay=0.1), lib.optim.SGD(biases, lr=0.1)]
    losses = []
    for _ in range(4):
        model.zero_grad()
        loss = loss_of(lib, model)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def clipped(lib: Any) -> list[float]:
    model, seen = perceptron(lib), []
    optimizer = lib.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(lib, model)
        loss.backward()
        norm = sum((parameter.grad * parameter.grad).sum() for parameter in model.parameters()).sqrt()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.1 / norm.item())
        optimizer.step()
        seen += [loss.item(), norm.item()]
    return seen


def accumulated(lib: Any) -> list[float]:
    model, losses = perceptron(lib), []
    optimizer = lib.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        for start in range(0, 64, 16):
            loss = loss_of(lib, model, ROWS[start : start + 16], CLASSES[start : start + 16]) / 4
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def frozen_then_not(lib: Any) -> list[float]:
    model, losses = perceptron(lib), []
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    optimizer = lib.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses += [step(lib, model, optimizer) for _ in range(3)]
    model[0].requires_grad_(True)
    optimizer = lib.optim.SGD(model.parameters(), lr=0.1)
    return losses + [step(lib, model, optimizer) for _ in range(3)]


def frozen_norm(lib: Any) -> list[float]:
    nn = lib.nn
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 4))
    filled(lib, model)[1].eval()
    model[1].requires_grad_(False)
    optimizer = lib.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), 0.1)
    losses = [step(lib, model, optimizer, IMAGES, LABELS) for _ in range(3)]
    return losses + model[1].running_mean.tolist() + model[1].weight.tolist()


def hooks(lib: Any) -> list[float]:
    model, seen = perceptron(lib), []
    halved = model[0].weight.register_hook(lambda grad: grad * 0.5)
    model[0].bias.register_hook(lambda grad: seen.append(grad.sum().item()))
    rows = lib.tensor(ROWS, requires_grad=True)
    hidden = model[0](rows)
    hidden.retain_grad()
    model[2](model[1](hidden)).sum().backward()
    seen += [(grad * grad).sum().item() for grad in (rows.grad, hidden.grad, model[0].weight.grad)]
    halved.remove()
    model.zero_grad()
    loss_of(lib, model).backward()
    return [*seen, (model[0].weight.grad * model[0].weight.grad).sum().item()]


def saved_and_gone_on_with(lib: Any) -> list[float]:
    model = perceptron(lib)
    optimizer = lib.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [step(lib, model, optimizer) for _ in range(2)]
    saved = pickle.dumps([model.state_dict(), optimizer.state_dict()])
    losses += [step(lib, model, optimizer) for _ in range(2)]
    other = perceptron(lib)
    again = lib.optim.SGD(other.parameters(), lr=0.3, momentum=0.1)
    for target, state in zip((other, again), pickle.loads(saved), strict=True):
        target.load_state_dict(state)
    gone_on = [step(lib, other, again) for _ in range(2)]
    assert gone_on == losses[2:]
    return losses


def scheduled(lib: Any) -> list[float]:
    model, losses = perceptron(lib), []
    optimizer = lib.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(4):
        rate = 0.5 * 0.5**epoch
        if lib is flow:
            optimizer.lr = rate
        else:
            optimizer.param_groups[0]["lr"] = rate
        losses.append(step(lib, model, optimizer))
    return losses


def averaged_weights(lib: Any) -> list[float]:
    model = perceptron(lib)
    average, optimizer = copy.deepcopy(model), lib.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        step(lib, model, optimizer)
        with lib.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)
    return [loss_of(lib, average).item()]


PROGRAMS = [
    batches_by_numpy, convolutions, modules_in_lists, descent_by_hand, weight_decay_for_weights_alone, clipped, accumulated, frozen_then_not,
    frozen_norm, hooks, saved_and_gone_on_with, scheduled, averaged_weights,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_sees_the_same_in_both(program: Callable[[Any], list[float]]) -> None:
    ours, theirs = program(flow), program(torch)
    # Steps of float32 drift apart by roundings, which grow from step to step.
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (lambda: flow.nn.utils.clip_grad_norm_, "utils"),
        (lambda: flow.nn.Dropout(0.5), "Dropout"),
        (lambda: flow.optim.Adam, "Adam"),
        (lambda: flow.optim.lr_scheduler, "lr_scheduler"),
        (lambda: flow.optim.SGD([flow.ones(1)], 0.1).param_groups, "param_groups"),
        (lambda: flow.autograd.Function, "Function"),
        (lambda: flow.save, "save"),
        (lambda: flow.nn.Linear(1, 1).register_forward_hook(print), "register_forward_hook"),
        (lambda: flow.nn.Linear(1, 1).half(), "half"),
        (lambda: flow.nn.Linear(1, 1).weight.data, "data"),
    ],
)
def test_what_is_not_there_is_named(use: Callable[[], object], named: str) -> None:
    with pytest.raises(AttributeError, match=f"has no (attribute )?'{named}'"):
        use()
