"""ResNet50's operations one by one, Flow beside PyTorch: where the time of a training step goes.

`pytest suites -k conv`, or `-k "batch_norm or sgd"`; `--flowbench-batch-size N` and `--flowbench-device` say of what and where.
No time is asserted: what is, is that both sides compute the same.
"""

from __future__ import annotations

from functools import partial

import pytest

from suites import resnet50_shapes as resnet50

SIDES = {"Flow": "suites.flow_operations", "PyTorch": "suites.torch_operations"}
BOTH = ("forward", "backward")

# Relative to the norm of PyTorch's result. On CUDA both multiply convolutions with the 10 bits of TF32.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-5}
CONVOLUTION_TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}


@pytest.fixture
def compared(side_by_side, operations_device):
    """`side_by_side` for Flow and PyTorch."""
    pytest.importorskip("torch", reason="PyTorch is what Flow is compared with")
    return partial(side_by_side, SIDES, tolerance=TOLERANCE[operations_device])


def _with_uses(counter, label):
    """One parameter for each distinct shape, the number of its uses along."""
    return [pytest.param(shape, uses, id=label(shape)) for shape, uses in counter.items()]


@pytest.mark.parametrize(("shape", "uses"), _with_uses(resnet50.convolutions(), lambda shape: shape.label))
@pytest.mark.parametrize("direction", ["forward", "data gradient", "weight gradient"])
def test_convolution(compared, batch_size, operations_device, direction, shape, uses) -> None:
    if direction == "data gradient" and shape.channels == 3:
        pytest.skip("nobody asks for the gradient of the images")
    arguments = {
        "direction": direction,
        "x": [batch_size, shape.channels, shape.size, shape.size],
        "weight": [shape.out_channels, shape.channels, shape.kernel, shape.kernel],
        "stride": shape.stride,
    }
    compared(
        "convolution", arguments, tolerance=CONVOLUTION_TOLERANCE[operations_device],
        title=f"convolution, {direction}", label=f"[{batch_size}] {shape.label}", uses=uses,
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "uses"), _with_uses(resnet50.normalisations(residual=False), "{0[0]}@{0[1]}".format))
@pytest.mark.parametrize("direction", BOTH)
def test_batch_norm_relu(compared, batch_size, direction, shape, uses) -> None:
    _normalise(compared, "BN + ReLU", batch_size, direction, shape, uses, residual=False, relu=True)


@pytest.mark.parametrize(("shape", "uses"), _with_uses(resnet50.normalisations(residual=True), "{0[0]}@{0[1]}".format))
@pytest.mark.parametrize("direction", BOTH)
def test_batch_norm_add_relu(compared, batch_size, direction, shape, uses) -> None:
    _normalise(compared, "BN + add + ReLU", batch_size, direction, shape, uses, residual=True, relu=True)


@pytest.mark.parametrize(("shape", "uses"), _with_uses(resnet50.normalisations(residual=None), "{0[0]}@{0[1]}".format))
@pytest.mark.parametrize("direction", BOTH)
def test_batch_norm(compared, batch_size, direction, shape, uses) -> None:
    _normalise(compared, "BN", batch_size, direction, shape, uses, residual=False, relu=False)


def _normalise(compared, title, batch_size, direction, shape, uses, *, residual, relu) -> None:
    channels, size = shape
    x = [batch_size, channels, size, size]
    arguments = {"direction": direction, "x": x, "residual": residual, "relu": relu}
    # The sums over a channel cancel to a small part of what is added up.
    compared(
        "batch_norm", arguments, tolerance=1e-4, title=f"{title}, {direction}", label=f"{x}", uses=uses
    )  # fmt: skip


@pytest.mark.parametrize("direction", BOTH)
def test_max_pool(compared, batch_size, direction) -> None:
    x = [batch_size, 64, 112, 112]
    compared("max_pool", {"direction": direction, "x": x}, title=f"max pool, {direction}", label=f"{x}")


@pytest.mark.parametrize("direction", BOTH)
def test_linear(compared, batch_size, direction) -> None:
    arguments = {"direction": direction, "rows": batch_size, "features": 2048, "classes": 1000}
    compared("linear", arguments, title=f"linear, {direction}", label=f"[{batch_size}] 2048->1000")


@pytest.mark.parametrize("direction", BOTH)
def test_cross_entropy(compared, batch_size, direction) -> None:
    arguments = {"direction": direction, "rows": batch_size, "classes": 1000}
    compared("cross_entropy", arguments, title=f"cross-entropy, {direction}", label=f"[{batch_size}, 1000]")


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd(compared, momentum) -> None:
    shapes = resnet50.parameters()
    compared(
        "sgd",
        {"shapes": shapes, "momentum": momentum},
        title="SGD step",
        label=f"{len(shapes)} tensors, momentum {momentum:g}",
    )


@pytest.mark.parametrize("pattern", ["one at a time", "newest first", "oldest first"])
@pytest.mark.parametrize("what", ["activations", "scalars"])
def test_allocator(compared, batch_size, pattern, what) -> None:
    shapes = resnet50.activations(batch_size) if what == "activations" else [[1]] * 106
    compared(
        "allocator",
        {"pattern": pattern, "shapes": shapes},
        title=f"allocator, {pattern}",
        label=f"{len(shapes)} {what}",
    )
