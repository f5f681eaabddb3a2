"""Operands that do not fit: each is refused in one line that names the operation, what it got and what it takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import framework as flow
from framework.nn import functional as F

IMAGES = flow.ones(2, 4, 6, 6)
DOUBLES = flow.ones(2, 4, 6, 6, dtype=flow.float64)
INTEGERS = flow.tensor(np.ones((2, 4, 6, 6), np.int64))
WEIGHT = flow.ones(8, 4, 3, 3)
VECTOR = flow.ones(4)

REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "conv2d, dimensions": (lambda: F.conv2d(VECTOR, WEIGHT), ValueError, r"conv2d takes images \[N, C, H, W\]; got shape \[4\]"),
    "conv2d, channels": (lambda: F.conv2d(IMAGES, flow.ones(8, 3, 3, 3)), ValueError, r"conv2d of images \[2, 4, 6, 6\].*weight \[O, 4/groups, kh, kw\].*got \[8, 3, 3, 3\]"),
    "conv2d, weight of no dimension": (lambda: F.conv2d(IMAGES, flow.ones()), ValueError, r"weight .*got \[\]"),
    "conv2d, groups": (lambda: F.conv2d(IMAGES, flow.ones(9, 2, 3, 3), groups=2), ValueError, r"2 group\(s\).*O a multiple of groups; got \[9, 2, 3, 3\]"),
    "conv2d, bias": (lambda: F.conv2d(IMAGES, WEIGHT, VECTOR), ValueError, r"conv2d with 8 output channels needs a bias of shape \[8\]; got \[4\]"),
    "conv2d, stride": (lambda: F.conv2d(IMAGES, WEIGHT, stride=0), ValueError, "stride is one integer >= 1, or two; got 0"),
    "conv2d, padding": (lambda: F.conv2d(IMAGES, WEIGHT, padding=(1, -1)), ValueError, r"padding is one integer >= 0, or two; got \(1, -1\)"),
    "conv2d, window": (lambda: F.conv2d(IMAGES, WEIGHT, dilation=4), ValueError, "conv2d: a window of 9 does not fit an image of 6 padded by 0"),
    "conv2d, types": (lambda: F.conv2d(DOUBLES, WEIGHT), TypeError, r"conv2d takes operands of one floating-point type; got flow.float64, flow.float32; convert with .to\(\)"),
    "conv2d, integers": (lambda: F.conv2d(INTEGERS, INTEGERS), TypeError, "conv2d takes operands of one floating-point type; got flow.int64"),
    "conv2d, array": (lambda: F.conv2d(IMAGES, np.ones((8, 4, 3, 3), np.float32)), TypeError, r"conv2d takes tensors; got ndarray, which flow.tensor\(\) converts"),
    "max_pool2d, window": (lambda: F.max_pool2d(IMAGES, 7), ValueError, "max_pool2d: a window of 7 does not fit an image of 6 padded by 0"),
    "max_pool2d, padding": (lambda: F.max_pool2d(IMAGES, 3, padding=2), ValueError, r"max_pool2d pads a window of \(3, 3\) by at most half of it; got \(2, 2\)"),
    "max_pool2d, dimensions": (lambda: F.max_pool2d(VECTOR, 2), ValueError, r"max_pool2d takes images"),
    "max_pool2d, integers": (lambda: F.max_pool2d(INTEGERS, 2), TypeError, "max_pool2d takes operands of one floating-point type; got flow.int64"),
    "max_pool2d, fractions": (lambda: F.max_pool2d(IMAGES, (2.0, 2)), ValueError, r"kernel_size is one integer >= 1, or two; got \(2.0, 2\)"),
    "max_pool2d, stride": (lambda: F.max_pool2d(IMAGES, 2, 0), ValueError, "stride is one integer >= 1, or two; got 0"),
    "max_pool2d, text": (lambda: F.max_pool2d(IMAGES, "3"), ValueError, "kernel_size is one integer >= 1, or two; got 3"),
    "conv2d, fractions": (lambda: F.conv2d(IMAGES, WEIGHT, stride=(1.5, 1)), ValueError, r"stride is one integer >= 1, or two; got \(1.5, 1\)"),
    "global_avg_pool2d": (lambda: F.global_avg_pool2d(flow.ones(2, 3)), ValueError, r"global_avg_pool2d takes images"),
    "batch_norm, weight": (lambda: F.batch_norm(IMAGES, None, None, flow.ones(3), training=True), ValueError, r"batch_norm over 4 channels got a weight of shape \[3\]"),
    "batch_norm, running": (lambda: F.batch_norm(IMAGES, flow.ones(3), VECTOR), ValueError, r"got a running_mean of shape \[3\]"),
    "batch_norm, no running": (lambda: F.batch_norm(IMAGES, None, VECTOR), ValueError, "outside training needs running_mean and running_var"),
    "batch_norm, one value": (lambda: F.batch_norm(flow.ones(1, 4, 1, 1), None, None, training=True), ValueError, r"more than one value per channel; got shape \[1, 4, 1, 1\]"),
    "batch_norm, no value": (lambda: F.batch_norm(flow.ones(0, 4, 2, 2), None, None, training=True), ValueError, r"more than one value per channel; got shape \[0, 4, 2, 2\]"),
    "batch_norm, residual": (lambda: F.batch_norm(IMAGES, VECTOR, VECTOR, residual=flow.ones(2, 4, 6, 5)), ValueError, r"got a residual of \[2, 4, 6, 5\]"),
    "batch_norm, integers": (lambda: F.batch_norm(INTEGERS, VECTOR, VECTOR), TypeError, "batch_norm takes operands of one floating-point type; got flow.int64"),
    "linear": (lambda: F.linear(flow.ones(2, 3), flow.ones(5, 4)), ValueError, r"linear takes x \[N, I\] and weight \[O, I\]; got \[2, 3\] and \[5, 4\]"),
    "linear, dimensions": (lambda: F.linear(flow.ones(2, 3, 4), flow.ones(5, 3)), ValueError, r"linear takes x \[N, I\] and weight \[O, I\]; got \[2, 3, 4\] and \[5, 3\]"),
    "conv2d, nothing": (lambda: F.conv2d(None, IMAGES), TypeError, "conv2d takes tensors; got NoneType"),
    "conv2d, no weight": (lambda: F.conv2d(IMAGES, None), TypeError, "conv2d takes tensors; got NoneType"),
    "batch_norm, nothing": (lambda: F.batch_norm(None, None, None), TypeError, "batch_norm takes tensors; got NoneType"),
    "resnet, nothing": (lambda: flow.models.resnet18(2)(None), TypeError, "conv2d takes tensors; got NoneType"),
    "linear, PyTorch's": (lambda: F.linear(flow.ones(2, 3), pytest.importorskip("torch").ones(3, 3)), TypeError, r"linear takes tensors; got torch's Tensor, which flow.tensor\(\) converts"),
    "zeros, fraction": (lambda: flow.zeros(2, 1.5), TypeError, "a shape is made of integers; got 2, 1.5"),
    "zeros, number alone": (lambda: flow.zeros(2.0), TypeError, "a shape is made of integers; got 2.0"),
    "zeros, text": (lambda: flow.zeros("ab"), TypeError, "a shape is made of integers; got 'ab'"),
    "linear layer, fraction": (lambda: flow.nn.Linear(4.0, 8), TypeError, "a shape is made of integers; got 8, 4.0"),
    "reshape, fraction": (lambda: VECTOR.reshape(2, 2.0), TypeError, "extents and dimensions are integers; got 2, 2.0"),
    "permute, nothing": (lambda: VECTOR.permute(None), TypeError, "extents and dimensions are integers; got None"),
    "linear, no weight": (lambda: F.linear(flow.ones(2, 3), None), TypeError, "linear takes tensors; got NoneType"),
    "linear, bias": (lambda: F.linear(flow.ones(2, 3), flow.ones(5, 3), flow.ones(3)), ValueError, r"linear with 5 outputs got a bias of shape \[3\]"),
    "linear, types": (lambda: F.linear(flow.ones(2, 3), flow.ones(5, 3, dtype=flow.float64)), TypeError, "linear takes operands of one floating-point type"),
    "matmul": (lambda: flow.ones(2, 3) @ flow.ones(2, 3), ValueError, r"got \[2, 3\] and \[2, 3\]"),
    "matmul, vector": (lambda: flow.ones(2, 3) @ flow.ones(3), ValueError, r"got \[2, 3\] and \[3\]"),
    "matmul, number": (lambda: flow.ones(2, 3) @ 2, TypeError, "matmul takes two tensors; got Tensor and int"),
    "matmul, types": (lambda: flow.ones(2, 2) @ flow.ones(2, 2, dtype=flow.float64), TypeError, "operands of one type; got flow.float32 and flow.float64"),
    "cross_entropy, shapes": (lambda: F.cross_entropy(flow.ones(2, 3), flow.tensor([1])), ValueError, r"logits \[N, C\] and targets \[N\]; got \[2, 3\] and \[1\]"),
    "cross_entropy, floats": (lambda: F.cross_entropy(flow.ones(2, 3), flow.ones(2)), TypeError, "class numbers as int64 or int32; got flow.float32"),
    "cross_entropy, classes": (lambda: F.cross_entropy(flow.ones(2, 3), flow.tensor([0, 3])), ValueError, r"targets must lie in \[0, 3\), the number of classes; got 0 to 3"),
    "cross_entropy, negative": (lambda: F.cross_entropy(flow.ones(2, 3), flow.tensor([0, -1])), ValueError, "got -1 to 0"),
    "add, shapes": (lambda: flow.ones(2, 3) + flow.ones(2), ValueError, r"shapes \[2, 3\] and \[2\] do not broadcast"),
    "add, text": (lambda: flow.ones(2) + "a", TypeError, "add takes tensors; got str"),
    "add, array": (lambda: flow.ones(2) + np.ones(2), TypeError, r"add takes tensors; got ndarray, which flow.tensor\(\) converts"),
    "add, float to integers": (lambda: flow.tensor([1, 2]) + 1.5, TypeError, r"int64 tensor meets the float 1.5; convert the tensor with .to\(\)"),
    "add, number to truths": (lambda: flow.tensor([True]) + 1, TypeError, r"add takes numbers; got truth values \(flow.bool_\); convert with .to\(\)"),
    "subtract, truths": (lambda: flow.tensor([True]) - flow.tensor([True]), TypeError, "subtract takes numbers; got truth values"),
    "negative, truths": (lambda: -flow.tensor([True]), TypeError, "negative takes numbers; got truth values"),
    "relu, truths": (lambda: flow.relu(flow.tensor([True])), TypeError, "relu takes numbers; got truth values"),
    "multiply, complex": (lambda: flow.ones(2) * np.complex64(1j), TypeError, "multiply takes tensors; got complex64"),
    "equal, NumPy's truth": (lambda: flow.tensor([True]) == np.True_, TypeError, "equal takes tensors; got bool"),
    "divide, integers": (lambda: flow.tensor([1, 2]) / 2, TypeError, r"divide takes floating-point operands; got flow.int64; convert"),
    "divide, by integers": (lambda: 2 / flow.tensor([1, 2]), TypeError, "divide takes floating-point operands; got flow.int64"),
    "exp, integers": (lambda: flow.exp(flow.tensor([1, 2])), TypeError, "exp takes operands of one floating-point type; got flow.int64"),
    "sum, dimension": (lambda: flow.ones(2).sum(1), IndexError, "dimension 1 of a tensor with 1 dimensions"),
    "sum, twice": (lambda: flow.ones(2, 2).sum((0, -2)), ValueError, r"dimensions \(0, -2\) name one twice"),
    "argmax, empty": (lambda: flow.ones(2, 0).argmax(1), ValueError, r"argmax over dimension 1 of shape \[2, 0\], which is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_promotion() -> None:
    for a, b, expected in (
        (flow.float32, flow.float64, flow.float64),
        (flow.int64, flow.float32, flow.float32),
        (flow.int32, flow.int64, flow.int64),
        (flow.bool_, flow.int32, flow.int32),
        (flow.uint8, flow.float64, flow.float64),
    ):
        for left, right in ((a, b), (b, a)):
            result = flow.ones(2, dtype=left) + flow.ones(2, dtype=right)
            assert result.dtype is expected
            assert result.tolist() == [2, 2] or expected is flow.bool_


def test_numpys_numbers_leave_the_type_as_it_is() -> None:
    for number in (np.int64(3), np.int32(3), np.uint8(3)):
        for result in (flow.tensor([1], dtype=flow.uint8) + number, flow.tensor([1], dtype=flow.uint8).add_(number)):
            assert (result.dtype, result.tolist()) == (flow.uint8, [4])
    assert (flow.ones(1) * np.float64(0.1)).tolist() == [np.float32(0.1)]


def test_numpys_integers_are_integers() -> None:
    assert F.max_pool2d(IMAGES, np.int64(2)).shape == (2, 4, 3, 3)
    assert F.max_pool2d(IMAGES, (np.int64(2), 3)).shape == (2, 4, 3, 2)
    assert IMAGES.sum(np.int64(1)).shape == (2, 6, 6)


def test_sums_and_products_of_truths() -> None:
    a, b = flow.tensor([True, True, False]), flow.tensor([True, False, False])
    assert (a + b).tolist() == [True, True, False]
    assert (a * b).tolist() == [True, False, False]
    assert (a * True).tolist() == a.tolist()
    assert (a == 1).tolist() == a.tolist()


def test_integers_divided_by_floats() -> None:
    assert (flow.tensor([1, 2]) / flow.tensor([2.0, 4.0])).tolist() == [0.5, 0.5]
    assert (1 / flow.tensor([2.0, 4.0])).tolist() == [0.5, 0.25]


def test_reductions_of_nothing() -> None:
    none = flow.zeros(0, 3, requires_grad=True)
    for reduced in (none.sum(1), none.mean(1), none.mean((0, 1))):
        reduced.sum().backward()
    assert none.mean(1).shape == (0,)
    assert none.sum(0).tolist() == [0, 0, 0]
    assert np.isnan(none.mean(0).detach().numpy()).all()
    assert none.grad.shape == (0, 3)


def test_reductions_of_integers() -> None:
    assert flow.tensor([1, 2]).sum().dtype is flow.int64
    assert flow.tensor([True, True]).sum().item() == 2
    assert flow.tensor([1, 2]).mean().item() == 1.5
    assert flow.tensor([[1, 5], [7, 2]]).argmax(1).tolist() == [1, 0]
    assert (flow.tensor([1.0, 2.0]) == flow.tensor([1.0, 3.0])).tolist() == [True, False]


def test_normalisation_cuts_nothing_off_unless_asked() -> None:
    images = flow.tensor([[[[-1.0, 1.0]]]])
    assert F.batch_norm(images, None, None, training=True, eps=0.0).tolist() == [[[[-1, 1]]]]
    assert F.batch_norm(images, None, None, training=True, eps=0.0, relu=True).tolist() == [[[[0, 1]]]]
