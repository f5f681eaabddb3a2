"""A result that its operation can make again is not kept for backward, and gives the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.ops import normalization
from framework.vm import machine, runtime


@pytest.fixture
def remaking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    table = runtime(flow.device("cpu")).table

    def remake(on: bool) -> None:
        # Not oneDNN's way: its forward and reference's `again` differ by roundings.
        monkeypatch.setattr(table, "batch_norm_remakes", lambda x: on)
        normalization.training_plan.cache_clear()

    yield remake
    normalization.training_plan.cache_clear()


def _operands() -> tuple[flow.Tensor, ...]:
    flow.manual_seed(5)
    shapes = ((2, 8, 6, 6), (8,), (8,), (4, 8, 3, 3))
    return tuple(flow.randn(*shape).requires_grad_() for shape in shapes)


def _between(x: flow.Tensor, scale: flow.Tensor, shift: flow.Tensor) -> flow.Tensor:
    return ops.batch_norm(x, None, None, scale, shift, training=True, relu=True)


def test_gradients_are_those_of_a_kept_result(remaking: Callable[[bool], None]) -> None:
    found = []
    for on in (False, True):
        remaking(on)
        x, scale, shift, weight = _operands()
        y = ops.conv2d(_between(x, scale, shift), weight, padding=1)
        issued: list[str] = []
        with machine.observed(lambda instruction, run: (issued.append(instruction.kernel.__name__), run())):  # noqa: B023
            (y * y).sum().backward()
        assert issued.count("batch_norm_again") == on
        found.append([t.grad.numpy() for t in (x, scale, shift, weight)])
    for kept, remade in zip(*found, strict=True):
        np.testing.assert_allclose(remade, kept, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_garbage")
def test_a_result_that_is_made_again_is_not_held(remaking: Callable[[bool], None]) -> None:
    held = []
    for on in (False, True):
        remaking(on)
        x, scale, shift, weight = _operands()
        before = flow.cpu.memory_allocated()
        y = ops.conv2d(_between(x, scale, shift), weight, padding=1)
        held.append(flow.cpu.memory_allocated() - before)
        del y
    assert held[0] - held[1] >= 2 * 8 * 6 * 6 * 4


def test_a_result_that_was_written_since_is_kept_as_it_is(remaking: Callable[[bool], None]) -> None:
    remaking(True)
    x, scale, shift, weight = _operands()
    between = _between(x, scale, shift)
    with flow.no_grad():
        between.mul_(0)
    ops.conv2d(between, weight, padding=1).sum().backward()
    assert not weight.grad.numpy().any()


def test_what_it_was_made_from_must_not_be_written(remaking: Callable[[bool], None]) -> None:
    remaking(True)
    x, scale, shift, weight = _operands()
    y = ops.conv2d(_between(x, scale, shift), weight, padding=1)
    with flow.no_grad():
        shift.add_(1)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()
