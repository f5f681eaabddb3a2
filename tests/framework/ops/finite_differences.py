"""Gradients by finite differences in float64: what backward() is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import framework as flow
from framework.autograd.function import Operation

Function = Callable[..., flow.Tensor]

_STEP = 1e-5
# Of the third derivative a relative 1e-10 is left, of the roundings 1e-11; a wrong gradient is off by far more.
_TOLERANCE = 2e-8


def check(function: Function, *values: np.ndarray) -> None:
    """Compares the gradients of every input, wanted alone and with the others, with inputs and result in several layouts.

    Raises AssertionError naming input and layout.
    """
    shape = function(*map(_leaf, values)).shape
    weights = np.random.default_rng(5).standard_normal(shape)
    for described, weight in (
        ("any gradient", weights),
        ("a repeated gradient", np.broadcast_to(np.array(0.75), shape)),
    ):
        expected = [_differences(function, values, index, weight) for index in range(len(values))]
        for layout in ("row-major", "transposed", "channels-last"):
            for wanted in ([True] * len(values), *([k == i for k in range(len(values))] for i in range(len(values)))):
                grads = _gradients(function, values, wanted, weight, layout)
                for index, (got, want) in enumerate(zip(grads, expected, strict=True)):
                    where = f"input {index} of {len(values)}, wanted {wanted}, {layout}, {described}"
                    if not wanted[index]:
                        assert got is None, f"{where}: a gradient that nobody asked for"
                        continue
                    if got is None:
                        # An input that the result does not depend on may be left out of the walk.
                        assert not np.any(want), f"{where}: no gradient"
                        continue
                    scale = max(1.0, float(np.abs(want).max(initial=0)))
                    np.testing.assert_allclose(got, want, rtol=0, atol=_TOLERANCE * scale, err_msg=where)


def walked(function: Function, *values: np.ndarray) -> set[type[Operation]]:
    """The operations whose gradients `check` compares."""
    found, stack = set(), [function(*(_leaf(value).requires_grad_() for value in values)).node]
    while stack:
        node = stack.pop()
        if node is not None and hasattr(node, "operation"):
            found.add(node.operation)
            stack += [edge[0] for edge in node.edges if edge is not None]
    return found


def _leaf(values: np.ndarray) -> flow.Tensor:
    return flow.tensor(np.asarray(values, np.float64))


def _differences(function: Function, values: tuple[np.ndarray, ...], index: int, weight: np.ndarray) -> np.ndarray:
    """d(Σ weight · function) / d(values[index]), by central differences."""
    gradient = np.zeros(values[index].shape)
    for place in np.ndindex(*values[index].shape):
        sums = []
        for step in (_STEP, -_STEP):
            moved = [np.array(v, np.float64) for v in values]
            moved[index][place] += step
            sums.append(float(np.sum(weight * function(*map(_leaf, moved)).numpy())))
        gradient[place] = (sums[0] - sums[1]) / (2 * _STEP)
    return gradient


def _gradients(
    function: Function, values: tuple[np.ndarray, ...], wanted: list[bool], weight: np.ndarray, layout: str
) -> list[Any]:
    leaves, inputs, orders = [], [], []
    for value, want in zip(values, wanted, strict=True):
        order = _order(value.ndim, layout)
        leaf = _leaf(value.transpose(order)).requires_grad_(want)
        inverse = np.argsort(order).tolist()
        leaves.append(leaf)
        inputs.append(leaf if layout == "row-major" else leaf.permute(inverse))
        orders.append(inverse)
    root = function(*inputs)
    order = _order(weight.ndim, layout)
    gradient = _gradient_tensor(weight, order)
    result = root if layout == "row-major" else root.permute(order)
    result.backward(gradient)
    return [
        None if leaf.grad is None else leaf.grad.numpy().transpose(inverse)
        for leaf, inverse in zip(leaves, orders, strict=True)
    ]


def _gradient_tensor(weight: np.ndarray, order: list[int]) -> flow.Tensor:
    if weight.ndim and not any(weight.strides):
        return _leaf(weight.flat[0] if weight.size else 0.0).expand(*[weight.shape[d] for d in order])
    return _leaf(weight.transpose(order))


def _order(ndim: int, layout: str) -> list[int]:
    """The order of dimensions in memory."""
    if layout == "row-major":
        return list(range(ndim))
    return [0, 2, 3, 1] if layout == "channels-last" and ndim == 4 else list(range(ndim))[::-1]
