"""ResNet (v1.5: the stride sits in a bottleneck's 3×3 convolution), with torchvision's parameter names.

He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015.
"""

from __future__ import annotations

from functools import partial

from framework.nn import (
    AdaptiveAvgPool2d,
    BatchNorm2d,
    Conv2d,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    Sequential,
    init,
)
from framework.tensor import Tensor


def resnet18(num_classes: int = 1000, *, weights: None = None) -> ResNet:
    """ResNet-18: 11.7 million parameters."""
    return _made(BasicBlock, (2, 2, 2, 2), num_classes, weights)


def resnet34(num_classes: int = 1000, *, weights: None = None) -> ResNet:
    """ResNet-34: 21.8 million parameters."""
    return _made(BasicBlock, (3, 4, 6, 3), num_classes, weights)


def resnet50(num_classes: int = 1000, *, weights: None = None) -> ResNet:
    """ResNet-50: 25.6 million parameters."""
    return _made(Bottleneck, (3, 4, 6, 3), num_classes, weights)


def resnet101(num_classes: int = 1000, *, weights: None = None) -> ResNet:
    """ResNet-101: 44.5 million parameters."""
    return _made(Bottleneck, (3, 4, 23, 3), num_classes, weights)


def resnet152(num_classes: int = 1000, *, weights: None = None) -> ResNet:
    """ResNet-152: 60.2 million parameters."""
    return _made(Bottleneck, (3, 8, 36, 3), num_classes, weights)


class ResNet(Module):
    """Images [N, 3, H, W] to logits [N, num_classes]."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, int, int, int], num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = _convolution(3, 64, 7, stride=2)
        self.bn1 = BatchNorm2d(64)
        self.maxpool = MaxPool2d(3, stride=2, padding=1)
        self.layer1, channels = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2, channels = _stage(block, channels, 128, blocks[1], stride=2)
        self.layer3, channels = _stage(block, channels, 256, blocks[2], stride=2)
        self.layer4, channels = _stage(block, channels, 512, blocks[3], stride=2)
        self.avgpool = AdaptiveAvgPool2d(1)
        self.flatten = Flatten()
        self.fc = Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.bn1.after(self.conv1, x, relu=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))


class BasicBlock(Module):
    """Two 3×3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, channels, 3, stride)
        self.bn1 = BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, 3)
        self.bn2 = BatchNorm2d(channels)
        self.downsample = _shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1.after(self.conv1, x, relu=True)
        return self.bn2.after(self.conv2, out, residual=x, shortcut=self.downsample, relu=True)


class Bottleneck(Module):
    """A 3×3 convolution between two 1×1 ones, around a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, channels, 1)
        self.bn1 = BatchNorm2d(channels)
        self.conv2 = _convolution(channels, channels, 3, stride)
        self.bn2 = BatchNorm2d(channels)
        self.conv3 = _convolution(channels, channels * self.expansion, 1)
        self.bn3 = BatchNorm2d(channels * self.expansion)
        self.downsample = _shortcut(in_channels, channels * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn1.after(self.conv1, x, relu=True)
        out = self.bn2.after(self.conv2, out, relu=True)
        return self.bn3.after(self.conv3, out, residual=x, shortcut=self.downsample, relu=True)


def _made(
    block: type[BasicBlock] | type[Bottleneck], blocks: tuple[int, int, int, int], num_classes: int, weights: object
) -> ResNet:
    """A ResNet with weights that are drawn. Raises ValueError where others are asked for."""
    if weights is not None:
        raise ValueError(
            f"weights={weights!r}: Flow brings no trained weights; load_state_dict() takes the state_dict() of a torchvision"
            " model that has them"
        )
    return ResNet(block, blocks, num_classes)


def _convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> Conv2d:
    """A convolution that leaves the size to its stride, and that starts as the paper has it."""
    return Conv2d(
        in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False,
        draw_weight=partial(init.kaiming_normal_, mode="fan_out"),
    )  # fmt: skip


def _shortcut(in_channels: int, out_channels: int, stride: int) -> Sequential | None:
    """What fits a block's input to its output, where they differ in shape."""
    if stride == 1 and in_channels == out_channels:
        return None
    return Sequential(_convolution(in_channels, out_channels, 1, stride), BatchNorm2d(out_channels))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_channels: int, channels: int, count: int, stride: int
) -> tuple[Sequential, int]:
    """`count` blocks, of which the first changes the size, and the channels they give."""
    out_channels = channels * block.expansion
    first = block(in_channels, channels, stride)
    return Sequential(first, *[block(out_channels, channels, 1) for _ in range(count - 1)]), out_channels
