"""The harness's models in PyTorch, under torchvision's names.

Written here because importing torchvision takes seconds and a hundred megabytes, which would be counted against PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def build_model(name: str, shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """The model `name` with the parameters that `shapes` lists; weights are left as they come."""
    if name == "linear":
        classes, features = shapes["weight"]
        return Linear(features, classes)
    return ResNet(shapes)


class Linear(nn.Linear):
    """One linear layer on flattened images."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.flatten(1))


class Block(nn.Module):
    """A residual block: convolutions with batch norm, ReLU between them and after the addition."""

    def __init__(self, prefix: str, shapes: Mapping[str, tuple[int, ...]], stride: int) -> None:
        super().__init__()
        self.depth = 3 if f"{prefix}.conv3.weight" in shapes else 2
        strided = self.depth - 1  # the 3x3 of a bottleneck is its second; of a basic block, the first is strided
        for index in range(1, self.depth + 1):
            here = stride if index == (strided if self.depth == 3 else 1) else 1
            setattr(self, f"conv{index}", _convolution(shapes[f"{prefix}.conv{index}.weight"], here))
            setattr(self, f"bn{index}", nn.BatchNorm2d(shapes[f"{prefix}.bn{index}.weight"][0]))
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if f"{prefix}.downsample.0.weight" in shapes:
            weight = shapes[f"{prefix}.downsample.0.weight"]
            self.downsample = nn.Sequential(_convolution(weight, stride), nn.BatchNorm2d(weight[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        for index in range(1, self.depth + 1):
            x = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(x))
            if index < self.depth:
                x = self.relu(x)
        x += shortcut
        return self.relu(x)


class ResNet(nn.Module):
    """A ResNet whose depth and widths are read off the table of parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.conv1 = _convolution(shapes["conv1.weight"], 2)
        self.bn1 = nn.BatchNorm2d(shapes["bn1.weight"][0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        for stage in range(1, 5):
            blocks = sorted({int(name.split(".")[1]) for name in shapes if name.startswith(f"layer{stage}.")})
            layers = [Block(f"layer{stage}.{block}", shapes, 2 if stage > 1 and block == 0 else 1) for block in blocks]
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        classes, features = shapes["fc.weight"]
        self.fc = nn.Linear(features, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _convolution(shape: tuple[int, ...], stride: int) -> nn.Conv2d:
    out_channels, in_channels, kernel, _ = shape
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)
