"""Stochastic gradient descent: PyTorch's, step by step, and what it keeps and refuses."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.optim import SGD
from tests.framework.kernels.cases import draw
from tests.framework.tensors import leaf

VARIANTS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.05},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.05},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    {"lr": 0.0, "momentum": 0.9},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_as_pytorch_in_float64(settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="compares with torch.optim.SGD")
    start = [draw(4, 3), draw(5, seed=1), draw(seed=2)]
    mine = [flow.tensor(values, requires_grad=True) for values in start]
    theirs = [torch.tensor(values, requires_grad=True) for values in start]
    my_optimizer, their_optimizer = SGD(mine, **settings), torch.optim.SGD(theirs, **settings)
    for step in range(6):
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            # The second parameter misses its first two gradients and one later: its momentum starts late and pauses.
            if index == 1 and step in (0, 1, 4):
                a.grad = b.grad = None
                continue
            gradient = draw(*a.shape, seed=10 * step + index)
            a.grad, b.grad = flow.tensor(gradient), torch.tensor(gradient)
        my_optimizer.step()
        their_optimizer.step()
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a.detach().numpy(), b.detach().numpy(), rtol=1e-14, atol=1e-15)


def test_gradients_and_strides_are_left_alone() -> None:
    parameter = flow.tensor(draw(3, 4).T.copy()).transpose(0, 1).detach().requires_grad_()
    expected = parameter.detach().numpy() - 0.5 * 2.0
    parameter.grad = flow.full((3, 4), 2.0, dtype=flow.float64)
    optimizer = SGD([parameter], 0.5, momentum=0.9)
    optimizer.step()
    assert parameter.grad.tolist() == [[2.0] * 4] * 3
    np.testing.assert_array_equal(parameter.detach().numpy(), expected)
    assert parameter.stride() == (1, 3)


def test_a_step_is_a_write_that_backward_notices() -> None:
    x = leaf(1, 2)
    y = (x * x).sum()
    x.grad = flow.ones(2)
    SGD([x], 0.1).step()
    with pytest.raises(RuntimeError, match="written in place"):
        y.backward()


def test_zero_grad() -> None:
    x, y = leaf(1, 2), leaf(3)
    optimizer = SGD([x, y], 0.1)
    x.grad = kept = flow.ones(2)
    optimizer.zero_grad(set_to_none=False)
    assert x.grad is kept
    assert kept.tolist() == [0, 0]
    assert y.grad is None
    optimizer.zero_grad()
    assert x.grad is None


def test_its_state_moves_to_another_optimizer() -> None:
    def run(steps: int, x: flow.Tensor, optimizer: SGD) -> None:
        for _ in range(steps):
            x.grad = flow.tensor([1.0, -3.0])
            optimizer.step()

    x = leaf(1, 2)
    optimizer = SGD([x], 0.1, momentum=0.9, weight_decay=0.01)
    run(2, x, optimizer)
    y = flow.tensor(x.tolist(), requires_grad=True)
    other = SGD([y], 0.5)
    other.load_state_dict(optimizer.state_dict())
    run(3, x, optimizer)
    run(3, y, other)
    assert x.tolist() == y.tolist()


def test_a_state_is_a_copy_and_must_fit() -> None:
    x = leaf(1, 2)
    optimizer = SGD([x], 0.1, momentum=0.9)
    x.grad = flow.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.step()
    assert state["buffers"][0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="the momentum buffer of parameter 0 does not fit"):
        SGD([leaf(1, 2, 3)], 0.1).load_state_dict(state)


SETTINGS = {"lr": 0.5, "momentum": 0.25, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


@pytest.mark.parametrize(
    ("kind", "state", "text"),
    [
        (TypeError, None, "SGD takes what its own state_dict.. gave, a dict of buffers, settings; got NoneType"),
        (TypeError, {}, "got a dict of nothing"),
        (TypeError, {"state": {}, "param_groups": []}, "got a dict of state, param_groups"),
        (ValueError, {"buffers": {}, "settings": {"lr": 0.5}}, "the settings of this state lack momentum, dampening"),
        (
            ValueError,
            {"buffers": {-1: flow.ones(2)}, "settings": SETTINGS},
            "the momentum buffer of parameter -1 does not fit",
        ),
        (
            ValueError,
            {"buffers": {}, "settings": {**SETTINGS, "lr": -1}},
            "lr must be a number that is not negative; got -1",
        ),
    ],
)
def test_a_state_that_is_none_changes_nothing(kind: type[Exception], state: Any, text: str) -> None:
    x = leaf(1, 2)
    optimizer = SGD([x], 0.1, momentum=0.9)
    x.grad = flow.ones(2)
    optimizer.step()
    before = optimizer.state_dict()
    with pytest.raises(kind, match=text):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["settings"] == before["settings"]
    assert after["buffers"][0].tolist() == before["buffers"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": -0.1}, "lr must be a number that is not negative; got -0.1"),
        ({"lr": float("nan")}, "lr must be a number that is not negative; got nan"),
        ({"lr": "0.1"}, "lr must be a number that is not negative; got '0.1'"),
        ({"lr": 0.1, "dampening": None}, "dampening must be a number; got None"),
        ({"lr": 0.1, "momentum": -1}, "momentum must be a number that is not negative; got -1"),
        ({"lr": 0.1, "weight_decay": -1}, "weight_decay must be a number that is not negative; got -1"),
        ({"lr": 0.1, "nesterov": True}, "nesterov needs a momentum and no dampening"),
        (
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": True},
            "nesterov needs a momentum and no dampening",
        ),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SGD([leaf(1)], **settings)


def test_parameters_that_are_none() -> None:
    with pytest.raises(ValueError, match="SGD got no parameters"):
        SGD([], 0.1)
    with pytest.raises(TypeError, match=r"got dict. An SGD has one group of parameters: make one for each"):
        flow.optim.SGD([{"params": [flow.ones(1)], "weight_decay": 0.1}], lr=0.1)
    with pytest.raises(TypeError, match=r"an iterable of tensors, such as model.parameters\(\); got Linear"):
        flow.optim.SGD(flow.nn.Linear(3, 4), lr=0.1)
    with pytest.raises(TypeError, match=r"an iterable of tensors, such as model.parameters\(\); got Tensor"):
        SGD(leaf(1, 2), 0.1)
    with pytest.raises(TypeError, match="got Tensor, int"):
        SGD([leaf(1), 5], 0.1)
    with pytest.raises(
        ValueError, match=r"SGD moves leaves, and parameter 1 is the result of .*exp.*: give what it was made"
    ):
        SGD([leaf(1), leaf(1).exp()], 0.1)


def test_its_memory_is_named() -> None:
    x = flow.ones(1 << 19, requires_grad=True)
    optimizer = SGD([x], 0.1, momentum=0.9)
    x.grad = flow.ones(1 << 19)
    optimizer.step()
    assert any(line.split() == ["2.0", "MiB", "1", "SGD.step"] for line in flow.cpu.memory_summary().splitlines())


def test_a_parameter_given_twice_is_refused() -> None:
    p, q = leaf(1), leaf(1)
    with pytest.raises(ValueError, match="duplicate parameter: number 2 is number 0 again"):
        SGD([p, q, p], lr=0.1)


def test_a_gradient_of_another_shape_moves_nothing() -> None:
    p, q = leaf(1, 2), leaf(1, 2)
    p.grad, q.grad = flow.ones(2), flow.ones(3)
    with pytest.raises(ValueError, match=r"parameter 1 of shape \[2\] has a grad of shape \[3\]"):
        SGD([p, q], lr=0.1).step()
    assert p.tolist() == [1, 2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_gradient_of_another_type_moves_nothing(momentum: float) -> None:
    a, b = leaf(1, 2), leaf(3, 4)
    a.grad, b.grad = flow.ones(2), flow.ones(2, dtype=flow.float64)
    with pytest.raises(
        ValueError, match=r"parameter 1 of flow.float32 on cpu has a grad of flow.float64 on cpu; convert it"
    ):
        SGD([a, b], 0.1, momentum=momentum).step()
    assert a.tolist() == [1, 2]


def test_a_model_converted_under_the_optimizer_is_told() -> None:
    layer = flow.nn.Linear(2, 2)
    optimizer = SGD(layer.parameters(), 0.1, momentum=0.9)
    for parameter in layer.parameters():
        parameter.grad = flow.zeros_like(parameter)
    optimizer.step()
    layer.to(flow.float64)
    for parameter in layer.parameters():
        parameter.grad = flow.zeros_like(parameter)
    with pytest.raises(ValueError, match=r"has a momentum buffer of flow.float32 on cpu; .* make the optimizer after"):
        optimizer.step()


def test_a_state_takes_the_type_of_the_parameters() -> None:
    single, double = leaf(1), flow.tensor([1.0], dtype=flow.float64, requires_grad=True)
    optimizer = SGD([single], 0.5, momentum=0.9)
    single.grad = flow.ones(1)
    optimizer.step()
    other = SGD([double], 0.5, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    double.grad = flow.ones(1, dtype=flow.float64)
    other.step()
    assert double.item() == pytest.approx(1 - 0.5 * 1.9)


def _train(change: Callable[[SGD, list[flow.Tensor]], None], *, anew: bool) -> list[np.ndarray]:
    """The parameters after steps of which the third comes behind a `change`; `anew` looks at all in every step."""
    parameters = [flow.tensor(draw(4, 3), requires_grad=True), flow.tensor(draw(5, seed=1), requires_grad=True)]
    optimizer = SGD(parameters, 0.1, momentum=0.9, weight_decay=0.05)
    for step in range(5):
        for index, parameter in enumerate(parameters):
            parameter.grad = flow.tensor(draw(*parameter.shape, seed=10 * step + index))
        if step == 2:
            change(optimizer, parameters)
        if anew:
            optimizer._last = None
        optimizer.step()
    return [np.array(parameter.detach()) for parameter in parameters]


def _other_memory(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    parameters[0].array = flow.tensor(draw(4, 3, seed=7)).array


def _other_stride(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    assert parameters[0].grad is not None
    parameters[0].grad = flow.tensor(np.array(parameters[0].grad).T.copy()).transpose(0, 1).detach()


def _no_gradient(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    parameters[1].grad = None


def _other_settings(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    optimizer.lr, optimizer.weight_decay, optimizer.nesterov = 0.3, 0.0, True


def _no_momentum(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    optimizer.momentum = 0.0


def _momentum_of_another(optimizer: SGD, parameters: list[flow.Tensor]) -> None:
    state = optimizer.state_dict()
    state["buffers"] = {0: state["buffers"][0] * 3.0}  # the second parameter starts anew
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [_other_memory, _other_stride, _no_gradient, _other_settings, _no_momentum, _momentum_of_another]
)
def test_what_changes_between_steps_is_followed(change: Callable[[SGD, list[flow.Tensor]], None]) -> None:
    for one, two in zip(_train(change, anew=False), _train(change, anew=True), strict=True):
        np.testing.assert_array_equal(one, two)


def test_momentum_that_is_switched_on_later_starts_with_the_gradient() -> None:
    parameter = leaf(1, 2)
    optimizer = SGD([parameter], 1.0)
    for gradient, momentum, expected in (
        (1.0, 0.0, [0, 1]),
        (2.0, 0.0, [-2, -1]),
        (4.0, 0.5, [-6, -5]),
        (0.0, 0.5, [-8, -7]),
    ):
        optimizer.momentum = momentum
        parameter.grad = flow.full((2,), gradient)
        optimizer.step()
        assert parameter.tolist() == expected
        assert len(optimizer.state_dict()["buffers"]) == (momentum != 0)  # without momentum none is held


def test_a_step_like_the_last_one_looks_at_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = leaf(1, 2)
    optimizer = SGD([parameter], 1.0, momentum=0.5)
    parameter.grad = flow.ones(2)
    optimizer.step()
    monkeypatch.delattr(SGD, "_groups")
    optimizer.step()
    assert parameter.tolist() == [1 - 1 - 1.5, 2 - 1 - 1.5]
    parameter.grad = None
    with pytest.raises(AttributeError, match="_groups"):
        optimizer.step()


def test_a_gradient_that_does_not_fit_is_refused_behind_one_that_does() -> None:
    parameter = flow.tensor(draw(4, 3), requires_grad=True)
    optimizer = SGD([parameter], 0.1)
    parameter.grad = flow.tensor(draw(4, 3))
    optimizer.step()
    parameter.grad = flow.tensor(draw(3, 4))
    with pytest.raises(ValueError, match="must be the same"):
        optimizer.step()


def test_an_optimizer_can_be_copied_between_steps() -> None:
    parameter = flow.tensor(draw(4, 3), requires_grad=True)
    optimizer = SGD([parameter], 0.1, momentum=0.9)
    parameter.grad = flow.tensor(draw(4, 3))
    optimizer.step()
    copied = deepcopy(optimizer)
    for one in (optimizer, copied):
        one.params[0].grad = flow.tensor(draw(4, 3, seed=1))
        one.step()
    np.testing.assert_array_equal(copied.params[0].detach(), parameter.detach())


def test_momentum_lies_side_by_side_each_in_its_parameters_order() -> None:
    """Piece by piece it would hold memory that the next step's activations need."""
    image = flow.tensor(draw(2, 3, 3, 4), dtype=flow.float32).permute(0, 3, 1, 2).detach()
    parameters = [flow.ones(5), image, flow.ones(3, dtype=flow.float64), flow.ones(2, 3), flow.ones(7)]
    for parameter in parameters[:4]:
        parameter.grad = flow.ones(*parameter.shape, dtype=parameter.dtype)
    optimizer = SGD(parameters, 0.1, momentum=0.9)
    optimizer.step()
    parameters[4].grad = flow.ones(7)
    optimizer.step()
    vector, picture, double, matrix, late = (optimizer._buffers[index].array for index in range(5))
    assert vector.storage is picture.storage is matrix.storage
    assert len({id(array.storage) for array in (vector, double, late)}) == 3
    assert picture.stride == image.array.stride
    assert [array.ptr % 128 - vector.ptr % 128 for array in (picture, matrix)] == [0, 0]
    for index, steps in enumerate((2, 2, 2, 2, 1)):
        assert np.array(optimizer._buffers[index]).ravel().tolist() == pytest.approx(
            [1.9 if steps == 2 else 1.0] * parameters[index].numel()
        )


@pytest.mark.parametrize(("name", "value"), [("lr", "fast"), ("lr", -1), ("lr", float("nan")), ("momentum", None)])
def test_a_setting_that_is_none_is_refused_where_it_is_set(name: str, value: Any) -> None:
    optimizer = SGD([leaf(1)], 0.5)
    with pytest.raises(ValueError, match=f"{name} must be a number that is not negative; got {value!r}"):
        setattr(optimizer, name, value)
    assert (optimizer.lr, optimizer.momentum) == (0.5, 0)


def test_its_repr_shows_its_settings() -> None:
    optimizer = SGD([leaf(1), leaf(2)], 0.5, momentum=0.9)
    optimizer.lr = 0.25
    assert repr(optimizer) == (
        "SGD(2 parameters, lr=0.25, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)"
    )
