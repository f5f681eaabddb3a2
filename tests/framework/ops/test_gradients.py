"""The gradient of every operation, through its public function, against finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.autograd.function import Operation
from framework.nn import functional as F
from tests.framework.kernels.cases import draw
from tests.framework.ops import finite_differences


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return draw(*shape, seed=seed, low=0.5)


def off_zero(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that a small step does not carry over 0, where a ReLU has its kink."""
    values = draw(*shape, seed=seed)
    return np.where(np.abs(values) < 0.01, 0.5, values)


def apart(*shape: int) -> np.ndarray:
    """Numbers of which no two are close, so that a small step leaves every maximum where it is."""
    return np.random.default_rng(7).permutation(int(np.prod(shape))).reshape(shape) / 10.0


def batch_norm(relu: bool, training: bool) -> Any:
    def function(x: flow.Tensor, weight: flow.Tensor, bias: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        mean, variance = flow.from_numpy(draw(3, seed=8)), flow.from_numpy(positive(3, seed=9))
        return F.batch_norm(x, mean, variance, weight, bias, training=training, residual=residual, relu=relu)

    return function


def conv2d_batch_norm(x: flow.Tensor, kernel: flow.Tensor, *others: flow.Tensor) -> flow.Tensor:
    mean, variance = flow.from_numpy(draw(3, seed=8)), flow.from_numpy(positive(3, seed=9))
    weight, bias, residual = others
    return ops.conv2d_batch_norm(x, kernel, mean, variance, weight, bias, residual=residual)


def conv2d_batch_norm_sum(*inputs: flow.Tensor) -> flow.Tensor:
    branches = []
    for x, kernel, weight, bias in (inputs[:4], inputs[4:]):
        mean, variance = flow.from_numpy(draw(3, seed=8)), flow.from_numpy(positive(3, seed=9))
        branches.append(ops.Branch(x, kernel, mean, variance, weight, bias))
    return ops.conv2d_batch_norm_sum(*branches)


def cross_entropy(logits: flow.Tensor) -> flow.Tensor:
    return F.cross_entropy(logits, flow.tensor([2, 0, 1, 2]))


NORMALISED = (draw(2, 3, 2, 4), draw(3, seed=1), draw(3, seed=2), draw(2, 3, 2, 4, seed=3) + 0.3)
GROUPED = {"stride": (1, 2), "padding": (1, 0), "dilation": (1, 2), "groups": 2}

CASES: dict[str, tuple[Any, ...]] = {
    "add": (flow.add, draw(2, 3), draw(2, 3, seed=1)),
    "add, broadcast": (flow.add, draw(2, 3, 2, 2), draw(3, 1, 1, seed=1)),
    "add, both broadcast": (flow.add, draw(4, 1, 2), draw(3, 1, seed=1)),
    "add, to 0-d": (flow.add, draw(2, 3), draw(seed=1)),
    "add, a number": (lambda a: 2.5 + a + 1, draw(2, 3)),
    "subtract": (flow.subtract, draw(2, 3), draw(3, seed=1)),
    "subtract from a number": (lambda a: 2.5 - a, draw(2, 3)),
    "multiply": (flow.multiply, draw(2, 3), draw(2, 3, seed=1)),
    "multiply, broadcast": (flow.multiply, draw(2, 3, 2, 2), draw(3, 1, 1, seed=1)),
    "multiply, a number": (lambda a: a * 3.5, draw(2, 3)),
    "multiply with itself": (lambda a: a * a, draw(2, 3)),
    "divide": (flow.divide, draw(2, 3), positive(2, 3, seed=1)),
    "divide, broadcast": (flow.divide, draw(3, 1), positive(2, 1, 4, seed=1)),
    "divide by a number": (lambda a: a / 4, draw(2, 3)),
    "divide a number": (lambda a: 4 / a, positive(2, 3)),
    "negative": (lambda a: -a, draw(2, 3)),
    "exp": (flow.exp, draw(2, 3)),
    "log": (flow.log, positive(2, 3)),
    "sqrt": (flow.sqrt, positive(2, 3)),
    "relu": (flow.relu, off_zero(2, 3, 2, 2)),
    "sum": (flow.sum, draw(2, 3, 4)),
    "sum, dimensions": (lambda a: flow.sum(a, (0, -1)), draw(2, 3, 4)),
    "sum, kept": (lambda a: flow.sum(a, 1, keepdim=True), draw(2, 3, 4)),
    "mean": (flow.mean, draw(2, 3, 4)),
    "mean, dimensions": (lambda a: flow.mean(a, (2, 0)), draw(2, 3, 4)),
    "mean, kept": (lambda a: flow.mean(a, (1, 2), keepdim=True), draw(2, 3, 4)),
    "matmul": (flow.matmul, draw(3, 2), draw(2, 4, seed=1)),
    "matmul, batches": (flow.matmul, draw(2, 1, 3, 2), draw(3, 2, 2, seed=1)),
    "linear": (F.linear, draw(3, 4), draw(2, 4, seed=1), draw(2, seed=2)),
    "linear without bias": (F.linear, draw(3, 4), draw(2, 4, seed=1)),
    "reshape": (lambda a: flow.reshape(a, 4, -1), draw(2, 3, 2)),
    "flatten": (lambda a: flow.flatten(a, 1), draw(2, 3, 1, 1)),
    "permute": (lambda a: flow.permute(a, 2, 0, 1), draw(2, 3, 4)),
    "transpose": (lambda a: flow.transpose(a, 0, -1), draw(2, 3, 4)),
    "expand": (lambda a: a.expand(2, 3, 4), draw(3, 1)),
    "index": (lambda a: a[1:, ::2, None, 1], draw(3, 3, 2)),
    "index, all": (lambda a: a[...], draw(2, 3)),
    "clone": (flow.clone, draw(2, 3)),
    "contiguous": (lambda a: a.transpose(0, 1).contiguous(), draw(2, 3)),
    "add_": (lambda a, b: (a * 1).add_(b), draw(2, 3), draw(3, seed=1)),
    "add_, scaled": (lambda a, b: (a * 1).add_(b, alpha=-2.5), draw(2, 3), draw(2, 3, seed=1)),
    "add_, a number": (lambda a: (a * 1).add_(2.0, alpha=3), draw(2, 3)),
    "mul_": (lambda a, b: (a * 1).mul_(b), draw(2, 3), draw(2, 3, seed=1)),
    "mul_, broadcast": (lambda a, b: (a * 1).mul_(b), draw(2, 3), draw(2, 1, seed=1)),
    "mul_, a number": (lambda a: (a * 1).mul_(2.0), draw(2, 3)),
    "sub_": (lambda a, b: (a * 1).sub_(b, alpha=2.5), draw(2, 3), draw(3, seed=1)),
    "div_": (lambda a, b: (a * 1).div_(b), draw(2, 3), positive(2, 3, seed=1)),
    "div_, broadcast": (lambda a, b: (a * 1).div_(b), draw(2, 3), positive(2, 1, seed=1)),
    "div_, a number": (lambda a: (a * 1).div_(3.0), draw(2, 3)),
    "copy_": (lambda a, b: (a * 1).copy_(b), draw(2, 3), draw(3, seed=1)),
    "fill_, then more": (lambda a: (a * 1).fill_(2.0) + a, draw(2, 3)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), draw(2, 2, 4, 3), draw(3, 2, 3, 3, seed=1), draw(3, seed=2)),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, **GROUPED), draw(1, 4, 4, 5), draw(4, 2, 3, 2, seed=1)),
    "conv2d, 1x1": (F.conv2d, draw(3, 4, 1, 1), draw(2, 4, 1, 1, seed=1), draw(2, seed=2)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), apart(2, 2, 5, 4)),
    "max_pool2d, oblong": (lambda x: F.max_pool2d(x, (2, 1)), apart(1, 2, 4, 3)),
    "global_avg_pool2d": (F.global_avg_pool2d, draw(2, 3, 2, 3)),
    "conv2d_batch_norm": (conv2d_batch_norm, draw(2, 2, 2, 4, seed=4), draw(3, 2, 1, 1, seed=5), *NORMALISED[1:]),
    "conv2d_batch_norm_sum": (
        conv2d_batch_norm_sum, draw(2, 2, 2, 4, seed=4), draw(3, 2, 1, 1, seed=5), *NORMALISED[1:3],
        draw(2, 3, 2, 4, seed=6), draw(3, 3, 1, 1, seed=7), draw(3, seed=8), draw(3, seed=9),
    ),
    "batch_norm": (batch_norm(False, True), *NORMALISED),
    "batch_norm + relu": (batch_norm(True, True), *NORMALISED),
    "batch_norm, eval": (batch_norm(False, False), *NORMALISED),
    "batch_norm + relu, eval": (batch_norm(True, False), *NORMALISED),
    # The product hands on a gradient that is nobody else's, and it is the residual's: that of x must not take its place.
    "batch_norm, residual, then more": (lambda x, residual: F.batch_norm(x, None, None, training=True, residual=residual) * 3.0, draw(2, 3, 2, 4), draw(2, 3, 2, 4, seed=1)),
    "batch_norm, x alone": (lambda x: F.batch_norm(x, None, None, training=True, relu=True), draw(2, 3, 2, 4)),
    "cross_entropy": (cross_entropy, draw(4, 3)),
}  # fmt: skip

