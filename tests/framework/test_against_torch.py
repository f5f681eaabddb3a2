"""ResNet50 against PyTorch: the same numbers in float64, no worse ones in float32, and the same training.

In float64 two right implementations differ by roundings alone, so what is asked there is near equality. In float32 they
differ visibly, on this net by 1e-6 to 1e-1, and no fixed tolerance tells a fault from a rounding: what is asked there is
that Flow is no farther from float64 than PyTorch itself is, times 1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import framework as flow
from framework.nn import functional as F

torch = pytest.importorskip("torch", reason="compares with PyTorch")
models = pytest.importorskip("torchvision.models", reason="compares with torchvision's ResNet50")

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = 100
State = dict[str, Any]


class Result(NamedTuple):
    """What a forward and a backward gave, in float64."""

    outputs: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def nets() -> dict[str, Any]:
    """One net of each kind, filled anew for every use: making one costs more than running it."""
    return {
        "flow.float32": flow.models.resnet50(CLASSES),
        "flow.float64": flow.models.resnet50(CLASSES).to(flow.float64),
        "torch.float32": models.resnet50(num_classes=CLASSES),
        "torch.float64": models.resnet50(num_classes=CLASSES).double(),
    }


def weights(net: Any, seed: int, *, damping: float | None = None, bias: float = 0.0) -> State:
    """A fresh state of PyTorch's net. `damping` scales the residual branches, `bias` opens the ReLUs that follow a normalisation alone."""
    torch.manual_seed(seed)
    for module in net.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    for name, value in state.items():
        if damping is not None and name.endswith("bn3.weight"):
            value.fill_(damping)
        if name.endswith(("bn1.bias", "bn2.bias", "downsample.1.bias")):
            value.fill_(bias)
    return state


