"""Gradients are added up in place where nobody else holds the memory: nobody else's numbers may ever change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.nn import functional as F
from framework.vm import Array, Runtime, machine, runtime
from tests.framework.tensors import leaf


class Both(Operation):
    """a + b, whose backward hands the same new array to both inputs."""

    name = "both"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, b: Array) -> Array:
        out = kernels.empty_like(a)
        kernels.add(out, a, b)
        return out

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array, Array]:
        made = kernels.empty_like(grad)
        kernels.copy(made, grad)
        return made, made


class BothAsViews(Both):
    """The same, as two views of the new array."""

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array, Array]:
        made, _ = Both.backward(node, kernels, grad)
        return made.view(made.shape, made.stride), made.view(made.shape, made.stride)


@pytest.mark.parametrize("operation", [Both, BothAsViews])
@pytest.mark.parametrize("order", ["before", "after"])
def test_one_array_for_two_inputs(operation: type[Operation], order: str) -> None:
    x, y = leaf(1, 2), leaf(1, 2)
    a, b = x * 2, y * 2
    if order == "before":
        more = [a * 3, b * 5]
        total = apply(operation, a, b)
    else:
        total = apply(operation, a, b)
        more = [a * 3, b * 5]
    (total + more[0] + more[1]).sum().backward()
    assert x.grad.tolist() == [8, 8]
    assert y.grad.tolist() == [12, 12]


@pytest.mark.parametrize("operation", [Both, BothAsViews])
def test_one_array_for_two_leaves(operation: type[Operation]) -> None:
    x, y = leaf(1, 2), leaf(1, 2)
    apply(operation, x, y).sum().backward()
    (x * 10).sum().backward()
    assert x.grad.tolist() == [11, 11]
    assert y.grad.tolist() == [1, 1]


@pytest.mark.parametrize("operation", [Both, BothAsViews])
def test_one_array_for_one_leaf_twice(operation: type[Operation]) -> None:
    x = leaf(1, 2)
    apply(operation, x, x).sum().backward()
    (x * 10).sum().backward()
    assert x.grad.tolist() == [12, 12]


def test_add_hands_its_gradient_to_both_sides() -> None:
    x, y = leaf(1, 2), leaf(1, 2)
    a, b = x * 2, y * 2
    (a + b + a * 3 + b * 5 + (a + a)).sum().backward()
    assert x.grad.tolist() == [12, 12]
    assert y.grad.tolist() == [12, 12]


def test_two_leaves_of_one_addition_do_not_share_a_gradient() -> None:
    x, y = leaf(1), leaf(2)
    (x + y).sum().backward()
    x.grad.fill_(9.0)
    assert y.grad.tolist() == [1]
    (x * 2).sum().backward()
    assert y.grad.tolist() == [1]


def test_a_batch_norm_residual_and_its_image() -> None:
    # Without a ReLU the residual's gradient is the incoming array itself.
    x, shortcut = flow.randn(4, 2, 3, 3).requires_grad_(), flow.randn(4, 2, 3, 3).requires_grad_()
    inner = shortcut * 1
    y = flow.nn.functional.batch_norm(x, None, None, training=True, residual=inner)
    (y + inner * 3).sum().backward()
    np.testing.assert_allclose(shortcut.grad.numpy(), 4)
    np.testing.assert_allclose(x.grad.numpy(), 0, atol=1e-5)


def test_the_callers_gradient_is_left_alone() -> None:
    x = leaf(1, 2)
    given = flow.tensor([3.0, 4.0])
    (x * 1).backward(given)
    x.backward(given)
    x.backward(given)
    assert given.tolist() == [3, 4]
    assert x.grad.tolist() == [9, 12]
    x.grad.fill_(0.0)
    assert given.tolist() == [3, 4]


def test_an_expanded_gradient_is_not_added_into() -> None:
    # sum() sends back one number, repeated by a stride of 0.
    x = flow.ones(2, 3, requires_grad=True)
    y = x * 1
    (y.sum() + (y * 2).sum() + y.sum()).backward()
    assert x.grad.tolist() == [[4, 4, 4]] * 2
    assert x.grad.stride() == (3, 1)
    z = flow.ones(2, 3, requires_grad=True)
    z.sum().backward()
    z.sum().backward()
    assert z.grad.tolist() == [[2, 2, 2]] * 2
    z.mean().backward()
    assert z.grad.tolist()[0][0] == pytest.approx(2 + 1 / 6)


def test_a_new_array_that_is_expanded_is_not_added_into() -> None:
    # mean() makes a new, small array and sends it back repeated: new, but not whole.
    x = flow.ones(2, 3, requires_grad=True)
    for times in (1, 2):
        x.mean().backward()
        np.testing.assert_allclose(x.grad.numpy(), times / 6, rtol=1e-6)
    y = flow.ones(2, 3, requires_grad=True)
    z = y * 1
    ((z * flow.tensor([1.0, 2.0, 3.0])).sum() + z.mean() + z.sum()).backward()
    np.testing.assert_allclose(y.grad.numpy(), [[2 + 1 / 6, 3 + 1 / 6, 4 + 1 / 6]] * 2, rtol=1e-6)


def test_an_expanded_gradient_given_by_the_caller() -> None:
    x = flow.ones(2, 3, requires_grad=True)
    given = flow.ones(1, 1).expand(2, 3)
    x.backward(given)
    x.backward(given)
    assert x.grad.tolist() == [[2, 2, 2]] * 2
    assert given.tolist() == [[1, 1, 1]] * 2


def test_a_hook_may_keep_the_gradient_of_a_leaf() -> None:
    x = leaf(1)
    kept = []
    x.register_hook(lambda g: kept.append(g))
    (x * 2).sum().backward()
    (x * 3).sum().backward()
    assert [g.item() for g in kept] == [2, 3]
    assert x.grad.item() == 5
    x.grad.fill_(0.0)
    assert kept[1].item() == 3


def test_a_hook_may_keep_the_gradient_on_its_way() -> None:
    x = leaf(1)
    kept = []
    y = x * 1
    y.register_hook(lambda g: kept.append(g))
    z = y.reshape(1, 1)
    z.register_hook(lambda g: kept.append(g))
    (z * 2).sum().backward()
    (x * 3).sum().backward()
    assert [g.item() for g in kept] == [2, 2]
    assert x.grad.item() == 5


def test_a_hook_may_return_a_tensor_that_it_keeps() -> None:
    x = leaf(1)
    mine = flow.tensor([7.0])
    x.register_hook(lambda g: mine)
    (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert x.grad.item() == 14
    assert mine.item() == 7


def test_a_hook_may_return_another_leafs_gradient() -> None:
    x, y = leaf(1), leaf(1)
    (y * 5).sum().backward()
    x.register_hook(lambda g: y.grad)
    (x * 2).sum().backward()
    x.grad.fill_(0.0)
    assert y.grad.item() == 5


def test_retained_gradients_are_copies() -> None:
    x = leaf(1)
    a, b = x * 1, x * 1
    a.retain_grad()
    b.retain_grad()
    total = a + b
    total.retain_grad()
    given = flow.tensor([3.0])
    total.backward(given)
    for tensor in (a, b, total):
        assert tensor.grad.tolist() == [3]
        tensor.grad.fill_(0.0)
    assert given.tolist() == [3]
    assert x.grad.tolist() == [6]


def test_a_gradient_that_was_taken_away_is_not_added_into() -> None:
    x = leaf(1)
    (x * 2).sum().backward()
    taken, x.grad = x.grad, None
    (x * 3).sum().backward()
    assert taken.item() == 2
    assert x.grad.item() == 3


def test_a_second_backward_through_a_retained_graph() -> None:
    x = leaf(1, 2)
    y = x * 3
    seen: list[flow.Tensor] = []
    y.register_hook(lambda g: seen.append(g))
    loss = (y * y).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2 * first.numpy())
    np.testing.assert_array_equal(seen[0].numpy(), seen[1].numpy())


def random_image_graph(seed: int, dtype: Any, *, watched: bool) -> tuple[list[flow.Tensor], list[np.ndarray]]:
    """Gradients of a random graph of layers over images, whose results are used once, twice or often.

    Where it is `watched` a hook on each result looks on: gradients are then never written in place nor handed on in parts.
    """
    random, functional = np.random.default_rng(seed), flow.nn.functional
    shape = (2, 16, 18, 16)  # large enough for the device's fast kernels

    def drawn(*extents: int) -> flow.Tensor:
        return flow.tensor(random.standard_normal(extents), dtype=dtype).requires_grad_()

    leaves = [drawn(*shape)]
    tensors = [functional.conv2d(leaves[0], flow.tensor(np.eye(16)[:, :, None, None], dtype=dtype))]
    for _ in range(10):
        a, b = (tensors[i] for i in random.integers(max(0, len(tensors) - 4), len(tensors), size=2))
        kind = random.integers(7)
        if kind <= 2:
            weight, bias = drawn(16), drawn(16)
            leaves += [weight, bias]
            relu, residual = bool(random.integers(2)), b if random.integers(2) else None
            made = functional.batch_norm(a, None, None, weight, bias, training=True, residual=residual, relu=relu)
        elif kind == 3:
            filters = drawn(16, 16, 1, 1)
            leaves.append(filters)
            made = functional.conv2d(a, filters * 0.3)
        elif kind == 4:
            made = a + b
        elif kind == 5:
            made = a.permute(0, 2, 3, 1).reshape(2, 18, 16, 16).permute(0, 3, 1, 2)
        else:
            made = a.relu()
        tensors.append(made)
    if watched:
        for tensor in tensors:
            tensor.register_hook(lambda gradient: None)
    total = tensors[-1] + tensors[-2] + tensors[-4]
    (total * flow.tensor(random.standard_normal(shape), dtype=dtype)).sum().backward()
    return leaves, [np.zeros(t.shape) if t.grad is None else t.grad.numpy().astype(np.float64) for t in leaves]


@pytest.mark.parametrize("seed", range(25))
def test_writing_over_gradients_changes_no_number(seed: int) -> None:
    for dtype, tolerance in ((flow.float64, 1e-10), (flow.float32, 2e-4)):
        _, plain = random_image_graph(seed, dtype, watched=False)
        _, watched = random_image_graph(seed, dtype, watched=True)
        for index, (got, expected) in enumerate(zip(plain, watched, strict=True)):
            atol = tolerance * max(1.0, np.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=f"leaf {index}, {dtype}")


def test_what_leaves_hold_after_one_backward_is_not_written_by_the_next() -> None:
    for watched in (False, True):
        leaves, before = random_image_graph(3, flow.float64, watched=watched)
        random_image_graph(4, flow.float64, watched=watched)
        for leaf_, values in zip(leaves, before, strict=True):
            assert leaf_.grad is None or np.array_equal(leaf_.grad.numpy(), values)


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_give_the_sum_over_their_paths(seed: int) -> None:
    """Linear graphs over every way to share and pass on: each leaf's gradient is known exactly, in integers."""
    random = np.random.default_rng(seed)
    leaves = [flow.ones(2, 3, requires_grad=True) for _ in range(3)]
    tensors = list(leaves)
    weights = [np.eye(3)[i] for i in range(3)]
    kept: list[tuple[flow.Tensor, list]] = []
    for _ in range(25):
        i, j = random.integers(len(tensors), size=2)
        kind = random.integers(7)
        a, b, w = tensors[i], tensors[j], weights[i].copy()
        if kind == 0:
            made, w = a + b, w + weights[j]
        elif kind == 1:
            made, w = apply(Both if random.integers(2) else BothAsViews, a, b), w + weights[j]
        elif kind == 2:
            made = a.transpose(0, 1).reshape(3, 2).transpose(0, 1)
        elif kind == 3:
            made, w = a - b, w - weights[j]
        elif kind == 4:
            made, w = a * 2, w * 2
        elif kind == 5:
            made = a.clone()
        else:
            made, w = a[:, :] + b.reshape(2, 3), w + weights[j]
        made.register_hook(lambda g: kept.append((g, g.tolist())))
        tensors.append(made)
        weights.append(w)
    total = tensors[-1] + tensors[-2] + tensors[-5]
    expected = weights[-1] + weights[-2] + weights[-5]
    for times in (1, 2):
        total.sum().backward(retain_graph=True)
        for tensor, weight in zip(leaves, expected, strict=True):
            got = 0 if tensor.grad is None else tensor.grad.numpy()
            np.testing.assert_array_equal(got, np.zeros((2, 3)) + weight * times)
    for gradient, values in kept:
        assert gradient.tolist() == values, "a gradient that a hook kept was changed later"


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_an_operation_may_take_the_parts_of_a_gradient(uses: int, relu: bool, hooked: bool) -> None:
    grads, seen = [], []
    for spread in (False, True):
        flow.manual_seed(3)
        x, residual = (flow.randn(2, 8, 3, 3).requires_grad_() for _ in range(2))
        weights = [flow.randn(2, 8, 3, 3) for _ in range(uses)]
        y = ops.batch_norm(x, None, None, training=True, residual=residual, relu=relu)
        if hooked:
            y.register_hook(lambda grad: seen.append(grad.numpy().copy()))
        total = sum((weights[k] for k in range(1, uses)), weights[0])
        result = sum((y * w for w in weights), flow.zeros(1)) if spread else y * total
        result.sum().backward()
        grads.append((x.grad.numpy(), residual.grad.numpy()))
    for one, parts in zip(*grads, strict=True):
        np.testing.assert_allclose(parts, one, rtol=1e-4, atol=1e-5)
    if hooked:
        np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5, atol=1e-6)


