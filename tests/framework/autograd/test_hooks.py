"""Hooks on gradients: when they run, what they see, and what they may put in place of it."""

from __future__ import annotations

import numpy as np
import pytest

import framework as flow
from framework.autograd.engine import after_backward
from tests.framework.tensors import leaf


def test_a_hook_sees_the_whole_gradient_once() -> None:
    x = leaf(1)
    seen = []
    x.register_hook(lambda g: seen.append(g.item()))
    (x * 2 + x * 3).sum().backward()
    assert seen == [5]


def test_what_is_no_function_is_no_hook() -> None:
    x = leaf(1)
    for register in (x.register_hook, (x * 2).register_hook, x.register_post_accumulate_grad_hook):
        with pytest.raises(TypeError, match="a hook is a function; got 3"):
            register(3)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2]


def test_a_hook_may_replace_the_gradient_of_a_leaf() -> None:
    x = leaf(1, 2)
    x.register_hook(lambda g: g * 10)
    x.register_hook(lambda g: g + 1)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [21, 21]


def test_a_hook_may_replace_the_gradient_on_its_way() -> None:
    x = leaf(1, 2)
    y = x * 2
    y.register_hook(lambda g: g * 10)
    y.sum().backward()
    assert x.grad.tolist() == [20, 20]


def test_what_a_hook_made_and_keeps_stays_as_it_was() -> None:
    x = leaf(1, 2)
    kept = []

    def doubled(gradient: flow.Tensor) -> flow.Tensor:
        kept.append(gradient * 2)
        return kept[-1]

    y = x.clone()  # hands its gradient on whole
    y.register_hook(doubled)
    y.sum().backward()
    x.clone().sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert kept[0].tolist() == [2, 2]


def test_a_hook_on_the_root() -> None:
    x = leaf(1)
    y = (x * 2).sum()
    y.register_hook(lambda g: g * 7)
    y.backward()
    assert x.grad.item() == 14


def test_a_replacement_must_have_the_shape() -> None:
    x = leaf(1, 2)
    x.register_hook(lambda g: flow.ones(3))
    with pytest.raises(RuntimeError, match=r"a tensor hook returned shape \[3\] for a gradient of \[2\]"):
        (x * 2).sum().backward()


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("returned", [2.0, np.ones(2, np.float32), "gradient"])
def test_a_replacement_must_be_a_tensor(returned: object, is_leaf: bool) -> None:
    x = leaf(1, 2)
    y = x if is_leaf else x * 1
    y.register_hook(lambda g: returned)
    with pytest.raises(
        TypeError, match=rf"a tensor hook returned {type(returned).__name__}, expected a tensor.* or None"
    ):
        (y * 2).sum().backward()


def test_a_replacement_must_have_the_type() -> None:
    x = leaf(1, 2)
    x.register_hook(lambda g: g.to(flow.float64))
    with pytest.raises(
        RuntimeError, match=r"returned flow.float64 on cpu for a gradient of flow.float32 on cpu; convert it"
    ):
        (x * 2).sum().backward()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_hook_can_be_removed(is_leaf: bool) -> None:
    x = leaf(1)
    y = x if is_leaf else x * 1
    seen = []
    remove = y.register_hook(lambda g: seen.append("first"))
    handle = y.register_hook(lambda g: seen.append("third"))
    y.register_hook(lambda g: seen.append("second"))
    remove()
    for _ in range(2):  # the second time there is nothing left to do
        handle.remove()
    (y * 2).sum().backward()
    assert seen == ["second"]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_hook_that_removes_itself_makes_no_other_skip(is_leaf: bool) -> None:
    x = leaf(1)
    y = x if is_leaf else x * 1
    seen: list[str] = []
    removals: list = []

    def once(gradient: flow.Tensor) -> None:
        seen.append("once")
        removals.pop()()

    removals.append(y.register_hook(once))
    y.register_hook(lambda g: seen.append("always"))
    (y * 2).sum().backward(retain_graph=True)
    assert seen == ["once", "always"]


def test_hooks_need_a_gradient() -> None:
    with pytest.raises(RuntimeError, match="requires no gradient"):
        flow.ones(1).register_hook(print)
    with pytest.raises(RuntimeError, match="leaves that require a gradient"):
        (leaf(1) * 2).register_post_accumulate_grad_hook(print)
    with pytest.raises(RuntimeError, match="leaves that require a gradient"):
        flow.ones(1).register_post_accumulate_grad_hook(print)


def test_post_accumulate_hooks_run_once_a_backward_with_the_sum_in_place() -> None:
    x = leaf(1)
    seen = []
    x.register_post_accumulate_grad_hook(lambda t: seen.append((t is x, t.grad.item())))
    (x * 2 + x * 3).sum().backward()
    x.backward(flow.ones(1))
    assert seen == [(True, 5), (True, 6)]


