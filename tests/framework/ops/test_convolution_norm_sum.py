"""The end of a residual block as one operation: the bits of its parts, less memory, and when it is its parts after all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.autograd.gradient import Home
from framework.ops import normalization
from framework.vm import machine, runtime
from tests.framework.block_ends import End, assert_same_bits, force_apart, images, issued, outcome

BRANCH, SHORTCUT = ("conv", "norm", "x"), ("downsample", "residual")
FROZEN = {
    "nothing": (),
    "the images": ("x", "residual"),
    "the branch": BRANCH,
    "the shortcut": SHORTCUT,
    "all but the shortcut's norm": (*BRANCH, "downsample.0", "residual"),
    "all but the branch's norm": ("conv", "x", *SHORTCUT),
    "both convolutions": ("conv", "downsample.0"),
    "both convolutions and the images": ("conv", "downsample.0", "x", "residual"),
    "both norms": ("norm", "downsample.1"),
    "the biases": ("norm.bias", "downsample.1.bias"),
    "all but the shortcut's bias": (*BRANCH, "downsample.0", "downsample.1.weight", "residual"),
    "everything": (*BRANCH, *SHORTCUT),
}


# float32 by oneDNN where it is installed, float64 by the reference.
@pytest.mark.parametrize("dtype", [flow.float32, flow.float64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("frozen", FROZEN)
def test_values_and_gradients_have_the_bits_of_the_parts(frozen: str, uses: int, dtype: Any) -> None:
    how: dict[str, Any] = {"frozen": FROZEN[frozen], "uses": uses, "dtype": dtype}
    assert_same_bits(outcome(apart=False, **how), outcome(apart=True, **how))


@pytest.mark.parametrize("channels", [5, 16])
@pytest.mark.parametrize("size", [1, 3, 20])
def test_images_of_every_size(size: int, channels: int) -> None:
    how = {"size": size, "channels": channels, "n": 3}
    assert_same_bits(outcome(apart=False, **how), outcome(apart=True, **how))


def _end() -> tuple[End, flow.Tensor, flow.Tensor]:
    flow.manual_seed(4)
    return End(), images(2, 8, 6, 6), images(2, 4, 12, 12, seed=1)


def test_both_ways_issue_one_kernel_less() -> None:
    end, x, residual = _end()
    assert issued(lambda: end(x, residual)) == ["conv2d", "conv2d", "batch_norm_sum_train"]
    y = end(x, residual)
    assert issued(y.sum().backward)[-5:] == [
        "batch_norm_sum_backward",
        "conv2d_backward_weight",
        "conv2d_backward_input",
        "conv2d_backward_weight",
        "conv2d_backward_input",
    ]


def test_a_frozen_shortcut_costs_nothing() -> None:
    end, x, residual = _end()
    end.downsample.requires_grad_(False)
    y = end(x, residual.detach())
    assert [name for name in issued(y.sum().backward) if "conv" in name or "norm" in name] == [
        "batch_norm_backward",
        "conv2d_backward_weight",
        "conv2d_backward_input",
    ]


def _is_one(end: End, x: flow.Tensor, residual: flow.Tensor) -> bool:
    return "batch_norm_sum_train" in issued(lambda: end(x, residual))


def _replaced(find: Callable[[End], flow.nn.Module]) -> Callable[[End], None]:
    def replace(end: End) -> None:
        module = find(end)
        module.forward = module.forward  # type: ignore[method-assign] # what it does to the images is not for us to know

    return replace


FORBIDDING: tuple[Callable[[End], object], ...] = (
    flow.nn.Module.eval,
    flow.nn.SyncBatchNorm.convert_sync_batchnorm,
    lambda end: end.norm.eval(),
    lambda end: end.downsample[1].eval(),
    lambda end: setattr(end, "downsample", flow.nn.Sequential(*end.downsample.children(), flow.nn.Identity())),
    lambda end: setattr(end, "downsample", flow.nn.Sequential(flow.nn.Conv2d(4, 16, 1, 2), flow.nn.BatchNorm2d(16))),
    lambda end: setattr(end.downsample[1], "weight", None),
    lambda end: setattr(end.norm, "running_mean", None),
    _replaced(lambda end: end.downsample),
    _replaced(lambda end: end.downsample[0]),
    _replaced(lambda end: end.downsample[1]),
    _replaced(lambda end: end.conv),
    _replaced(lambda end: end.norm),
)


def _share(end: End, *names: str) -> None:
    for name in names:
        setattr(end.downsample[1], name, getattr(end.norm, name))


def test_running_figures_that_both_share_move_one_after_the_other() -> None:
    # In one kernel both would move them at once.
    for names in (("running_mean",), ("running_var",), ("running_mean", "running_var")):
        end, x, residual = _end()
        _share(end, *names)
        assert not _is_one(end, x, residual)
    end, x, residual = _end()
    _share(end, "weight", "bias")
    assert _is_one(end, x, residual)


def test_a_shortcut_that_no_module_holds_has_no_name_of_its_own() -> None:
    end, x, residual = _end()
    loose = flow.nn.Sequential(*_end()[0].downsample.children())
    said: list[str] = []
    with machine.observed(lambda instruction, run: (said.append(repr(instruction)), run())):
        end.norm.after(end.conv, x, residual=residual, shortcut=loose, relu=True)
    assert said[0].endswith(" in 0: conv2d")


def test_what_forbids_one_operation() -> None:
    end, x, residual = _end()
    assert _is_one(end, x, residual)
    assert int(end.norm.num_batches_tracked) == int(end.downsample[1].num_batches_tracked) == 1
    for change in FORBIDDING:
        end, x, residual = _end()
        change(end)
        assert not _is_one(end, x, residual)
    end, x, residual = _end()
    plain = issued(lambda: end.norm.after(end.conv, x, residual=residual, shortcut=end.downsample))
    assert "batch_norm_sum_train" not in plain  # without a ReLU


def test_a_shortcut_is_one_of_a_residual() -> None:
    end, x, _ = _end()
    with pytest.raises(TypeError, match="there is no residual"):
        end.norm.after(end.conv, x, shortcut=end.downsample, relu=True)


def test_without_recording_nothing_is_kept_for_backward() -> None:
    end, x, residual = _end()
    with flow.no_grad():
        y = end(x, residual)
        assert not y.requires_grad
        expected = force_apart(_end()[0])(x, residual)
    np.testing.assert_array_equal(y, expected)


def test_memory_and_work_are_labelled_by_the_modules() -> None:
    end, x, residual = _end()
    said: list[str] = []
    with machine.observed(lambda instruction, run: (said.append(repr(instruction)), run())):
        flow.nn.Sequential({"block": _Only(end, residual)})(x).sum().backward()
    assert [line.split(" in ")[-1] for line in said if "conv2d" in line or "batch_norm" in line] == [
        "block.end.downsample.0: conv2d",
        "block.end.conv: conv2d",
        "block.end.norm: batch_norm",
        "block.end.norm.batch_norm: backward",
        "block.end.conv.conv2d: backward",
        "block.end.conv.conv2d: backward",
        "block.end.downsample.0.conv2d: backward",
        "block.end.downsample.0.conv2d: backward",
    ]


class _Only(flow.nn.Module):
    """An end as a function of its images alone."""

    def __init__(self, end: End, residual: flow.Tensor) -> None:
        super().__init__()
        self.end, self.residual = end, residual

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        return self.end(x, self.residual)


def test_errors_are_those_of_the_parts() -> None:
    end, x, residual = _end()
    for changed in (lambda m: m, force_apart):
        end = changed(_end()[0])
        with pytest.raises(ValueError, match=r"conv2d of images \[2, 8, 12, 12\]"):
            end(x, images(2, 8, 12, 12))
        with pytest.raises(ValueError, match=r"got a residual of \[2, 16, 4, 4\]"):
            end(x, images(2, 4, 8, 8))
        with pytest.raises(TypeError, match=r"conv2d takes tensors; got ndarray"):
            end(x, np.ones((2, 4, 12, 12), np.float32))
        with pytest.raises(TypeError, match=r"conv2d takes tensors; got NoneType"):
            end(None, residual)
        with pytest.raises(TypeError, match=r"takes operands of one floating-point type"):
            end(x, residual.to(flow.float64))
        end.downsample[1].running_mean = np.ones(16)
        with pytest.raises(TypeError, match="batch_norm takes tensors; got ndarray"):
            end(x, residual)


@pytest.mark.usefixtures("no_garbage")
def test_what_no_gradient_comes_of_may_be_written() -> None:
    end, x, residual = _end()
    end.downsample.requires_grad_(False)
    held = flow.cpu.memory_allocated()
    y = end(x, residual.detach())
    # Of all that was computed, what the branch's normalisation took and y with its figures: not the shortcut's.
    assert flow.cpu.memory_allocated() - held < 2.9 * y.numel() * y.array.dtype.itemsize
    with flow.no_grad():
        for parameter in end.downsample.parameters():
            parameter.fill_(0)
    y.sum().backward()
    end, x, residual = _end()
    y = end(x.detach(), residual.detach())
    with flow.no_grad():
        end.conv.weight.fill_(0)
        end.downsample[0].weight.fill_(0)
    y.sum().backward()
    assert end.downsample[0].weight.grad.numpy().any()


@pytest.mark.parametrize("written", ["conv.weight", "downsample.0.weight", "norm.weight", "downsample.1.weight", "x"])
def test_what_was_written_since_is_told(written: str) -> None:
    end, x, residual = _end()
    between, added = x * 1.0, residual * 1.0
    y = end(between, added)
    with flow.no_grad():
        (between if written == "x" else dict(end.named_parameters())[written]).fill_(0)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()


def test_a_second_backward_and_a_retained_graph() -> None:
    end, x, residual = _end()
    y = end(x, residual)
    y.sum().backward(retain_graph=True)
    once = np.array(end.conv.weight.grad)
    y.sum().backward()
    np.testing.assert_array_equal(end.conv.weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        y.sum().backward()


def test_hooks_see_the_gradients() -> None:
    seen: dict[bool, list[np.ndarray]] = {}
    for apart in (False, True):
        end, x, residual = _end()
        if apart:
            force_apart(end)
        noted = seen[apart] = []
        x, residual = x * 1.0, residual * 1.0
        y = end(x, residual)
        for tensor in (y, x, residual, end.downsample[1].weight):
            tensor.register_hook(lambda gradient, noted=noted: noted.append(np.array(gradient)))
        (y * y + y).sum().backward()
    assert len(seen[False]) == 4
    for one in seen[False]:
        assert any(one.shape == other.shape and np.array_equal(one, other) for other in seen[True])


def test_a_gradient_that_somebody_else_holds_is_not_written_over() -> None:
    end, x, residual = _end()
    y = end(x, residual)
    given = images(*y.shape, seed=5).detach()
    before = np.array(given)
    y.backward(given)
    np.testing.assert_array_equal(given, before)
    # Of two sums the gradient goes on to both operands: y's two parts are the others' too, and wait there until y's are used.
    leaves = [images(*given.shape, seed=seed) for seed in (6, 7)]
    one, two = (leaf * 1.0 for leaf in leaves)
    y = end(x, residual)
    factors = [images(*given.shape, seed=seed).detach() for seed in (8, 9)]
    ((y + one) * factors[0] + (y + two) * factors[1]).backward(given)
    for leaf, factor in zip(leaves, factors, strict=True):
        np.testing.assert_array_equal(leaf.grad, factor.numpy() * before)


def test_gradients_are_made_where_their_parameters_want_them() -> None:
    end, x, residual = _end()
    homes = {}
    for name, parameter in end.named_parameters():
        homes[name] = parameter.home = Home(runtime(flow.device("cpu")).empty_like(parameter.array))
    y = end(x, residual).sum()
    assert "copy" not in issued(y.backward)
    for name, parameter in end.named_parameters():
        assert parameter.grad.array.storage is homes[name].array.storage, name


@pytest.mark.parametrize("where", ["x", "residual"])
def test_images_that_can_be_made_again_are_not_kept(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not oneDNN's numbers: its forward and the reference's `again` differ by roundings. float64 has the reference alone.
    found = {}
    for on in (False, True):
        monkeypatch.setattr(runtime(flow.device("cpu")).table, "batch_norm_remakes", lambda x, on=on: on)
        normalization.training_plan.cache_clear()
        flow.manual_seed(4)
        end = End().to(flow.float64)
        given = {
            "x": images(2, 8, 6, 6, dtype=flow.float64),
            "residual": images(2, 4, 12, 12, dtype=flow.float64, seed=1),
        }
        made = given | {where: flow.nn.functional.batch_norm(given[where], None, None, training=True, relu=True)}
        y = end(made["x"], made["residual"])
        del made
        assert issued((y * y).sum().backward).count("batch_norm_again") == on
        found[on] = [np.array(tensor.grad) for tensor in (*given.values(), *end.parameters())]
    normalization.training_plan.cache_clear()
    for kept, remade in zip(found[False], found[True], strict=True):
        np.testing.assert_allclose(remade, kept, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("no_garbage")
@pytest.mark.parametrize("uses", [1, 2])
def test_neither_way_takes_more_memory_than_the_parts(uses: int) -> None:
    def memory(apart: bool) -> tuple[int, int]:
        """Held after forward, and at most in backward, beyond what was there before: bytes."""
        flow.manual_seed(4)
        end = End(64)
        if apart:
            force_apart(end)
        x, residual = images(4, 8, 32, 32) * 1.0, images(4, 4, 64, 64, seed=1) * 1.0
        before = flow.cpu.memory_allocated()
        y = end(x, residual)
        held = flow.cpu.memory_allocated() - before
        gradient = images(*y.shape, seed=5).detach()
        loss = sum((y * float(k + 2) for k in range(1, uses)), y * 2.0)
        del y
        flow.cpu.reset_peak_memory_stats()
        loss.backward(gradient)
        return held, flow.cpu.max_memory_allocated() - before

    (held, peak), (held_by_parts, peak_of_parts) = memory(apart=False), memory(apart=True)
    assert held <= held_by_parts
    assert peak <= peak_of_parts + 4096


@pytest.mark.usefixtures("no_garbage")
def test_a_part_of_the_gradient_is_freed_with_what_took_its_place() -> None:
    end, x, residual = _end()
    y = end(x * 1.0, residual * 1.0)
    gradient, size = images(*y.shape, seed=5).detach(), y.numel() * y.array.dtype.itemsize
    held: dict[str, list[int]] = {}
    loss = y * 2.0 + y * 3.0
    del y

    def watch(instruction: Any, run: Callable[[], None]) -> None:
        run()
        held.setdefault(instruction.kernel.__name__, []).append(flow.cpu.memory_allocated())

    with machine.observed(watch):
        loss.backward(gradient)
    first, second = held["conv2d_backward_weight"]
    # From one weight's gradient to the next: x's gradient has come, what took the place of a part has gone.
    assert second <= first + x.numel() * 4 - size + 64 + end.downsample[0].weight.numel() * 4


def test_parameters_that_both_branches_share() -> None:
    found = []
    for apart in (False, True):
        flow.manual_seed(4)
        conv, norm, others = flow.nn.Conv2d(4, 16, 1, bias=False), flow.nn.BatchNorm2d(16), flow.nn.BatchNorm2d(16)
        others.weight, others.bias = norm.weight, norm.bias
        shortcut = flow.nn.Sequential(conv, others)
        if apart:
            own = shortcut.forward
            shortcut.forward = lambda x, own=own: own(x)
        x = images(2, 4, 6, 6)
        y = norm.after(conv, x, residual=x, shortcut=shortcut, relu=True)
        (y * y).sum().backward()
        found.append({name: np.array(t.detach()) for name, t in {
            "x": x.grad, "kernel": conv.weight.grad, "weight": norm.weight.grad, "mean": norm.running_mean,
            "var": others.running_var, "y": y,
        }.items()})  # fmt: skip
    assert_same_bits(*found)
