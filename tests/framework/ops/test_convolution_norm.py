"""A convolution and its batch normalisation as one operation: what the two give, and when they are two after all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.ops import convolution_norm
from framework.vm import machine


def _layers(seed: int = 1) -> tuple[flow.nn.Conv2d, flow.nn.BatchNorm2d]:
    flow.manual_seed(seed)
    return flow.nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), flow.nn.BatchNorm2d(16)


def _run(call: Any, *, residual: bool, relu: bool) -> list[np.ndarray]:
    convolution, norm = _layers()
    random = np.random.default_rng(2)
    x, added = (
        flow.tensor(random.standard_normal(shape).astype(np.float32), requires_grad=True)
        for shape in ((2, 8, 6, 6), (2, 16, 3, 3))
    )
    y = call(convolution, norm, x, residual=added if residual else None, relu=relu)
    (y * y).sum().backward()
    tensors = [convolution.weight, norm.weight, norm.bias, x, *([added] if residual else [])]
    values = [t.grad.numpy() for t in tensors]
    return [y.detach().numpy(), norm.running_mean.numpy(), norm.running_var.numpy(), *values]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients_are_those_of_the_two(residual: bool, relu: bool) -> None:
    one = _run(lambda c, n, x, **how: n.after(c, x, **how), residual=residual, relu=relu)
    two = _run(lambda c, n, x, **how: n(c(x), **how), residual=residual, relu=relu)
    for found, expected in zip(one, two, strict=True):
        np.testing.assert_array_equal(found, expected)


def _nodes(y: flow.Tensor) -> list[str]:
    names, node = [], y.node
    while isinstance(getattr(node, "operation", None), type):
        names.append(node.operation.name)
        node = node.edges[0][0] if node.edges[0] else None
    return names


def test_what_forbids_one_operation() -> None:
    convolution, norm = _layers()
    x = flow.ones(2, 8, 6, 6)
    assert _nodes(norm.after(convolution, x)) == ["conv2d_batch_norm"]
    assert int(norm.num_batches_tracked) == 1
    with_bias = flow.nn.Conv2d(8, 16, 1)
    assert _nodes(norm.after(with_bias, x)) == ["batch_norm", "conv2d"]
    wrapped = flow.nn.Sequential(convolution)
    assert _nodes(norm.after(wrapped, x)) == ["batch_norm", "conv2d"]
    replaced = convolution.forward
    convolution.forward = lambda given: replaced(given * 2.0)
    assert _nodes(norm.after(convolution, x)) == ["batch_norm", "conv2d"]
    norm.eval()
    assert _nodes(norm.after(convolution, x)) == ["batch_norm", "conv2d"]


@pytest.mark.parametrize("name", ["forward", "__call__"])
@pytest.mark.parametrize("kind", [flow.nn.Conv2d, flow.nn.BatchNorm2d, flow.nn.Sequential, flow.nn.Module])
def test_what_a_class_is_given_later_is_called(kind: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = flow.models.resnet18(num_classes=4)
    x = flow.tensor(np.random.default_rng(4).standard_normal((2, 3, 32, 32)).astype(np.float32))
    expected = model(x).detach().numpy()
    met: list[Any] = []
    own = getattr(kind, name)

    def spy(self: Any, *given: Any, **settings: Any) -> Any:
        met.append(self)
        return own(self, *given, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(kind, name, spy)
        np.testing.assert_array_equal(model(x).detach().numpy(), expected)
    # The classes here have a forward of their own in front of Module's.
    wanted = [] if (kind, name) == (flow.nn.Module, "forward") else [m for m in model.modules() if isinstance(m, kind)]
    assert sorted(map(id, met)) == sorted(map(id, wanted))
    met.clear()
    model(x)
    assert not met
    assert _nodes(model.bn1.after(model.conv1, x)) == ["conv2d_batch_norm"]


def _twice(self: Any, x: flow.Tensor) -> flow.Tensor:
    return x * 2.0


@pytest.mark.parametrize("where", ["module", "class", "subclass"])
def test_a_normalisation_of_ones_own_may_know_of_images_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convolution, norm = _layers()
    if where == "module":
        norm.forward = lambda x: x * 2.0
    elif where == "class":
        monkeypatch.setattr(flow.nn.BatchNorm2d, "forward", _twice)
    else:
        norm = type("Twice", (flow.nn.BatchNorm2d,), {"forward": _twice})(16)
    random = np.random.default_rng(5)
    x, added = (flow.tensor(random.standard_normal(s).astype(np.float32)) for s in ((2, 8, 6, 6), (2, 16, 3, 3)))
    expected = convolution(x).detach().numpy() * 2
    found = [norm.after(convolution, x), norm.after(convolution, x, residual=added, relu=True)]
    np.testing.assert_array_equal(found[0].detach().numpy(), expected)
    np.testing.assert_array_equal(found[1].detach().numpy(), np.maximum(expected + added.numpy(), 0))


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("norm", {"weight": None}),
        ("norm", {"bias": None}),
        ("norm", {"running_mean": None, "running_var": None}),
        ("convolution", {"stride": [2, 1]}),
        ("convolution", {"padding": [0, 1], "dilation": 2, "groups": np.asarray(1)}),
        ("norm", {"momentum": np.asarray(0.25), "eps": np.asarray(1e-3)}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_layers_are_set_to_later_does_as_for_the_two(target: str, settings: dict[str, Any]) -> None:
    def outcome(call: Any) -> list[np.ndarray]:
        layers = dict(zip(("convolution", "norm"), _layers(), strict=True))
        for name, value in settings.items():
            setattr(layers[target], name, value)
        x = flow.tensor(np.random.default_rng(3).standard_normal((2, 8, 9, 9)).astype(np.float32))
        y = call(*layers.values(), x)
        (y * y).sum().backward()
        given = [p.grad for layer in layers.values() for p in layer.parameters()]
        given += [buffer for layer in layers.values() for buffer in layer.buffers()]
        return [t.detach().numpy() for t in (y, *given)]

    one, two = outcome(lambda c, n, x: n.after(c, x)), outcome(lambda c, n, x: n(c(x)))
    for found, expected in zip(one, two, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_memory_and_work_are_labelled_by_both_modules() -> None:
    class Block(flow.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = _layers()

        def forward(self, x: flow.Tensor) -> flow.Tensor:
            return self.norm.after(self.conv, x, relu=True)

    said: list[str] = []
    with machine.observed(lambda instruction, run: (said.append(repr(instruction)), run())):
        Block()(flow.ones(2, 8, 6, 6)).sum().backward()
    assert [line.split(" in ")[-1] for line in said if "conv2d" in line or "batch_norm" in line] == [
        "conv: conv2d",
        "norm: batch_norm",
        "norm.batch_norm: backward",
        "conv.conv2d: backward",
    ]


def test_errors_are_those_of_the_two() -> None:
    convolution, norm = _layers()
    with pytest.raises(ValueError, match=r"conv2d of images \[2, 4, 6, 6\]"):
        norm.after(convolution, flow.ones(2, 4, 6, 6))
    with pytest.raises(ValueError, match="batch_norm over 16 channels got a weight of shape"):
        flow.nn.BatchNorm2d(8).after(convolution, flow.ones(2, 8, 6, 6))
    with pytest.raises(ValueError, match="more than one value per channel"):
        norm.after(convolution, flow.ones(1, 8, 1, 1))
    x = flow.ones(2, 8, 6, 6).requires_grad_()
    y = norm.after(convolution, x)
    with flow.no_grad():
        convolution.weight.fill_(0)
    with pytest.raises(RuntimeError, match="written in place"):
        y.sum().backward()


def _ways(residual: bool) -> list[tuple[str, Any]]:
    """What may change between two calls of the same layers: each makes or changes the layers and images given."""

    def float64(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
        convolution.to(flow.float64)
        norm.to(flow.float64)
        return x.detach().to(flow.float64).requires_grad_()

    def set_(target: str, name: str, value: Any) -> Any:
        def change(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
            setattr({"convolution": convolution, "norm": norm}[target], name, value)
            return x

        return change

    def replace(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
        convolution.weight = flow.nn.Parameter(convolution.weight.detach() * 2.0)
        norm.weight = flow.nn.Parameter(norm.weight.detach() + 1.0)
        return x

    def freeze(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
        convolution.requires_grad_(False)
        norm.bias.requires_grad_(False)
        return x

    def eval_and_back(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
        norm.eval()
        norm.after(convolution, x)
        norm.train()
        return x

    def without_recording(convolution: Any, norm: Any, x: flow.Tensor) -> flow.Tensor:
        with flow.no_grad():
            norm.after(convolution, x, relu=True)
        return x

    ways = [
        ("nothing", lambda convolution, norm, x: x),
        (
            "more images",
            lambda convolution, norm, x: flow.tensor(np.tile(x.detach(), (2, 1, 1, 1)), requires_grad=True),
        ),
        ("images that lie otherwise", lambda convolution, norm, x: flow.tensor(np.array(x.detach())).requires_grad_()),
        ("float64", float64),
        ("eps", set_("norm", "eps", 0.5)),
        ("momentum", set_("norm", "momentum", 0.75)),
        ("stride", set_("convolution", "stride", (1, 1))),
        ("padding", set_("convolution", "padding", (2, 0))),
        ("other parameters", replace),
        ("frozen parameters", freeze),
        ("eval in between", eval_and_back),
        ("no_grad in between", without_recording),
        ("images that want no gradient", lambda convolution, norm, x: x.detach()),
    ]
    # A residual has the shape of the result, which some change.
    return [way for way in ways if not residual or way[0] not in ("more images", "float64", "stride", "padding")]


@pytest.mark.parametrize("residual", [False, True])
def test_what_changes_between_calls_is_followed(residual: bool) -> None:
    for name, change in _ways(residual):
        results = []
        for together in (True, False):
            convolution, norm = _layers()
            random = np.random.default_rng(2)
            x, added = (
                flow.tensor(random.standard_normal(shape).astype(np.float32), requires_grad=True)
                for shape in ((2, 8, 6, 6), (2, 16, 3, 3))
            )
            how: dict[str, Any] = {"residual": added if residual else None, "relu": True}
            found = []
            for step in range(3):
                if step:
                    x = change(convolution, norm, x) if step == 1 else x
                y = norm.after(convolution, x, **how) if together else norm(convolution(x), **how)
                if y.requires_grad:
                    (y * y).sum().backward()
                found += [y.detach(), norm.running_mean, norm.running_var]
                found += [t.grad for t in (convolution.weight, norm.weight, norm.bias, x, added) if t.grad is not None]
            results.append([np.array(tensor.detach()) for tensor in found])
        assert len(results[0]) == len(results[1])
        for one, two in zip(*results, strict=True):
            np.testing.assert_array_equal(one, two, err_msg=name)


def test_a_hook_sees_the_gradient_in_every_step() -> None:
    convolution, norm = _layers()
    seen: list[float] = []
    for step in range(4):
        x = flow.ones(2, 8, 6, 6).requires_grad_()
        y = norm.after(convolution, x, relu=True)
        if step % 2:
            y.register_hook(lambda gradient: seen.append(gradient.sum().item()))
        remove = convolution.weight.register_hook(lambda gradient: gradient * 0.0)
        convolution.weight.grad = None
        y.sum().backward()
        remove()
        assert not convolution.weight.grad.numpy().any()
    assert seen == [y.numel()] * 2


def test_several_threads_share_what_is_prepared() -> None:
    def train(seed: int) -> list[np.ndarray]:
        convolution, norm = (m.to(flow.float64) for m in _layers(seed))
        for step in range(6):
            x = flow.tensor(np.random.default_rng(step).standard_normal((1 + step % 3, 8, 6, 6)))
            norm.after(convolution, x, relu=True).sum().backward()
        return [np.array(held) for held in (convolution.weight.grad, norm.weight.grad, norm.running_var)]

    convolution_norm._plans.cache_clear()
    alone = [train(seed) for seed in range(4)]
    convolution_norm._plans.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(train, range(4)))
    for one, two in zip(alone, together, strict=True):
        for found, expected in zip(one, two, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_operands_that_are_no_tensors_are_named() -> None:
    convolution, norm = _layers()
    with pytest.raises(TypeError, match="conv2d takes tensors; got ndarray"):
        norm.after(convolution, np.ones((2, 8, 6, 6), np.float32))
    with pytest.raises(TypeError, match="batch_norm takes tensors; got ndarray"):
        norm.after(convolution, flow.ones(2, 8, 6, 6), residual=np.ones((2, 16, 3, 3), np.float32))
    norm.running_mean = np.ones(16)
    with pytest.raises(TypeError, match="batch_norm takes tensors; got ndarray"):
        norm.after(convolution, flow.ones(2, 8, 6, 6))
