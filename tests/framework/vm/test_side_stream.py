"""Weights' gradients beside the walk: the same values, operands held until they are waited for, and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.kernels.table import Table
from framework.vm import HostStream, machine, runtime
from framework.vm.side_stream import SideStream

CPU = flow.device("cpu")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideStream]:
    """Weights' gradients of convolutions run in a thread of their own, slowly."""
    kernels = runtime(CPU)
    slow = dict(kernels.table.kernels)

    def conv2d_backward_weight(*operands, **attributes):
        time.sleep(0.02)
        kernels.table.kernels["conv2d_backward_weight"](*operands, **attributes)

    conv2d_backward_weight.outputs = 2
    slow["conv2d_backward_weight"] = conv2d_backward_weight
    table = Table("slow", slow, batch_norm_mask_bytes=lambda *_: None, max_pool2d_indices=lambda *_: ())
    stream = machine.add_stream(HostStream(CPU, "beside"))
    second = SideStream(table, stream)
    monkeypatch.setattr(type(kernels), "beside", lambda self, multiplications: second)
    monkeypatch.setattr(type(kernels), "join", lambda self: second.join())
    yield second
    machine.remove_stream(stream)


def _gradients() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    x = flow.tensor(random.standard_normal((2, 8, 6, 6)).astype(np.float32), requires_grad=True)
    weights = [
        flow.tensor(random.standard_normal((8, 8, 3, 3)).astype(np.float32) / 8, requires_grad=True) for _ in range(3)
    ]
    y = x
    for weight in weights:
        y = ops.relu(ops.conv2d(y, weight, padding=1))
    (y * y).sum().backward()
    for weight in weights:  # a second gradient is added to the first
        ops.conv2d(x, weight, padding=1).sum().backward()
    return [np.array(t.grad.numpy()) for t in (x, *weights)]


def test_gradients_are_those_of_one_stream(beside: SideStream, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = _gradients()
    monkeypatch.undo()
    for found, expected in zip(apart, _gradients(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_garbage")
def test_nothing_is_held_or_outstanding_behind_backward(beside: SideStream) -> None:
    before = flow.cpu.memory_allocated()
    _gradients()
    assert beside._held == ()
    assert machine.is_plain
    assert flow.cpu.memory_allocated() == before


def test_a_weight_that_is_no_leaf_has_its_gradient_on_the_first_stream(beside: SideStream) -> None:
    sent = beside._stream.sequence
    x, weight = flow.ones(1, 8, 4, 4), flow.ones(8, 8, 1, 1).requires_grad_()
    ops.conv2d(x, weight * 2.0).sum().backward()
    assert beside._stream.sequence == sent
    ops.conv2d(x, weight).sum().backward()
    assert beside._stream.sequence == sent + 1