def test_a_post_accumulate_hook_may_step_and_drop_the_gradient() -> None:
    x = leaf(10)

    def step(tensor: flow.Tensor) -> None:
        tensor.add_(tensor.grad, alpha=-0.5)
        tensor.grad = None

    x.register_post_accumulate_grad_hook(step)
    (x * 2).sum().backward()
    assert x.tolist() == [9]
    assert x.grad is None


def test_a_post_accumulate_hook_that_removes_itself_makes_no_other_skip() -> None:
    x = leaf(1)
    seen: list[str] = []
    removals: list = []

    def once(tensor: flow.Tensor) -> None:
        seen.append("once")
        removals.pop()()

    removals.append(x.register_post_accumulate_grad_hook(once))
    x.register_post_accumulate_grad_hook(lambda t: seen.append("always"))
    (x * 2).sum().backward()
    (x * 2).sum().backward()
    assert seen == ["once", "always", "always"]


def test_a_post_accumulate_hook_that_adds_a_hook_adds_it_for_the_next_backward() -> None:
    x = leaf(1)
    calls = []

    def hook(_: flow.Tensor) -> None:
        calls.append(len(calls))
        assert len(calls) < 10, "called for ever"
        x.register_post_accumulate_grad_hook(hook)

    x.register_post_accumulate_grad_hook(hook)
    (x * 2).sum().backward()
    assert calls == [0]
    (x * 2).sum().backward()
    assert calls == [0, 1, 2]


def test_a_backward_that_fails_tells_who_waits_for_its_end() -> None:
    x, said = leaf(1), []

    def hook(_: flow.Tensor) -> None:
        after_backward(lambda: said.append("ended"), lambda: said.append("failed"))

    x.register_hook(hook)
    (x * 2).sum().backward()
    assert said == ["ended"]

    def breaks(_: flow.Tensor) -> None:
        raise KeyboardInterrupt

    x.register_hook(breaks)
    with pytest.raises(KeyboardInterrupt):
        (x * 2).sum().backward()
    assert said == ["ended", "failed"]


def test_leaf_hooks_run_before_post_accumulate_hooks() -> None:
    x = leaf(1)
    order = []
    x.register_post_accumulate_grad_hook(lambda t: order.append(t.grad.item()))
    x.register_hook(lambda g: g * 3)
    (x * 2).sum().backward()
    assert order == [6]


def test_gradients_arrive_newest_first() -> None:
    # What is used last in forward is ready first: that is what an all-reduce overlaps with.
    first, second, third = leaf(1), leaf(1), leaf(1)
    order = []
    for name, parameter in (("first", first), ("second", second), ("third", third)):
        parameter.register_post_accumulate_grad_hook(lambda t, name=name: order.append(name))
    (((first * 2) * second) * third).sum().backward()
    assert order == ["third", "second", "first"]


def test_of_branches_that_are_ready_together_the_newest_goes_first() -> None:
    parameters = [leaf(1) for _ in range(4)]
    order = []
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda t, index=index: order.append(index))
    branches = [parameter * 2 for parameter in parameters]
    (branches[2] + branches[0] + branches[3] + branches[1]).sum().backward()
    assert order == [3, 2, 1, 0]


def test_retain_grad_keeps_what_is_no_leaf() -> None:
    x = leaf(1)
    y = x * 2
    y.retain_grad()
    (y * 3 + y).sum().backward(retain_graph=True)
    assert y.grad.tolist() == [4]
    (y * 5).sum().backward()
    assert y.grad.tolist() == [9]
    x.retain_grad()  # nothing to do for a leaf
    assert x.grad.tolist() == [8 + 10]
    with pytest.raises(RuntimeError, match=r"retain_grad\(\) on a tensor that requires no gradient"):
        flow.ones(1).retain_grad()


def test_retain_grad_follows_a_tensor_that_is_written() -> None:
    x = leaf(1)
    y = x * 2
    y.retain_grad()
    seen = []
    y.register_hook(lambda g: seen.append(g.item()))
    y.mul_(5.0)
    (y * 3).sum().backward()
    assert y.grad.tolist() == [3]
    assert seen == [15]  # a hook stays with what was there when it was registered
    assert x.grad.tolist() == [30]


def test_retain_grad_keeps_what_the_hooks_leave() -> None:
    y = leaf(1) * 2
    y.register_hook(lambda g: g * 3)
    y.retain_grad()
    y.register_hook(lambda g: g * 5)
    y.sum().backward()
    assert y.grad.tolist() == [15]


def test_retain_grad_twice_counts_once() -> None:
    x = leaf(1)
    y = x * 2
    y.retain_grad()
    y.retain_grad()
    (y * 3).sum().backward()
    assert y.grad.tolist() == [3]