def test_two_parts_cost_no_addition() -> None:
    x = flow.randn(2, 8, 3, 3).requires_grad_()
    y = ops.batch_norm(x, None, None, training=True, relu=True)
    result = ops.relu(y) * ops.relu(y)
    issued: list[str] = []
    with machine.observed(lambda instruction, run: (issued.append(instruction.kernel.__name__), run())):
        result.sum().backward()
    assert "add" not in issued
    assert "batch_norm_backward" in issued


def test_a_gradient_that_was_given_expanded_is_added_to_element_by_element() -> None:
    x, factors, given = leaf(1, 1, 1), flow.tensor([1.0, 2.0, 3.0]), flow.ones(1)
    x.grad = given.expand(3)
    (x * factors).sum().backward()
    assert x.grad.tolist() == [2, 3, 4]
    assert given.tolist() == [1]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (flow.ones(3), r"gradient of shape \[1\], .* to a grad of shape \[3\]"),
        (flow.ones(1, dtype=flow.float64), r"flow\.float32, on cpu cannot .* flow\.float64"),
        (flow.ones(1, dtype=flow.int64), r"flow\.int64"),
        (np.ones(1, np.float32), "was set to ndarray"),
    ],
)
def test_what_was_set_as_a_gradient_and_is_of_another_kind_is_refused(given: Any, words: str) -> None:
    x = leaf(2)
    x.grad = given
    with pytest.raises((TypeError, ValueError), match=words):
        (x * 3).sum().backward()
    assert np.array_equal(np.asarray(given), np.ones(np.shape(given)))
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3]


