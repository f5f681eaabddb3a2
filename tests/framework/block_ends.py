"""The end of a residual block with a shortcut of its own, as one operation and forced apart: what tests on every device compare."""

from __future__ import annotations

from typing import Any

import numpy as np

import framework as flow
from framework.vm import machine


class End(flow.nn.Module):
    """relu(norm(conv(x)) + shortcut(residual)): 8 and 4 channels come in, `channels` go out."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv = flow.nn.Conv2d(8, channels, 3, padding=1, bias=False)
        self.norm = flow.nn.BatchNorm2d(channels, eps=1e-3)
        self.downsample = flow.nn.Sequential(
            flow.nn.Conv2d(4, channels, 1, stride=2, bias=False), flow.nn.BatchNorm2d(channels, momentum=0.3)
        )

    def forward(self, x: flow.Tensor, residual: flow.Tensor) -> flow.Tensor:
        return self.norm.after(self.conv, x, residual=residual, shortcut=self.downsample, relu=True)


def force_apart(model: flow.nn.Module) -> flow.nn.Module:
    """Gives every `downsample` in a model a forward of its own, so that no operation takes it in."""
    for module in model.modules():
        shortcut = getattr(module, "downsample", None)
        if shortcut is not None:
            own = shortcut.forward
            shortcut.forward = lambda x, own=own: own(x)
    return model


def images(*shape: int, seed: int = 0, dtype: Any = flow.float32, device: Any = "cpu") -> flow.Tensor:
    """Normal numbers that want a gradient and lie NHWC, as what convolutions give."""
    drawn = np.random.default_rng(seed).standard_normal(shape).transpose(0, 2, 3, 1)
    laid = flow.tensor(np.ascontiguousarray(drawn), dtype=dtype, device=device).permute(0, 3, 1, 2)
    return laid.detach().requires_grad_()


def issued(call: Any) -> list[str]:
    """The names of the kernels that a call issues."""
    names: list[str] = []
    with machine.observed(lambda instruction, run: (names.append(instruction.kernel.__name__), run())):
        call()
    return names


def outcome(
    *,
    apart: bool,
    n: int = 2,
    size: int = 6,
    channels: int = 16,
    dtype: Any = flow.float32,
    device: Any = "cpu",
    uses: int = 2,
    frozen: tuple[str, ...] = (),
    steps: int = 2,
) -> dict[str, np.ndarray]:
    """Everything that training an `End` leaves: results, gradients, parameters and running figures, by name.

    Its result is used so often (twice, and its gradient comes in two parts). `frozen` are the names of what wants no
    gradient: parameters, x and residual.
    """
    flow.manual_seed(4)
    model = End(channels).to(device).to(dtype)
    if apart:
        force_apart(model)
    x = images(n, 8, size, size, seed=1, dtype=dtype, device=device)
    residual = images(n, 4, 2 * size - 1, 2 * size - 1, seed=2, dtype=dtype, device=device)
    inputs = {"x": x, "residual": residual}
    for name, tensor in (*model.named_parameters(), *inputs.items()):
        tensor.requires_grad_(not name.startswith(frozen) if frozen else True)
    factors = [images(n, channels, size, size, seed=3 + k, dtype=dtype, device=device).detach() for k in range(uses)]
    gradient = images(n, channels, size, size, seed=7, dtype=dtype, device=device).detach()
    found: dict[str, flow.Tensor] = {}
    for step in range(steps):
        # Behind something that is no leaf, so that gradients pass through memory of their own.
        y = model(x * 1.0, residual * 1.0)
        found[f"y {step}"] = y.detach()
        if y.requires_grad:
            sum((y * factor for factor in factors[1:]), y * factors[0]).backward(gradient)
    for name, tensor in (*model.named_parameters(), *inputs.items()):
        if tensor.grad is not None:
            found[f"gradient of {name}"] = tensor.grad
    found |= {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, flow.Tensor)}
    # On the device: CPUs do not know bfloat16.
    wide = flow.float32 if dtype is flow.bfloat16 else dtype
    return {name: np.array(tensor.to(wide).to("cpu")) for name, tensor in found.items()}


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Raises AssertionError naming what differs."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def trained(
    model: flow.nn.Module, *, size: int = 32, n: int = 2, steps: int = 3, dtype: Any = flow.float32, device: Any = "cpu"
) -> dict[str, np.ndarray]:
    """Losses, parameters and running figures of a ResNet for 4 classes after steps on images drawn anew."""
    model = model.to(dtype).to(device)
    optimizer = flow.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    target = flow.tensor(np.arange(n) % 4, device=device)
    losses = []
    for step in range(steps):
        x = images(n, 3, size, size, seed=step, dtype=dtype, device=device).detach()
        loss = flow.nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {name: np.array(value) for name, value in model.to("cpu").state_dict().items()}
    return {"losses": np.array(losses), **found}
