"""Batch normalisation over N, H and W, with a residual addition and a ReLU in the same pass.

Shapes: x, y, residual [N, C, H, W]; weight, bias, mean, inv_std, running_* [C].
Ioffe and Szegedy, "Batch Normalization", 2015.
"""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array

_AXES = (0, 2, 3)


def batch_norm_mask_bytes(x: Array, *, has_residual: bool) -> int:
    """Bytes of the ReLU mask that `batch_norm_train` writes for backward: here one bit an element."""
    return (x.size + 7) // 8


@kernel(outputs=6)
def batch_norm_train(
    y: Array,
    mean: Array,
    inv_std: Array,
    mask: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    *,
    eps: float,
    momentum: float,
    relu: bool,
) -> None:
    """y = act(weight · (x - mean) · inv_std + bias + residual), act being ReLU where `relu` is set.

    mean and the biased variance are the batch's; inv_std = 1/√(variance + eps). The running figures move by
    `momentum` towards the batch's mean and unbiased variance.
    """
    source = x.ndarray
    count = source.shape[0] * source.shape[2] * source.shape[3]
    batch_mean = np.mean(source, axis=_AXES, dtype=np.float64)
    centred = source - _channels(batch_mean)
    variance = np.mean(np.square(centred), axis=_AXES, dtype=np.float64)
    mean.ndarray[...] = batch_mean
    inv_std.ndarray[...] = 1 / np.sqrt(variance + eps)
    if running_mean is not None:
        _move(running_mean.ndarray, batch_mean, momentum)
    if running_var is not None:
        _move(running_var.ndarray, variance * (count / max(count - 1, 1)), momentum)
    scale = inv_std.ndarray if weight is None else inv_std.ndarray * weight.ndarray
    _finish(y, centred * _channels(scale), bias, residual, relu, mask)


@kernel(outputs=1)
def batch_norm_again(
    y: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    mask: Array | None,
) -> None:
    """The y that batch_norm_train wrote with a ReLU and without a residual, from what else it wrote.

    A table whose mask tells enough need not look at the rest.
    """
    scale = inv_std.ndarray if weight is None else inv_std.ndarray * weight.ndarray
    centred = x.ndarray - _channels(mean.ndarray)
    _finish(y, centred * _channels(scale), bias, None, True, None)


@kernel(outputs=2)
def batch_norm_eval(
    y: Array,
    mask: Array | None,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array,
    running_var: Array,
    residual: Array | None,
    *,
    eps: float,
    relu: bool,
) -> None:
    """y = act(weight · (x - running_mean) / √(running_var + eps) + bias + residual)."""
    scale = _eval_scale(running_var, weight, eps)
    centred = x.ndarray - _channels(running_mean.ndarray)
    _finish(y, centred * _channels(scale), bias, residual, relu, mask)


@kernel(outputs=4)
def batch_norm_backward(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_residual: Array | None,
    grad_y: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    inv_std: Array,
    mask: Array | None,
    second_grad_y: Array | None = None,
    *,
    relu: bool,
) -> None:
    """Gradients of batch_norm_train. Where y was used twice, grad_y may come in two parts, to be added up.

    grad_x and grad_residual may each be written over one of the two parts.

    With g = grad_y where the ReLU was open, else 0, and x̂ = (x - mean) · inv_std:
    grad_residual = g, grad_bias = Σ g, grad_weight = Σ g·x̂,
    grad_x = weight · inv_std · (g - mean(g) - x̂ · mean(g·x̂)).
    """
    total = grad_y.ndarray if second_grad_y is None else grad_y.ndarray + second_grad_y.ndarray
    gradient = _masked(total, mask, relu)
    normalised = (x.ndarray - _channels(mean.ndarray)) * _channels(inv_std.ndarray)
    sum_g = np.sum(gradient, axis=_AXES, dtype=np.float64)
    sum_gx = np.sum(gradient * normalised, axis=_AXES, dtype=np.float64)
    _store(grad_weight, sum_gx)
    _store(grad_bias, sum_g)
    _store(grad_residual, gradient)
    if grad_x is not None:
        count = max(gradient.shape[0] * gradient.shape[2] * gradient.shape[3], 1)
        scale = inv_std.ndarray if weight is None else inv_std.ndarray * weight.ndarray
        inner = gradient - _channels(sum_g / count) - normalised * _channels(sum_gx / count)
        grad_x.ndarray[...] = inner * _channels(scale)


@kernel(outputs=4)
def batch_norm_eval_backward(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_residual: Array | None,
    grad_y: Array,
    x: Array,
    weight: Array | None,
    running_mean: Array,
    running_var: Array,
    mask: Array | None,
    *,
    eps: float,
    relu: bool,
) -> None:
    """Gradients of batch_norm_eval, whose mean and variance are constants."""
    gradient = _masked(grad_y.ndarray, mask, relu)
    inverse = 1 / np.sqrt(running_var.ndarray + eps)
    normalised = (x.ndarray - _channels(running_mean.ndarray)) * _channels(inverse)
    _store(grad_weight, np.sum(gradient * normalised, axis=_AXES, dtype=np.float64))
    _store(grad_bias, np.sum(gradient, axis=_AXES, dtype=np.float64))
    _store(grad_residual, gradient)
    if grad_x is not None:
        grad_x.ndarray[...] = gradient * _channels(_eval_scale(running_var, weight, eps))


def _channels(a: np.ndarray) -> np.ndarray:
    return a.reshape(1, -1, 1, 1)


def _move(running: np.ndarray, batch: np.ndarray, momentum: float) -> None:
    running *= 1 - momentum
    running += momentum * batch


def _eval_scale(running_var: Array, weight: Array | None, eps: float) -> np.ndarray:
    inverse = 1 / np.sqrt(running_var.ndarray + eps)
    return inverse if weight is None else inverse * weight.ndarray


def _finish(
    y: Array, total: np.ndarray, bias: Array | None, residual: Array | None, relu: bool, mask: Array | None
) -> None:
    if bias is not None:
        total = total + _channels(bias.ndarray)
    if residual is not None:
        total = total + residual.ndarray
    if relu:
        total = np.maximum(total, 0)
    y.ndarray[...] = total
    if mask is not None:
        mask.ndarray[...] = np.packbits(~(total <= 0))


def _masked(gradient: np.ndarray, mask: Array | None, relu: bool) -> np.ndarray:
    if mask is None or not relu:
        return gradient
    is_open = np.unpackbits(mask.ndarray, count=gradient.size).reshape(gradient.shape)
    return np.where(is_open, gradient, 0)


def _store(target: Array | None, result: np.ndarray) -> None:
    if target is not None:
        target.ndarray[...] = result
