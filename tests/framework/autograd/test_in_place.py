"""Writing in place: recorded where it can be, refused where a gradient would come out wrong."""

from __future__ import annotations

import operator as python_operator

import numpy as np
import pytest

import framework as flow
from framework.autograd import no_grad
from framework.nn import functional as F
from tests.framework.tensors import leaf

WRITES = {
    "add_": lambda t: t.add_(1.0),
    "mul_": lambda t: t.mul_(2.0),
    "copy_": lambda t: t.copy_(flow.ones(*t.shape)),
    "fill_": lambda t: t.fill_(3.0),
    "zero_": lambda t: t.zero_(),
    "+=": lambda t: t.__iadd__(1.0),
    "*=": lambda t: t.__imul__(2.0),
    "-=": lambda t: t.__isub__(1.0),
    "/=": lambda t: t.__itruediv__(2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_saved_result_written_to_is_found(write) -> None:
    x = leaf(1, 2)
    y = (x * 1).exp()
    z = y * 3
    write(y)
    with pytest.raises(
        RuntimeError, match=r"shape \[2\] that exp saved.*written in place.*version 2, saved at 1.*clone"
    ):
        z.sum().backward()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_saved_input_written_to_under_no_grad_is_found(write) -> None:
    x, weight = leaf(1, 2), leaf(3, 4)
    y = (x * weight).sum()
    with no_grad():
        write(weight)
    with pytest.raises(RuntimeError, match="that multiply saved for backward was written in place"):
        y.backward()


def test_a_write_through_a_view_is_found() -> None:
    x = leaf(1, 2)
    y = x.exp()
    with no_grad():
        y.reshape(2, 1)[0].fill_(0.0)
    with pytest.raises(RuntimeError, match="exp saved"):
        y.sum().backward()


def test_a_write_through_a_detached_tensor_is_found() -> None:
    x = leaf(1, 2)
    y = x.exp()
    y.detach().fill_(0.0)
    with pytest.raises(RuntimeError, match="exp saved"):
        y.sum().backward()


def test_weights_stepped_between_forward_and_backward_are_found() -> None:
    layer = flow.nn.Conv2d(1, 2, 3)
    optimizer = flow.optim.SGD(layer.parameters(), 0.1)
    x = flow.randn(1, 1, 5, 5).requires_grad_()
    first, second = layer(x).sum(), layer(x).sum()
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="conv2d saved for backward was written in place"):
        second.backward()


def test_what_was_not_saved_may_be_written() -> None:
    x = leaf(1, 2)
    y = x + 1
    z = y + 2
    y.mul_(5.0)  # an addition needs no values
    (z + y).sum().backward()
    assert x.grad.tolist() == [6, 6]


def test_two_forwards_before_one_backward_with_running_figures() -> None:
    # The running mean is written by each forward, but no gradient depends on it.
    layer = flow.nn.BatchNorm2d(3)
    x = flow.randn(4, 3, 2, 2)
    first, second = layer(x), layer(x * 2)
    (first * first + second).sum().backward()
    assert layer.weight.grad is not None


def test_results_are_recorded() -> None:
    x, b = leaf(1, 2), leaf(10, 20)
    y = x * 2
    before = y.node
    same = y.add_(b, alpha=3).mul_(4.0)
    assert same is y
    assert y.node is not before
    y.sum().backward()
    assert y.tolist() == [128, 256]
    assert x.grad.tolist() == [8, 8]
    assert b.grad.tolist() == [12, 12]


def test_a_tensor_without_gradient_joins_the_graph() -> None:
    b = leaf(1, 2)
    total = flow.zeros(2)
    for _ in range(3):
        total += b * 2
    total.sum().backward()
    assert b.grad.tolist() == [6, 6]
    assert total.tolist() == [6, 12]


def test_multiplying_by_itself_in_place_is_refused_as_its_factor_is_gone() -> None:
    x = leaf(3)
    y = x * 1
    y.mul_(y)
    with pytest.raises(RuntimeError, match="mul_ saved for backward was written in place"):
        y.sum().backward()


def test_adding_to_itself_in_place() -> None:
    x = leaf(3)
    y = x * 1
    y.add_(y)
    y.sum().backward()
    assert y.item() == 6
    assert x.grad.item() == 2


@pytest.mark.parametrize("write", ["add_", "sub_", "mul_", "div_", "copy_"])
def test_the_gradient_has_the_type_of_the_operand(write: str) -> None:
    b = leaf(3, 4)
    a = flow.tensor(np.array([1.0, 2.0]))
    getattr(a, write)(b)
    assert a.dtype is flow.float64
    a.sum().backward()
    assert b.grad.dtype is flow.float32


def test_leaves_and_views_are_refused() -> None:
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match=r"add_: a leaf tensor that requires a gradient.*no_grad\(\)"):
        x.add_(1.0)
    y = x * 1
    with pytest.raises(RuntimeError, match=r"mul_: writing in place to a view.*clone\(\)"):
        y.reshape(2, 1).mul_(2.0)
    with no_grad():
        x.add_(1.0)
    assert x.tolist() == [2, 3]
    assert x.is_leaf


