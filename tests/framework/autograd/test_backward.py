"""The backward walk: which gradients arrive where, what is freed, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import framework as flow
from framework.autograd import enable_grad, is_grad_enabled, no_grad
from framework.nn import functional as F
from tests.framework.tensors import leaf


def test_gradients_add_up_over_backward_calls() -> None:
    x = leaf(1, 2)
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]
    (x * x).sum().backward()
    assert x.grad.tolist() == [5, 7]
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_a_weighted_start() -> None:
    x = leaf(1, 2)
    (x * 3).backward(flow.tensor([1.0, -2.0]))
    assert x.grad.tolist() == [3, -6]


def test_a_diamond_is_walked_once() -> None:
    x = leaf(2)
    shared = x * 3
    calls = []
    shared.register_hook(lambda g: calls.append(g.item()))
    (shared * shared + shared * 5 + shared).sum().backward()
    assert calls == [2 * 6 + 5 + 1]
    assert x.grad.tolist() == [54]


def test_a_long_chain_and_many_paths() -> None:
    # 2^60 paths lead from the end to the start; each node runs once, and none recurses.
    x = leaf(1)
    y = x
    for _ in range(60):
        y = y + y
    y.sum().backward()
    assert x.grad.item() == 2.0**60
    x.grad = None
    y = x
    for _ in range(5000):
        y = y + 1
    y.sum().backward()
    assert x.grad.item() == 1


def test_a_later_branch_is_not_run_before_its_gradient_is_whole() -> None:
    x = leaf(1.5)
    early = x.exp()
    late = (early * 2).log()
    (early + late).sum().backward()
    assert x.grad.item() == pytest.approx(np.exp(1.5) + 1, rel=1e-6)


def test_only_what_wants_a_gradient_gets_one() -> None:
    x, constant = leaf(1), flow.tensor([2.0])
    frozen = leaf(3).detach()
    y = x * constant + frozen
    y.sum().backward()
    assert x.grad.item() == 2
    assert constant.grad is None
    assert frozen.grad is None
    assert y.grad is None
    assert not (constant * frozen).requires_grad


def test_a_leaf_as_the_root() -> None:
    x = leaf(1, 2)
    x.backward(flow.tensor([5.0, 6.0]))
    x.backward(flow.tensor([1.0, 1.0]))
    assert x.grad.tolist() == [6, 7]


def test_an_output_that_nothing_uses_stops_no_gradient() -> None:
    x = leaf(1)
    y = x * 2
    unused = y * 7
    (y * 3).sum().backward()
    assert x.grad.item() == 6
    assert unused.requires_grad


def test_an_input_that_the_result_does_not_depend_on() -> None:
    x, y = leaf(1), leaf(2)
    z = (x * 1).copy_(y)
    (z * 3 + x).sum().backward()
    assert y.grad.item() == 3
    assert x.grad.item() == 1


# ---- recording


def test_no_grad_records_nothing() -> None:
    x = leaf(1)
    with no_grad():
        assert not is_grad_enabled()
        y = x * 2
        with enable_grad():
            z = x * 2
        assert not is_grad_enabled()
    assert is_grad_enabled()
    assert not y.requires_grad
    assert y.is_leaf
    assert z.requires_grad


def test_no_grad_decorates_without_brackets_too() -> None:
    @no_grad
    def scaled(x: flow.Tensor) -> flow.Tensor:
        return x * 2

    assert (scaled.__name__, scaled(leaf(1)).requires_grad, is_grad_enabled()) == ("scaled", False, True)


def test_no_grad_as_a_decorator_and_after_an_exception() -> None:
    @no_grad()
    def double(x: flow.Tensor) -> flow.Tensor:
        """Doubles."""
        return x * 2

    assert not double(leaf(1)).requires_grad
    assert double.__doc__ == "Doubles."
    with pytest.raises(ZeroDivisionError), no_grad():
        raise ZeroDivisionError
    assert is_grad_enabled()


def test_one_no_grad_may_be_entered_within_its_own_block() -> None:
    once = no_grad()
    with once:
        with once, enable_grad():
            assert is_grad_enabled()
        assert not is_grad_enabled()
    assert is_grad_enabled()


def test_no_grad_decorates_nothing_that_runs_later() -> None:
    def batches() -> Iterator[bool]:
        yield is_grad_enabled()

    async def answer() -> bool:
        return is_grad_enabled()

    for function in (batches, answer):
        with pytest.raises(
            TypeError, match=r"no_grad decorates .*(batches|answer), .* write `with flow\.no_grad\(\):`"
        ):
            no_grad()(function)


def test_no_grad_holds_for_its_own_thread_alone() -> None:
    import threading

    seen = []
    with no_grad():
        thread = threading.Thread(target=lambda: seen.append(is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]


def test_hooks_and_gradients_are_not_recorded() -> None:
    x = leaf(1)
    recorded = []
    y = x * 2
    y.register_hook(lambda g: recorded.append((g * x).requires_grad))
    y.sum().backward()
    assert recorded == [False]
    assert not x.grad.requires_grad
    assert is_grad_enabled()


def test_recording_is_back_on_after_a_failed_walk() -> None:
    x = leaf(1)
    y = x * 2

    def fails(gradient: flow.Tensor) -> None:
        raise ArithmeticError("as it may happen")

    y.register_hook(fails)
    with pytest.raises(ArithmeticError, match="as it may happen"):
        y.sum().backward()
    assert is_grad_enabled()
    assert (x * 1).requires_grad


# ---- refusals


def test_a_second_backward_is_refused_by_name() -> None:
    x = leaf(1, 2)
    loss = (x.exp() * 3).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through \w+ a second time.*freed.*retain_graph=True"):
        loss.backward()


def test_the_refusal_names_the_module() -> None:
    model = flow.nn.Sequential(flow.nn.Conv2d(1, 2, 1), flow.nn.ReLU())
    loss = model(flow.ones(1, 1, 2, 2)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through 1: relu a second time"):
        loss.backward()


def test_retain_graph_allows_another_backward() -> None:
    x = leaf(1, 2)
    loss = (x * x).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    assert x.grad.tolist() == [4, 8]
    loss.backward()
    assert x.grad.tolist() == [6, 12]
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_two_results_of_one_graph() -> None:
    x = leaf(2)
    shared = x * x
    first, second = shared * 3, shared * 5
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    assert x.grad.item() == 32


def test_backward_asks_for_what_it_needs() -> None:
    x = leaf(1, 2)
    with pytest.raises(RuntimeError, match=r"shape \[2\] needs a gradient of that shape"):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r"shape \[2\] got a gradient of \[3\]"):
        (x * 2).backward(flow.ones(3))
    with pytest.raises(TypeError, match=r"backward\(\) takes a tensor of flow.float32; got 1.0"):
        (x * 2).backward(1.0)
    with pytest.raises(TypeError, match=r"backward\(\) takes a tensor of flow.float32; got one of flow.float64"):
        (x * 2).backward(flow.ones(2, dtype=flow.float64))
    with pytest.raises(RuntimeError, match="depends on nothing that requires a gradient"):
        flow.ones(1).backward()


# ---- memory


@pytest.mark.usefixtures("no_garbage")
def test_what_was_saved_is_freed_as_backward_goes() -> None:
    size = 1 << 20
    x = flow.ones(size // 4, requires_grad=True)
    before = flow.cpu.memory_allocated()
    y = x
    for _ in range(8):
        y = y.exp()  # keeps its result
        y = y.log()  # keeps its input, which is the same memory
    root = y.sum()
    del y
    held = flow.cpu.memory_allocated() - before
    assert held >= 8 * size
    freed: list[int] = []
    x.register_post_accumulate_grad_hook(lambda t: freed.append(flow.cpu.memory_allocated() - before))
    flow.cpu.reset_peak_memory_stats()
    root.backward()
    # When the last node ran, everything saved was gone: what is left is one gradient, perhaps a second on its way.
    assert freed[0] <= 2 * size + 4096
    # And no gradient outlived the node it was for: beside what was saved never more than two at once, one in and one out.
    assert flow.cpu.max_memory_allocated() - before <= held + 2 * size + 4096
    assert root.requires_grad  # the root is still there: it did not hold the memory
    assert flow.cpu.memory_allocated() - before <= size + 4096


@pytest.mark.usefixtures("no_garbage")
def test_a_graph_that_is_dropped_frees_its_memory_at_once() -> None:
    x = flow.ones(1 << 18, requires_grad=True)
    before = flow.cpu.memory_allocated()
    loss = (x.exp() * x).sum()
    assert flow.cpu.memory_allocated() - before >= 1 << 20
    del loss
    # No garbage is collected meanwhile: the graph must hold no cycles.
    assert flow.cpu.memory_allocated() == before


@pytest.mark.usefixtures("no_garbage")
def test_a_training_step_leaves_nothing_but_gradients() -> None:
    model = flow.nn.Sequential(
        flow.nn.Conv2d(3, 8, 3), flow.nn.BatchNorm2d(8), flow.nn.ReLU(), flow.nn.MaxPool2d(2), flow.nn.AdaptiveAvgPool2d(1),
        flow.nn.Flatten(), flow.nn.Linear(8, 3),
    )  # fmt: skip
    images, target = flow.randn(4, 3, 20, 20), flow.tensor([0, 1, 2, 0])
    before = flow.cpu.memory_allocated()
    F.cross_entropy(model(images), target).backward()
    model.zero_grad()
    assert flow.cpu.memory_allocated() == before


@pytest.mark.usefixtures("no_garbage")
def test_without_recording_nothing_is_kept() -> None:
    x = flow.ones(1 << 18)
    before = flow.cpu.memory_allocated()
    y = x
    for _ in range(4):
        y = y.exp()
    assert flow.cpu.memory_allocated() - before == 1 << 20