# They take more than one device, rank or type: cuda/test_pinned.py, nn/test_data_parallel.py and the test of conversion below
# have their gradients.
ELSEWHERE = {"Move", "SyncBatchNorm", "_AllReduce", "Convert"}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    function, *values = CASES[name]
    finite_differences.check(function, *values)


def test_conversion_passes_the_gradient_in_the_type_of_the_input() -> None:
    # Finite differences in float32 would say nothing.
    a = flow.tensor(draw(2, 3), requires_grad=True)
    b = a.to(flow.float32)
    b.backward(flow.tensor(np.arange(6.0).reshape(2, 3)).to(flow.float32))
    assert a.grad.dtype is flow.float64
    assert a.grad.tolist() == [[0, 1, 2], [3, 4, 5]]
    mixed = flow.tensor([1.0, 2.0], requires_grad=True)
    (mixed * flow.tensor(np.array([3.0, 4.0]))).sum().backward()
    assert mixed.grad.dtype is flow.float32
    assert mixed.grad.tolist() == [3, 4]


def test_every_operation_with_a_gradient_is_checked() -> None:
    differentiable = {
        operation for operation in _subclasses(Operation)
        if operation.__module__.startswith("framework.") and hasattr(operation, "name")
        and operation.backward is not Operation.backward
    }  # fmt: skip
    checked = set().union(*(finite_differences.walked(function, *values) for function, *values in CASES.values()))
    assert {o.__name__ for o in differentiable} - ELSEWHERE == {o.__name__ for o in checked}


def test_the_gradient_of_a_kink_is_0() -> None:
    x = flow.tensor([0.0, -0.0, 1.0], requires_grad=True)
    flow.relu(x).sum().backward()
    assert x.grad.tolist() == [0, 0, 1]


def _subclasses(base: type) -> set[type]:
    found: set[type] = set()
    for child in base.__subclasses__():
        found |= {child} | _subclasses(child)
    return found