def test_a_base_whose_views_live_is_refused() -> None:
    # The view would show the new values with the gradient of the old ones.
    x = leaf(1, 2)
    y = x * 1
    view = y.reshape(2, 1)
    with pytest.raises(RuntimeError, match=r"mul_: .* view .* clone\(\)"):
        y.mul_(2.0)
    del view
    y.mul_(2.0)
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_a_tensor_that_repeats_elements_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"add_: .*\[3\].* several elements in one place.*clone\(\)"):
        flow.zeros(1).expand(3).add_(1.0)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[3\] does not fit in place of one of \[2\]|do not broadcast"):
        flow.ones(2).add_(flow.ones(3))
    with pytest.raises(ValueError, match=r"shape \[2, 2\] does not fit in place of one of \[2\]"):
        flow.ones(2).add_(flow.ones(2, 2))
    integers, truths = flow.tensor([1, 2]), flow.tensor([True, False])
    for write, text in (
        (lambda: integers.add_(flow.ones(2)), "a int64 tensor cannot hold the result with a float32 one"),
        (lambda: integers.mul_(1.5), "a int64 tensor meets the float 1.5"),
        (lambda: integers.add_(integers, alpha=0.5), "a int64 tensor meets the float 0.5"),
        (lambda: integers.div_(2), "div_ takes floating-point operands; got flow.int64"),
        (lambda: truths.add_(integers), "a bool tensor cannot hold the result with a int64 one"),
        (lambda: truths.mul_(2), "a bool tensor cannot hold the result with the number 2"),
        (lambda: truths.sub_(truths), "a bool tensor cannot hold the result with the number -1"),
        (lambda: integers.copy_(5), "copy_ takes tensors; got int"),
        (lambda: integers.add_(None), "an operand is a tensor or a number, not NoneType"),
    ):
        with pytest.raises(TypeError, match=text):
            write()
    assert (integers.tolist(), truths.tolist()) == ([1, 2], [True, False])


def test_values() -> None:
    x = flow.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert x.add_(flow.tensor([10.0, 20.0])).tolist() == [[11, 22], [13, 24]]
    assert x.mul_(2).tolist() == [[22, 44], [26, 48]]
    assert x.sub_(flow.tensor([2.0, 4.0]), alpha=3).div_(flow.tensor([[4.0], [2.0]])).tolist() == [[4, 8], [10, 18]]
    assert x.copy_(flow.tensor([1, 2])).tolist() == [[1, 2], [1, 2]]
    assert x.transpose(0, 1).add_(flow.tensor([1.0, 0.0])).tolist() == [[2, 1], [3, 2]]
    assert x.tolist() == [[2, 3], [1, 2]]
    x[0].zero_()
    assert x.tolist() == [[0, 0], [1, 2]]
    x[:, 1].mul_(5)
    assert x.tolist() == [[0, 0], [1, 10]]


def test_numbers_are_taken_as_they_are() -> None:
    pixels = flow.tensor([3, 250], dtype=flow.uint8)
    assert pixels.sub_(2).tolist() == [1, 248]
    assert pixels.add_(2, alpha=3).tolist() == [7, 254]
    chosen = flow.tensor([True, False])
    assert chosen.add_(True).tolist() == [True, True]
    halves = flow.tensor([1.0, 2.0])
    assert halves.sub_(0.5).add_(2, alpha=-0.25).tolist() == [0, 1]


def test_operators_that_assign_write_the_tensor_itself() -> None:
    x = same = flow.tensor([1.0, 2.0])
    x += 3
    x -= 1
    x *= 4
    x /= 2
    assert x is same
    assert same.tolist() == [6, 8]
    bytes_ = flow.tensor([1, 250], dtype=flow.uint8)
    bytes_ -= flow.tensor([2, 1])
    assert bytes_.tolist() == [255, 249]
    truths = flow.tensor([True, False])
    assert truths.add_(flow.tensor([False, False])).mul_(True).tolist() == [True, False]