def data(seed: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((count, 3, size, size), np.float32), random.integers(CLASSES, size=count)


def run_torch(net: Any, state: State, images: np.ndarray, target: np.ndarray, *, backward: bool = True) -> Result:
    net.load_state_dict(state)
    net.zero_grad()
    with torch.set_grad_enabled(backward):
        outputs = net(torch.tensor(images).to(net.fc.weight.dtype))
        loss = torch.nn.functional.cross_entropy(outputs, torch.tensor(target))
    gradients = {}
    if backward:
        loss.backward()
        gradients = {name: p.grad.double().numpy() for name, p in net.named_parameters()}
    return Result(outputs.detach().double().numpy(), loss.item(), gradients)


def run_flow(
    net: flow.nn.Module, state: State, images: np.ndarray, target: np.ndarray, *, backward: bool = True
) -> Result:
    net.load_state_dict({name: value.numpy() for name, value in state.items()})
    net.zero_grad()
    dtype = net.fc.weight.dtype
    with flow.enable_grad() if backward else flow.no_grad():
        outputs = net(flow.tensor(images, dtype=dtype))
        loss = F.cross_entropy(outputs, flow.tensor(target))
    gradients = {}
    if backward:
        loss.backward()
        gradients = {name: p.grad.numpy().astype(np.float64) for name, p in net.named_parameters()}
    return Result(outputs.detach().numpy().astype(np.float64), loss.item(), gradients)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """‖a - b‖ / ‖b‖."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# ---- float64


def test_float64_agrees_to_nine_digits(nets: dict[str, Any]) -> None:
    state, batch = weights(nets["torch.float32"], 0, damping=0.2), data(0, 2, 64)
    expected = run_torch(nets["torch.float64"], state, *batch)
    got = run_flow(nets["flow.float64"], state, *batch)
    assert distance(got.outputs, expected.outputs) < 1e-9
    assert abs(got.loss / expected.loss - 1) < 1e-9
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert np.abs(got.gradients[name] - gradient).max() < 1e-9 * np.abs(gradient).max(), name
    # The running figures moved alike too.
    theirs = nets["torch.float64"].state_dict()
    for name, value in nets["flow.float64"].state_dict().items():
        np.testing.assert_allclose(value.numpy(), theirs[name].numpy(), rtol=1e-9, err_msg=name)


# ---- float32


def test_float32_outputs_are_no_farther_from_float64_than_pytorchs(nets: dict[str, Any]) -> None:
    """On the net as it is initialised. The ratio of one seed varies by 15 % or so, the mean of seven by 6 %: a ratio of 1
    stays under 1.2 at three standard errors, and one of 1.5 is found. The loss is one number, a projection of the outputs'
    error: its ratio would be one of two accidents, so it is not asked for separately."""

    def ratio(seed: int) -> float:
        state, batch = weights(nets["torch.float32"], seed), data(seed, 4, 64)
        exact = run_torch(nets["torch.float64"], state, *batch, backward=False).outputs
        theirs = run_torch(nets["torch.float32"], state, *batch, backward=False).outputs
        mine = run_flow(nets["flow.float32"], state, *batch, backward=False).outputs
        return distance(mine, exact) / distance(theirs, exact)

    ratios = [ratio(seed) for seed in range(7)]
    assert np.exp(np.mean(np.log(ratios))) <= 1.2, f"ratios of the distances to float64: {np.round(ratios, 2)}"


def test_float32_gradients_are_no_farther_from_float64_than_pytorchs(nets: dict[str, Any]) -> None:
    """A gradient errs in two ways. Smoothly, by the roundings of backward itself; and by leaps, where a rounding in forward
    carries a number over the kink of a ReLU or to another maximum of a window: one such leap moves whole tensors by 1e-3,
    a thousand times what roundings do, and strikes either implementation by chance. The leaps are as frequent as forward is
    inexact, which the test of the outputs bounds; here they are kept rare, so that roundings are what is measured: the
    residual branches are damped and the normalised numbers lie around 2.5, where few are near 0. What leaps are left (in
    about one run of ten) the median over five seeds passes over; without them the ratios of two seeds differ by 2 %."""

    def ratios(seed: int) -> tuple[float, float]:
        state, batch = weights(nets["torch.float32"], seed, damping=0.2, bias=2.5), data(seed, 4, 64)
        exact = run_torch(nets["torch.float64"], state, *batch).gradients
        theirs = run_torch(nets["torch.float32"], state, *batch).gradients
        mine = run_flow(nets["flow.float32"], state, *batch).gradients
        each = [distance(mine[name], exact[name]) / distance(theirs[name], exact[name]) for name in exact]
        return float(np.median(each)), distance(joined(mine), joined(exact)) / distance(joined(theirs), joined(exact))

    def joined(gradients: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([gradient.ravel() for gradient in gradients.values()])

    by_seed = np.array([ratios(seed) for seed in range(5)])
    of_tensors, of_all = np.median(by_seed, axis=0)
    assert of_tensors <= 1.2, f"median over the parameters, by seed: {by_seed[:, 0].round(2)}"
    assert of_all <= 1.2, f"all gradients as one vector, by seed: {by_seed[:, 1].round(2)}"


# ---- training


def losses(net: Any, optimizer: Any, cross_entropy: Callable[..., Any], images: Any, target: Any) -> np.ndarray:
    """The losses of twenty steps on one batch. Both frameworks go through these very lines."""
    found = []
    for _ in range(20):
        loss = cross_entropy(net(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < found[0] / 3, "it learned little, so equal losses would say little"
    return np.array(found)


def train_torch(net: Any, state: State, images: np.ndarray, target: np.ndarray, rate: float) -> np.ndarray:
    net.load_state_dict(state)
    optimizer = torch.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    x = torch.tensor(images).to(net.fc.weight.dtype)
    return losses(net, optimizer, torch.nn.functional.cross_entropy, x, torch.tensor(target))


def train_flow(net: flow.nn.Module, state: State, images: np.ndarray, target: np.ndarray, rate: float) -> np.ndarray:
    net.load_state_dict({name: value.numpy() for name, value in state.items()})
    optimizer = flow.optim.SGD(net.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    return losses(net, optimizer, F.cross_entropy, flow.tensor(images, dtype=net.fc.weight.dtype), flow.tensor(target))


def test_twenty_steps_of_float64_give_the_same_losses() -> None:
    """A ResNet of one block a stage, for the time it takes. Roundings grow from step to step, to 1e-12 in the end."""
    theirs = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], CLASSES).double()
    mine = flow.models.ResNet(flow.models.resnet.BasicBlock, (1, 1, 1, 1), CLASSES).to(flow.float64)
    torch.manual_seed(3)
    theirs.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    batch = data(3, 4, 32)
    np.testing.assert_allclose(
        train_flow(mine, state, *batch, 0.01), train_torch(theirs, state, *batch, 0.01), rtol=1e-9
    )


def test_twenty_steps_of_float32_give_the_same_losses() -> None:
    """A ResNet of one bottleneck a stage, for the time it takes. As close to PyTorch's as PyTorch's are to each other: its default run, one in NHWC and one with the batch reversed
    differ in the order of additions alone, here by 1e-6 at any step, for leaps are rare on this net (see the gradients
    above). Flow may come four times as far; and as much as one leap does on top, 1e-4 of a loss, since chance may strike
    it alone."""
    net = models.ResNet(models.resnet.Bottleneck, [1, 1, 1, 1], CLASSES)
    mine = flow.models.ResNet(flow.models.resnet.Bottleneck, (1, 1, 1, 1), CLASSES)
    state, (images, target) = weights(net, 4, damping=0.2, bias=2.5), data(4, 4, 32)
    expected = train_torch(net, state, images, target, 3e-4)
    others = [
        train_torch(net, state, images[::-1].copy(), target[::-1].copy(), 3e-4),
        train_torch(net.to(memory_format=torch.channels_last), state, images, target, 3e-4),
    ]
    apart = np.max(np.abs(np.array(others) - expected))
    got = train_flow(mine, state, images, target, 3e-4)
    difference = np.max(np.abs(got - expected))
    assert difference <= 4 * apart + 1e-4 * expected[0], (
        f"PyTorch's runs differ by {apart:.2e}, Flow's from them by {difference:.2e}"
    )
