"""A convolution and its batch normalisation as one operation: what the two give, and when they are two after all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.vm import machine


def _layers(seed: int = 1) -> tuple[flow.nn.Conv2d, flow.nn.BatchNorm2d]:
    flow.manual_seed(seed)
    return flow.nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), flow.nn.BatchNorm2d(16)


def _run(call: Any, *, residual: bool, relu: bool) -> list[np.ndarray]:
    convolution, norm = _layers()
    random = np.random.default_rng(2)
    x, added = (
        flow.tensor(random.standard_normal(shape).astype(np.float32), requires_grad=True)
        for shape in ((2, 8, 6, 6), (2, 16, 3, 3))
    )
    y = call(convolution, norm, x, residual=added if residual else None, relu=relu)
    (y * y).sum().backward()
    tensors = [convolution.weight, norm.weight, norm.bias, x, *([added] if residual else [])]
    values = [t.grad.numpy() for t in tensors]
    return [y.detach().numpy(), norm.running_mean.numpy(), norm.running_var.numpy(), *values]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients_are_those_of_the_two(residual: bool, relu: bool) -> None:
    one = _run(lambda c, n, x, **how: n.after(c, x, **how), residual=residual, relu=relu)
    two = _run(lambda c, n, x, **how: n(c(x), **how), residual=residual, relu=relu)
    for found, expected in zip(one, two, strict=True):
        np.testing.assert_array_equal(found, expected)


def _nodes(y: flow.Tensor) -> list[str]:
    names, node = [], y.node
    while isinstance(getattr(node, "operation", None), type):
        names.append(node.operation.name)
        node = node.edges[0][0] if node.edges[0] else None
    return names


def test_what_forbids_one_operation() -> None:
    convolution, norm = _layers()
    x = flow.ones(2, 8, 6, 6)
    assert _nodes(norm.after(convolution, x)) == ["conv2d_batch_norm"]
    assert int(norm.num_batches_tracked) == 1
    with_bias = flow.nn.Conv2d(8, 16, 1)
    assert _nodes(norm.after(with_bias, x)) == ["batch_norm", "conv2d"]
    wrapped = flow.nn.Sequential(convolution)
    assert _nodes(norm.after(wrapped, x)) == ["batch_norm", "conv2d"]
    replaced = convolution.forward
    convolution.forward = lambda given: replaced(given * 2.0)
    assert _nodes(norm.after(convolution, x)) == ["batch_norm", "conv2d"]
    norm.eval()
    assert _nodes(norm.after(convolution, x)) == ["batch_norm", "conv2d"]


def test_memory_and_work_are_labelled_by_both_modules() -> None:
    class Block(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = _layers()

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return self.norm.after(self.conv, x, relu=True)

    said: list[str] = []
    with machine.observed(lambda instruction, run: (said.append(repr(instruction)), run())):
        Block()(flow.ones(2, 8, 6, 6)).sum().backward()
    assert [line.split(" in ")[-1] for line in said if "conv2d" in line or "batch_norm" in line] == [
        "conv: conv2d",
        "norm: batch_norm",
        "norm.batch_norm: backward",
        "conv.conv2d: backward",
    ]


def test_errors_are_those_of_the_two() -> None:
    convolution, norm = _layers()
    with pytest.raises(ValueError, match=r"conv2d of images \[2, 4, 6, 6\]"):
        norm.after(convolution, flow.ones(2, 4, 6, 6))
    with pytest.raises(ValueError, match="batch_norm over 16 channels got a weight of shape"):
        flow.nn.BatchNorm2d(8).after(convolution, flow.ones(2, 8, 6, 6))
    with pytest.raises(ValueError, match="more than one value per channel"):
        norm.after(convolution, flow.ones(1, 8, 1, 1))
    x = flow.ones(2, 8, 6, 6).requires_grad_()
    y = norm.after(convolution, x)
    with flow.no_grad():
        convolution.weight.fill_(0)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()
