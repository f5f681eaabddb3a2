"""Deep copies and pickles: the same values, type, class and settings, in memory of their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework import nn
from framework.optim import SGD

COPIES: list[Callable[[Any], Any]] = [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
each_copy = pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "pickle"])


class Tied(nn.Module):
    """Two linear layers with one weight, and batch normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.second(self.first(self.bn(self.conv(x), relu=True).mean((2, 3))))


def images() -> flow.Tensor:
    return flow.tensor(np.random.default_rng(0).normal(size=(4, 3, 6, 6)).astype(np.float32))


def train(model: nn.Module, optimizer: SGD, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images()), flow.tensor([0, 1, 2, 3]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@each_copy
@pytest.mark.parametrize("dtype", [flow.bool_, flow.uint8, flow.int64, flow.bfloat16, flow.float32, flow.float64])
def test_a_tensor(copied: Callable, dtype: Any) -> None:
    x = flow.tensor([[0, 1, 0], [1, 1, 0]], dtype=dtype)
    y = copied(x)
    assert (type(y), y.dtype, y.device, y.requires_grad) == (flow.Tensor, dtype, x.device, False)
    x.array.host_view()[...] = 0
    assert y.tolist() == [[0, 1, 0], [1, 1, 0]]


@each_copy
def test_odd_layouts(copied: Callable) -> None:
    x = flow.tensor(np.arange(24.0).reshape(2, 3, 4))
    for view in (x.permute(2, 0, 1), x[:, 1::2], x[0, 0, 0], x[:0], flow.ones(1, 3).expand(4, 3)):
        y = copied(view)
        np.testing.assert_array_equal(y.numpy(), view.numpy())
        y.fill_(-1.0)
    np.testing.assert_array_equal(x.numpy(), np.arange(24.0).reshape(2, 3, 4))


@each_copy
def test_parameters_keep_their_class_and_sharing(copied: Callable) -> None:
    weight, frozen = nn.Parameter(flow.ones(2)), nn.Parameter(flow.ones(2), requires_grad=False)
    again, same, still = copied([weight, weight, frozen])
    assert again is same
    assert again is not weight
    assert (type(again), again.is_leaf) == (nn.Parameter, True)
    assert (again.requires_grad, still.requires_grad) == (True, False)


def test_gradients_come_along_in_a_deep_copy_only() -> None:
    x = flow.ones(2, requires_grad=True)
    (x * 3).sum().backward()
    y = copy.deepcopy(x)
    x.grad.fill_(0.0)
    assert y.grad.tolist() == [3, 3]
    assert pickle.loads(pickle.dumps(x)).grad is None


@each_copy
def test_results_with_a_history_are_refused(copied: Callable) -> None:
    y = flow.ones(2, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"only a leaf can be deep-copied or pickled.*detach\(\) first"):
        copied(y)
    assert copied(y.detach()).tolist() == [2, 2]


class Named(flow.Tensor):
    """A tensor with attributes of its own."""

    title: str


@each_copy
def test_a_subclass_keeps_its_attributes(copied: Callable) -> None:
    x = Named(flow.ones(2).array)
    x.title = "ones"
    y = copied(x)
    assert (type(y), y.title, y.tolist()) == (Named, "ones", [1, 1])


@each_copy
def test_a_model_with_its_optimizer_goes_on_as_it_would_have(copied: Callable) -> None:
    model = Tied()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    train(model, optimizer, 3)
    before = {name: held.tolist() for name, held in model.state_dict().items()}
    twin, twins_optimizer = copied((model, optimizer))
    assert twin.second.weight is twin.first.weight
    assert [id(p) for p in twins_optimizer.params] == [id(p) for p in twin.parameters()]
    expected = train(model, optimizer, 3)
    assert {name: held.tolist() for name, held in twin.state_dict().items()} == before
    assert train(twin, twins_optimizer, 3) == expected
    assert twin.bn.num_batches_tracked.item() == 6
    model.eval()
    twin.eval()
    np.testing.assert_array_equal(twin(images()).detach().numpy(), model(images()).detach().numpy())


@each_copy
def test_a_state(copied: Callable) -> None:
    model = Tied()
    state = copied(model.state_dict())
    other = Tied()
    other.load_state_dict(state)
    assert {n: t.tolist() for n, t in other.state_dict().items()} == {n: t.tolist() for n, t in state.items()}
