"""Operators: with NumPy's numbers on either side, comparisons with anything, and arrays refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import framework as flow
from tests.framework.tensors import leaf

OPERATORS = [operator.add, operator.sub, operator.mul, operator.truediv]


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.float64(2), np.int64(2)], ids=lambda n: type(n).__name__)
@pytest.mark.parametrize("operation", OPERATORS)
def test_a_number_on_either_side_keeps_the_gradient(operation: Callable, number: Any) -> None:
    x = leaf(1, 4)
    for result in (operation(number, x), operation(x, number)):
        assert isinstance(result, flow.Tensor)
        assert result.dtype is flow.float32
        result.sum().backward()
    values = np.array([1, 4])
    assert operation(number, x).tolist() == operation(2, values).tolist()
    assert operation(x, number).tolist() == operation(values, 2).tolist()
    by_hand = {"add": [2, 2], "sub": [0, 0], "mul": [4, 4], "truediv": [0.5 - 2, 0.5 - 2 / 16]}
    assert x.grad.tolist() == by_hand[operation.__name__]


@pytest.mark.parametrize("operation", [*OPERATORS, operator.matmul, operator.eq, operator.ne])
def test_an_array_on_either_side_is_refused(operation: Callable) -> None:
    x, values = flow.ones(3, 3), np.ones((3, 3), np.float32)
    for a, b in ((values, x), (x, values)):
        with pytest.raises(
            TypeError, match=r"got (ndarray, which flow.tensor\(\) converts|ndarray and Tensor|Tensor and ndarray)"
        ):
            operation(a, b)


def test_a_numpy_float_does_not_meet_integers() -> None:
    with pytest.raises(TypeError, match="a int64 tensor meets the float"):
        np.float32(0.5) * flow.tensor([1, 2])


def test_unequal_elements() -> None:
    x = flow.tensor([1.0, 2.0, float("nan")], requires_grad=True)
    assert (x != 2).tolist() == [True, False, True]
    assert (x != x).tolist() == [False, False, True]
    assert (x != flow.tensor([[1.0], [2.0]])).tolist() == [[False, True, True], [True, False, True]]
    assert (np.float32(2) != x).tolist() == [True, False, True]
    assert (x != 1).dtype is flow.bool_
    assert (flow.tensor([1, 2], dtype=flow.uint8) != flow.tensor([1, 3])).tolist() == [False, True]
    assert not (x != 1).requires_grad


@pytest.mark.parametrize("foreign", [None, "a", [1.0, 2.0], object()], ids=lambda f: type(f).__name__)
def test_nothing_foreign_equals_a_tensor(foreign: Any) -> None:
    x = flow.tensor([1.0, 2.0])
    assert (x == foreign) is False
    assert (foreign == x) is False
    assert (x != foreign) is True
    assert x not in [foreign]
    assert x in [foreign, x]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (np.ones(2, np.float32), np.float64(2), flow.float32),
        (np.ones(2, np.int32), np.int64(2), flow.int32),
        (np.ones(2, np.int32), np.float64(2), flow.float64),
        (np.ones(2, np.bool_), np.int64(2), flow.int64),
        (np.ones(2, np.float32), np.ones(2), flow.float64),
        (np.float32(1), np.float64(2), flow.float64),
    ],
)
def test_one_without_dimensions_does_not_widen_one_of_its_kind(a, b, expected) -> None:
    for first, second in ((a, b), (b, a)):
        assert (flow.tensor(first) * flow.tensor(second)).dtype is expected
    scale = flow.tensor(np.float64(3), requires_grad=True)
    (flow.ones(2) * scale).sum().backward()
    assert (scale.grad.dtype, scale.grad.item()) == (flow.float64, 2)
