"""The reference kernels against their definitions, written out as loops and formulas over single elements."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from framework.device import cpu
from framework.dtype import DType, bool_, float32, float64, int64, uint8
from framework.kernels.reference import (
    convolution,
    elementwise,
    linear,
    loss,
    normalization,
    optimizer,
    pooling,
    reduction,
)
from framework.vm import Array, runtime
from tests.framework.kernels.cases import draw


def on_device(values: Any) -> Array:
    values = np.asarray(values)
    return runtime(cpu).from_host(values, {"f": float64, "i": int64, "b": bool_, "u": uint8}[values.dtype.kind])


def empty(*shape: int, dtype: DType = float64) -> Array:
    return runtime(cpu).full(shape, 77, dtype)


GEOMETRIES = [
    ((2, 3, 5, 4), (4, 3, 3, 2), (1, 1), (1, 0), (1, 1), 1),
    ((1, 4, 7, 6), (6, 2, 3, 3), (2, 1), (1, 2), (1, 2), 2),
    ((2, 3, 6, 7), (3, 1, 2, 3), (3, 2), (0, 1), (2, 1), 3),
    ((2, 2, 1, 1), (3, 2, 3, 3), (1, 1), (1, 1), (1, 1), 1),
]


@pytest.mark.parametrize(("x_shape", "w_shape", "stride", "padding", "dilation", "groups"), GEOMETRIES)
def test_convolution_and_its_gradients(x_shape, w_shape, stride, padding, dilation, groups) -> None:
    x, weight, bias = draw(*x_shape), draw(*w_shape, seed=1), draw(w_shape[0], seed=2)
    size = [(x_shape[2 + i] + 2 * padding[i] - dilation[i] * (w_shape[2 + i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    grad = draw(x_shape[0], w_shape[0], *size, seed=3)
    y = np.broadcast_to(bias.reshape(1, -1, 1, 1), grad.shape).copy()
    grad_x, grad_weight = np.zeros(x_shape), np.zeros(w_shape)
    per_group = w_shape[0] // groups
    for n, o, i, j in product(*map(range, grad.shape)):
        for c, p, q in product(*map(range, w_shape[1:])):
            channel = (o // per_group) * w_shape[1] + c
            row = i * stride[0] + p * dilation[0] - padding[0]
            column = j * stride[1] + q * dilation[1] - padding[1]
            if 0 <= row < x_shape[2] and 0 <= column < x_shape[3]:
                y[n, o, i, j] += weight[o, c, p, q] * x[n, channel, row, column]
                grad_x[n, channel, row, column] += weight[o, c, p, q] * grad[n, o, i, j]
                grad_weight[o, c, p, q] += x[n, channel, row, column] * grad[n, o, i, j]
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    out, out_x, out_w, out_b = empty(*y.shape), empty(*x_shape), empty(*w_shape), empty(*bias.shape)
    convolution.conv2d(out, on_device(x), on_device(weight), on_device(bias), **geometry)
    convolution.conv2d_backward_input(out_x, on_device(grad), on_device(weight), **geometry)
    convolution.conv2d_backward_weight(out_w, out_b, on_device(grad), on_device(x), **geometry)
    np.testing.assert_allclose(out.ndarray, y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out_x.ndarray, grad_x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out_w.ndarray, grad_weight, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(out_b.ndarray, grad.sum((0, 2, 3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), (2, 2), (1, 1)), ((2, 3), (1, 2), (1, 0)), ((2, 2), (3, 3), (0, 0))]
)
def test_max_pooling_and_its_gradient(kernel, stride, padding) -> None:
    x = np.round(draw(2, 3, 7, 8) * 2)  # rounded, so that windows hold equals: the first is the one that counts
    x[0, 0, 3, 3] = np.nan
    x[1, 1] = -np.inf  # no larger than the padding, which is never the one that counts
    size = [(x.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]
    grad = draw(2, 3, *size, seed=1)
    grad[0, 1, 0, 0] = np.inf
    y, grad_x = np.zeros(grad.shape), np.zeros(x.shape)
    for n, c, i, j in product(*map(range, grad.shape)):
        best, where = -np.inf, None
        for p, q in product(*map(range, kernel)):
            row, column = i * stride[0] + p - padding[0], j * stride[1] + q - padding[1]
            if not (0 <= row < x.shape[2] and 0 <= column < x.shape[3]) or np.isnan(best):
                continue
            if where is None or x[n, c, row, column] > best or np.isnan(x[n, c, row, column]):
                best, where = x[n, c, row, column], (n, c, row, column)
        y[n, c, i, j] = best
        grad_x[where] += grad[n, c, i, j]
    geometry = {"kernel": kernel, "stride": stride, "padding": padding}
    out, out_x = empty(*y.shape), empty(*x.shape)
    dtype, shape = pooling.max_pool2d_indices(y.shape, kernel)
    indices = empty(*shape, dtype=dtype)
    pooling.max_pool2d(out, indices, on_device(x), **geometry)
    pooling.max_pool2d_backward(out_x, on_device(grad), indices, **geometry)
    np.testing.assert_array_equal(out.ndarray, y)
    np.testing.assert_allclose(out_x.ndarray, grad_x, rtol=1e-13, atol=1e-13)


def test_a_pooling_window_too_large_for_its_index_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 256 elements, not 16×17"):
        pooling.max_pool2d_indices((1, 1, 1, 1), (16, 17))


def test_global_average() -> None:
    x, grad = draw(2, 3, 4, 5), draw(2, 3, 1, 1, seed=1)
    out, out_x = empty(2, 3, 1, 1), empty(2, 3, 4, 5)
    pooling.global_avg_pool2d(out, on_device(x))
    pooling.global_avg_pool2d_backward(out_x, on_device(grad))
    for n, c in product(range(2), range(3)):
        assert out.ndarray[n, c, 0, 0] == pytest.approx(sum(x[n, c].flat) / 20, rel=1e-13)
        assert np.all(out_x.ndarray[n, c] == grad[n, c, 0, 0] / 20)


def test_batch_normalisation_of_one_channel_by_hand() -> None:
    # Values 1, 2, 3, 6 in one channel: mean 3, biased variance 3.5, unbiased 14/3.
    x = on_device(np.array([1.0, 2.0, 3.0, 6.0]).reshape(2, 1, 1, 2))
    residual = on_device(np.array([0.0, 5.0, -9.0, 0.0]).reshape(2, 1, 1, 2))
    weight, bias = on_device(np.array([2.0])), on_device(np.array([0.5]))
    y, mean, inv_std, mask = empty(2, 1, 1, 2), empty(1), empty(1), empty(1, dtype=uint8)
    running_mean, running_var = on_device(np.array([10.0])), on_device(np.array([20.0]))
    normalization.batch_norm_train(
        y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual, eps=0.5, momentum=0.25, relu=True
    )
    assert mean.ndarray[0] == 3
    assert inv_std.ndarray[0] == 0.5  # 1/√(3.5 + 0.5)
    # 2·(x - 3)/2 + 0.5 + residual: -1.5, 4.5, -8.5, 3.5
    assert y.ndarray.ravel().tolist() == [0, 4.5, 0, 3.5]
    assert running_mean.ndarray[0] == pytest.approx(0.75 * 10 + 0.25 * 3, rel=1e-15)
    assert running_var.ndarray[0] == pytest.approx(0.75 * 20 + 0.25 * 14 / 3, rel=1e-15)
    evaluated = empty(2, 1, 1, 2)
    normalization.batch_norm_eval(
        evaluated,
        None,
        x,
        weight,
        bias,
        on_device(np.array([1.0])),
        on_device(np.array([3.5])),
        None,
        eps=0.5,
        relu=False,
    )
    assert evaluated.ndarray.ravel().tolist() == [0.5, 1.5, 2.5, 5.5]
    passed = empty(2, 1, 1, 2)
    grad = on_device(np.array([np.inf, np.inf, np.nan, 2.0]).reshape(2, 1, 1, 2))
    with np.errstate(invalid="ignore"):
        normalization.batch_norm_backward(None, None, None, passed, grad, x, weight, mean, inv_std, mask, relu=True)
    assert passed.ndarray.ravel().tolist() == [0, np.inf, 0, 2]


def test_cross_entropy_by_hand() -> None:
    # softmax(0, ln 3) = (1/4, 3/4); softmax(ln 2, 0) = (2/3, 1/3)
    logits = on_device(np.array([[0.0, np.log(3)], [np.log(2), 0.0]]))
    target = on_device(np.array([1, 1]))
    value, probabilities, grad = empty(), empty(2, 2), empty(2, 2)
    loss.cross_entropy(value, probabilities, logits, target)
    loss.cross_entropy_backward(grad, on_device(np.array(4.0)), probabilities, target)
    np.testing.assert_allclose(probabilities.ndarray, [[1 / 4, 3 / 4], [2 / 3, 1 / 3]], rtol=1e-15)
    assert value.ndarray[()] == pytest.approx((np.log(4 / 3) + np.log(3)) / 2, rel=1e-15)
    np.testing.assert_allclose(grad.ndarray, [[0.5, -0.5], [4 / 3, -4 / 3]], rtol=1e-14)


@pytest.mark.parametrize("labels", [[0, 2], [-1, 0]])
def test_cross_entropy_refuses_a_class_that_is_none(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=r"targets must lie in \[0, 2\).*got -?\d to \d"):
        loss.cross_entropy(empty(), empty(2, 2), on_device(draw(2, 2)), on_device(np.array(labels)))


def test_sgd_by_hand() -> None:
    settings = {"lr": 0.5, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125, "nesterov": False}
    parameter, buffer, grad = on_device([8.0]), on_device([99.0]), on_device([3.0])
    optimizer.sgd_step(parameter, buffer, grad, **settings, first=True)
    assert (buffer.ndarray[0], parameter.ndarray[0]) == (4, 6)  # 3 + 8/8, undamped; 8 - 4/2
    optimizer.sgd_step(parameter, buffer, grad, **settings, first=False)
    assert (buffer.ndarray[0], parameter.ndarray[0]) == (4.8125, 3.59375)  # 4/2 + 0.75·3.75; 6 - 4.8125/2
    optimizer.sgd_step(parameter, buffer, grad, **{**settings, "dampening": 0.0, "nesterov": True}, first=False)
    g = 3 + 3.59375 / 8
    assert buffer.ndarray[0] == 4.8125 / 2 + g
    assert parameter.ndarray[0] == 3.59375 - (g + (4.8125 / 2 + g) / 2) / 2


def test_elementwise_at_its_edges() -> None:
    x = on_device([0.0, -0.0, -1.0, np.nan, np.inf, -np.inf])
    y = empty(6)
    elementwise.relu(y, x)
    np.testing.assert_array_equal(y.ndarray, [0, 0, 0, np.nan, np.inf, 0])
    grad = empty(6)
    elementwise.relu_backward(
        grad, on_device([1.0, 1.0, np.inf, np.inf, 1.0, np.nan]), on_device([0.0, 1.0, 0.5, 0.0, np.inf, 0.0])
    )
    assert grad.ndarray.tolist() == [0, 1, np.inf, 0, 1, 0]
    passed = empty(2)
    elementwise.relu_backward(passed, on_device([3.0, np.nan]), on_device([np.nan, np.nan]))
    np.testing.assert_array_equal(passed.ndarray, [3, np.nan])
    divided = empty(3)
    elementwise.divide(divided, on_device([1.0, -1.0, 0.0]), on_device([0.0] * 3))
    np.testing.assert_array_equal(divided.ndarray, [np.inf, -np.inf, np.nan])


def test_float32_sums_are_added_up_in_float64() -> None:
    # In float32 every second 1 would be lost beside 2²⁴.
    values = runtime(cpu).from_host(np.array([2.0**24] + [1.0] * 99), float32)
    total = empty(dtype=float32)
    reduction.sum(total, values, axes=(0,), keepdims=False)
    assert total.ndarray[()] == np.float32(2.0**24 + 99)
    average = empty(dtype=float32)
    reduction.mean(average, values, axes=(0,), keepdims=False)
    assert average.ndarray[()] == np.float32((2.0**24 + 99) / 100)


def test_products_are_those_of_rows_and_columns() -> None:
    a, b = draw(2, 1, 3, 4), draw(5, 4, 2, seed=1)
    c = empty(2, 5, 3, 2)
    linear.matmul(c, on_device(a), on_device(b))
    for i, j, m, n in product(range(2), range(5), range(3), range(2)):
        assert c.ndarray[i, j, m, n] == pytest.approx(sum(a[i, 0, m, k] * b[j, k, n] for k in range(4)), rel=1e-12)
    x, weight, bias, grad = draw(3, 4), draw(2, 4, seed=1), draw(2, seed=2), draw(3, 2, seed=3)
    y, grad_x, grad_weight, grad_bias = empty(3, 2), empty(3, 4), empty(2, 4), empty(2)
    linear.linear(y, on_device(x), on_device(weight), on_device(bias))
    linear.linear_backward(grad_x, grad_weight, grad_bias, on_device(grad), on_device(x), on_device(weight))
    np.testing.assert_allclose(y.ndarray, np.einsum("ni,oi->no", x, weight) + bias, rtol=1e-12)
    np.testing.assert_allclose(grad_x.ndarray, np.einsum("no,oi->ni", grad, weight), rtol=1e-12)
    np.testing.assert_allclose(grad_weight.ndarray, np.einsum("no,ni->oi", grad, x), rtol=1e-12)
    np.testing.assert_allclose(grad_bias.ndarray, grad.sum(0), rtol=1e-12)
