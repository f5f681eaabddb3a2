"""The models engines are measured on, as tables of parameter names and shapes (torchvision's names), and their arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowbench.errors import FlowbenchError, unknown_name

CLASSES = 1000

# He et al., "Deep Residual Learning for Image Recognition", table 1: blocks per stage, and the kind of block.
_RESNETS: dict[str, tuple[Literal["basic", "bottleneck"], tuple[int, int, int, int]]] = {
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
}

# One flatten and one linear layer: the smallest model, for an engine's first step and for tests.
_LINEAR = "linear"


@dataclass(frozen=True)
class Parameter:
    """One entry of a model's state: `kind` says how it starts."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["convolution", "linear", "bias", "one", "damped", "zero", "count"]
    fan_in: int = 0


@dataclass(frozen=True)
class Model:
    """A model for images of one shape: its parameters and buffers in order, and multiply-adds of one image's forward."""

    name: str
    parameters: tuple[Parameter, ...]
    multiply_adds: int


def model_names() -> list[str]:
    """The names of the models known here."""
    return [*_RESNETS, _LINEAR]


@functools.cache
def describe_model(name: str, image_shape: tuple[int, int, int]) -> Model:
    """The model `name` for images [C, H, W]; raises FlowbenchError for an unknown name."""
    if name == _LINEAR:
        features = image_shape[0] * image_shape[1] * image_shape[2]
        return Model(name, tuple(_linear("", features)), features * CLASSES)
    if name not in _RESNETS:
        raise unknown_name("model", name, model_names())
    layers = _Layers(image_shape)
    layers.resnet(*_RESNETS[name])
    return Model(name, tuple(layers.parameters), layers.multiply_adds)


def check_input(name: str, input_shape: tuple[int, ...]) -> None:
    """Raise FlowbenchError where `name` cannot be trained on inputs of shape [N, C, H, W]."""
    values = last_norm_values(name, input_shape)
    if values is not None and values < 2:
        raise FlowbenchError(
            f"{name} on [{', '.join(map(str, input_shape))}]: its last batch norm would see 1 value per channel, "
            "expected at least 2: take a larger batch or images larger than 32x32"
        )


def last_norm_values(name: str, input_shape: tuple[int, ...]) -> int | None:
    """How many values per channel the last batch norm of `name` sees on inputs [N, C, H, W]; None where it has none."""
    batch_size, _, height, width = input_shape
    if name == _LINEAR:
        return None
    if name not in _RESNETS:
        raise unknown_name("model", name, model_names())
    return batch_size * -(-height // 32) * -(-width // 32)


class _Layers:
    """Walks a network from input to output, keeping the size of the activations."""

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        self.channels, self.height, self.width = image_shape
        self.parameters: list[Parameter] = []
        self.multiply_adds = 0

    def resnet(self, kind: str, blocks: tuple[int, ...]) -> None:
        self.convolution("conv1", "bn1", 64, kernel=7, stride=2)
        self.height, self.width = -(-self.height // 2), -(-self.width // 2)
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                self.block(f"layer{stage + 1}.{block}", kind, 64 * 2**stage, stride)
        self.parameters += _linear("fc.", self.channels)
        self.multiply_adds += self.channels * CLASSES

    def block(self, prefix: str, kind: str, width: int, stride: int) -> None:
        before = (self.channels, self.height, self.width)
        if kind == "basic":
            plan = [(width, 3, stride), (width, 3, 1)]
        else:  # the stride sits in the 3x3 convolution, as torchvision has it
            plan = [(width, 1, 1), (width, 3, stride), (width * 4, 1, 1)]
        for index, (channels, kernel, step) in enumerate(plan, start=1):
            self.convolution(
                f"{prefix}.conv{index}", f"{prefix}.bn{index}", channels, kernel, step, last=index == len(plan)
            )
        if stride != 1 or before[0] != self.channels:
            after = self.channels
            self.channels, self.height, self.width = before
            self.convolution(f"{prefix}.downsample.0", f"{prefix}.downsample.1", after, 1, stride)

    def convolution(self, name: str, norm: str, channels: int, kernel: int, stride: int, last: bool = False) -> None:
        fan_in = self.channels * kernel * kernel
        self.height, self.width = -(-self.height // stride), -(-self.width // stride)
        self.multiply_adds += channels * fan_in * self.height * self.width
        self.parameters += [
            Parameter(f"{name}.weight", (channels, self.channels, kernel, kernel), "convolution", fan_in),
            Parameter(f"{norm}.weight", (channels,), "damped" if last else "one"),
            Parameter(f"{norm}.bias", (channels,), "zero"),
            Parameter(f"{norm}.running_mean", (channels,), "zero"),
            Parameter(f"{norm}.running_var", (channels,), "one"),
            Parameter(f"{norm}.num_batches_tracked", (), "count"),
        ]
        self.channels = channels


def _linear(prefix: str, features: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}weight", (CLASSES, features), "linear", features)
    yield Parameter(f"{prefix}bias", (CLASSES,), "bias", features)