@pytest.mark.parametrize(
    "use",
    [lambda x, w: x * w, lambda x, w: w * x, lambda x, w: x.mul_(w), F.linear],
    ids=["multiply", "multiply, on the left", "mul_", "linear"],
)
def test_a_factor_whose_value_no_gradient_needs_may_be_written(use) -> None:
    x, weight = flow.tensor([[1.0, 2.0]]), flow.tensor([[3.0, 4.0]], requires_grad=True)
    y = use(x, weight)
    with no_grad():
        weight.zero_()
    y.sum().backward()
    assert weight.grad.tolist() == [[1, 2]]


def test_integers_have_no_gradient() -> None:
    x = leaf(1.5, 2.5)
    whole = x.to(flow.int64)
    assert not whole.requires_grad
    assert whole.is_leaf
    (x * whole).sum().backward()
    assert x.grad.tolist() == [1, 2]
    assert not flow.tensor([0, 0]).copy_(x).requires_grad


def test_relu_saves_its_result() -> None:
    x = flow.tensor([-1.0, 2.0], requires_grad=True)
    y = F.relu(x)
    y += 1.0
    with pytest.raises(RuntimeError, match="relu saved"):
        y.sum().backward()


def _square() -> flow.Tensor:
    return flow.tensor(np.arange(40_000, dtype=np.float32).reshape(200, 200))


# Views of one tensor of 200×200: large enough for kernels that use several threads.
OVERLAPPING = {
    "shifted by a row": lambda x: (x[1:], x[:-1]),
    "shifted by an element": lambda x: (x.reshape(-1)[1:], x.reshape(-1)[:-1]),
    "shifted within rows": lambda x: (x[:, 1:], x[:, :-1]),
    "transposed": lambda x: (x, x.transpose(0, 1)),
    "a row for all": lambda x: (x, x[0]),
    "an element for all": lambda x: (x, x[3, 4]),
    "every second among the first": lambda x: (x.reshape(-1)[:20_000], x.reshape(-1)[::2]),
}
APART = {
    "itself": lambda x: (x, x),
    "itself, viewed": lambda x: (x.reshape(-1), x.reshape(40_000)),
    "halves": lambda x: (x[100:], x[:100]),
    "left and right": lambda x: (x[:, 100:], x[:, :100]),
    "even and odd": lambda x: (x.reshape(-1)[::2], x.reshape(-1)[1::2]),
    "nothing": lambda x: (x[:0], x[5:5]),
    "another row for all": lambda x: (x[1:], x[0]),
    "a column for all but itself": lambda x: (x[:, 1:], x[:, :1]),
}


@pytest.mark.parametrize("write", ["add_", "mul_", "copy_"])
@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING)
def test_operands_that_lie_partly_in_the_written_memory_are_refused(views, write) -> None:
    x = _square()
    before = x.numpy().copy()
    target, operand = views(x)
    with pytest.raises(RuntimeError, match=rf"^{write}: .* lies partly in the same memory.*clone\(\)"):
        getattr(target, write)(operand)
    assert np.array_equal(x.numpy(), before)
    getattr(target, write)(operand.clone())
    assert not np.array_equal(x.numpy(), before)


@pytest.mark.parametrize("views", APART.values(), ids=APART)
def test_operands_beside_the_written_memory_are_right(views) -> None:
    target, operand = views(_square())
    expected = target.numpy() + operand.numpy()
    assert np.array_equal(target.add_(operand).numpy(), expected)


@pytest.mark.parametrize("operator", ["iadd", "isub", "imul", "itruediv"])
def test_operators_in_place_write_where_the_tensor_lies(operator: str) -> None:
    layer = flow.nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    with no_grad():
        for parameter in layer.parameters():
            written = getattr(python_operator, operator)(parameter, flow.tensor([[3.0, 4.0]]))
            assert written is parameter
    expected = getattr(np, {"iadd": "add", "isub": "subtract", "imul": "multiply", "itruediv": "divide"}[operator])
    np.testing.assert_array_equal(layer.weight.detach().numpy(), expected(before.numpy(), np.float32([[3, 4]])))
    with pytest.raises(TypeError, match=r"takes tensors; got ndarray, which flow.tensor\(\) converts"), no_grad():
        getattr(python_operator, operator)(layer.weight, np.ones((1, 2)))


def test_whole_numbers_are_not_divided_in_place() -> None:
    with pytest.raises(
        TypeError, match=r"div_ takes floating-point operands; got flow.int64; convert with .to\(flow.float32\)"
    ):
        flow.tensor([1, 2]).div_(2)