def test_a_sum_goes_on_in_the_memory_that_is_nobody_elses() -> None:
    theirs, own, third = (flow.tensor([value]).array for value in (1.0, 2.0, 4.0))
    total = Gradient(theirs, owned=False)
    total.add(own, owned=True)
    total.add(third, owned=False)
    assert total.total() is own
    assert total.owned
    assert [array.ndarray.item() for array in (theirs, own, third)] == [1, 7, 4]


def test_parts_that_are_nobody_elses_are_told() -> None:
    theirs, own = flow.ones(1).array, flow.ones(1).array
    parts = Gradient(theirs, owned=False)
    assert parts.owned_serials() == []
    parts.add(own, owned=True, in_parts=True)
    assert parts.owned_serials() == [own.storage.serial]
    assert parts.total().ndarray.item() == 2
    parts = Gradient(theirs, owned=False)
    parts.add(own, owned=False, in_parts=True)
    assert parts.owned_serials() == []


@pytest.mark.parametrize("is_leaf", [True, False])
def test_only_the_gradient_of_a_leaf_goes_beside(is_leaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What walks on with the gradient of a weight that was computed would have to wait for it at once.
    kernels, beside = runtime(flow.device("cpu")), []

    class Beside:
        def conv2d_backward_weight(self, *operands: Any, **attributes: Any) -> None:
            beside.append(operands)
            kernels.conv2d_backward_weight(*operands, **attributes)

    monkeypatch.setattr(kernels, "beside", lambda multiplications: Beside())
    weight = flow.ones(1, 1, 2, 2, requires_grad=True)
    F.conv2d(flow.ones(1, 1, 2, 2) * 1, weight if is_leaf else weight * 1).sum().backward()
    assert len(beside) == is_leaf
    assert weight.grad.tolist() == [[[[1, 1], [1, 1]]]]
