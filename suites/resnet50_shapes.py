"""What a ResNet50 on images of 224×224 consists of: its distinct operations, and how often it has each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

SIZE = 224
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks, and the channels of their 3×3 convolutions
EXPANSION = 4


@dataclass(frozen=True)
class Convolution:
    """A convolution without a bias; `size` is its images' height and width."""

    channels: int
    out_channels: int
    kernel: int
    stride: int
    size: int

    @property
    def label(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.channels}->{self.out_channels} {self.kernel}x{self.kernel}{stride} @{self.size}"


def convolutions() -> Counter[Convolution]:
    """The convolutions, and how many layers are alike."""
    return Counter(convolution for convolution, _ in _layers())


def normalisations(*, residual: bool | None) -> Counter[tuple[int, int]]:
    """(channels, size) of batch normalisations with a ReLU, with or without a residual; None for those without a ReLU."""
    return Counter(
        (convolution.out_channels, -(-convolution.size // convolution.stride))
        for convolution, has_residual in _layers()
        if has_residual is residual
    )


def parameters() -> list[list[int]]:
    """The shapes of all parameters."""
    shapes: list[list[int]] = []
    for convolution, _ in _layers():
        shapes.append([convolution.out_channels, convolution.channels, convolution.kernel, convolution.kernel])
        shapes += [[convolution.out_channels]] * 2
    return [*shapes, [1000, 2048], [1000]]


def activations(batch_size: int) -> list[list[int]]:
    """The shapes of what convolutions and normalisations give, in the order of a forward pass."""
    shapes = []
    for convolution, _ in _layers():
        size = -(-convolution.size // convolution.stride)
        shapes += [[batch_size, convolution.out_channels, size, size]] * 2
    return shapes


def _layers() -> Iterator[tuple[Convolution, bool | None]]:
    """Each convolution, with whether a residual is added behind its normalisation; None for a shortcut's."""
    yield Convolution(3, 64, 7, 2, SIZE), False
    channels, size = 64, SIZE // 4
    for stage, (blocks, width) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            after = -(-size // stride)
            yield Convolution(channels, width, 1, 1, size), False
            yield Convolution(width, width, 3, stride, size), False
            if block == 0:
                yield Convolution(channels, width * EXPANSION, 1, stride, size), None
            yield Convolution(width, width * EXPANSION, 1, 1, after), True
            channels, size = width * EXPANSION, after
