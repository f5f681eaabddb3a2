"""Batch normalisation by oneDNN: first the statistics, then one pass with the residual addition and the ReLU.

The mask of a ReLU without a residual is oneDNN's own: one bit an element. Its kernel does not add a residual on a CPU; behind
one, the result itself tells where the ReLU was open, and the next layer keeps it anyway.
"""

from __future__ import annotations

import numpy as np

from framework.device import cpu
from framework.dtype import float32
from framework.kernels.onednn import batch_norm, channelwise, descriptors, elementwise
from framework.kernels.reference import normalization as reference
from framework.kernels.reference import normalization_sum
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array


def batch_norm_mask_bytes(x: Array, *, has_residual: bool) -> int | None:
    """Bytes of the ReLU mask that batch_norm_train writes for backward; None where backward takes y in its place."""
    if not _serves(x):
        return reference.batch_norm_mask_bytes(x, has_residual=has_residual)
    return None if has_residual else x.size // 8


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
    """As the reference kernel of the same name."""
    if not _serves(x):
        reference.batch_norm_train(
            y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual,
            eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
        return
    batch_mean, variance = channelwise.mean_and_variance(x)
    # Until the end, inv_std holds the variance, which is what oneDNN works with.
    mean.ndarray[...], inv_std.ndarray[...] = batch_mean, variance
    if mask is not None:
        _normalise_with_mask(y, mean, inv_std, mask, x, weight, bias, eps)
    else:
        _scale(y, x, batch_mean, variance, weight, bias, residual, eps, relu=relu)
    if relu:
        _restore_nan(y, mask, batch_mean, variance, weight, bias, residual)
    inv_std.ndarray[...] = 1 / np.sqrt(variance + eps)
    count = x.size // x.shape[1]
    _move(running_mean, batch_mean, momentum)
    _move(running_var, variance * (count / max(count - 1, 1)), momentum)


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
    """As the reference kernel of the same name."""
    if not _serves(x):
        reference.batch_norm_eval(y, mask, x, weight, bias, running_mean, running_var, residual, eps=eps, relu=relu)
        return
    if mask is None:
        _scale(y, x, running_mean.ndarray, running_var.ndarray, weight, bias, residual, eps, relu=relu)
    else:
        _normalise_with_mask(y, running_mean, running_var, mask, x, weight, bias, eps)
    if relu:
        _restore_nan(y, mask, running_mean.ndarray, running_var.ndarray, weight, bias, x, residual)


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
    """As the reference kernel of the same name."""
    if not _serves(x):
        reference.batch_norm_backward(
            grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, mean, inv_std, mask, second_grad_y,
            relu=relu,
        )  # fmt: skip
        return
    if second_grad_y is not None:
        total = _like(x) if grad_residual is None else grad_residual
        elementwise.add(total, grad_y, second_grad_y)
        grad_y = total
    # oneDNN takes 1/√(variance + eps) itself: with eps = 0 it finds what the caller gave.
    variance = _vector(mean)
    variance.ndarray[...] = inv_std.ndarray.astype(np.float64) ** -2
    _differentiate(
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, mean, variance, mask,
        0.0, relu, given=False,
    )  # fmt: skip


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
    """As the reference kernel of the same name."""
    if _serves(x):
        _differentiate(
            grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, running_mean, running_var, mask,
            eps, relu, given=True,
        )  # fmt: skip
    else:
        reference.batch_norm_eval_backward(
            grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, running_mean, running_var, mask,
            eps=eps, relu=relu,
        )  # fmt: skip


# oneDNN has no pass over both.
batch_norm_sum_train = normalization_sum.train_by(batch_norm_train)
batch_norm_sum_backward = normalization_sum.backward_by(batch_norm_backward)


def _normalise_with_mask(
    y: Array,
    mean: Array,
    variance: Array,
    mask: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    eps: float,
) -> None:
    """Writes y, behind a ReLU, and in the same pass mask."""
    flags = (
        batch_norm.USE_GIVEN_STATISTICS
        | batch_norm.USE_SCALE * (weight is not None)
        | batch_norm.USE_SHIFT * (bias is not None)
        | batch_norm.FUSE_RELU
    )
    result = y if y.is_channels_last else _like(x)
    vectors = [_read(vector) for vector in (mean, variance, weight, bias) if vector is not None]
    operands = [x, result, *vectors, mask]
    batch_norm.forward(x.shape, flags, eps)(*[operand.ptr for operand in operands])
    if result is not y:
        elementwise.copy(y, result)


def _scale(
    y: Array,
    x: Array,
    mean: np.ndarray,
    variance: np.ndarray,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    eps: float,
    *,
    relu: bool,
) -> None:
    """Writes y, from statistics that are known; the arithmetic per channel is float64."""
    factor = 1 / np.sqrt(variance.astype(np.float64) + eps)
    if weight is not None:
        factor = factor * weight.ndarray
    shift = -mean * factor
    if bias is not None:
        shift = shift + bias.ndarray
    result = y if y.is_channels_last else _like(x)
    beside = None if residual is None else _channels_last(residual)
    channelwise.scale(result, x, factor.astype(np.float32), shift.astype(np.float32), beside, relu=relu)
    if result is not y:
        elementwise.copy(y, result)


def _restore_nan(
    y: Array,
    mask: Array | None,
    mean: np.ndarray,
    variance: np.ndarray,
    weight: Array | None,
    bias: Array | None,
    *images: Array | None,
) -> None:
    """Puts back the NaN that oneDNN's ReLU turned into 0: of channels whose figures are none, and of the images.

    In training an image with a NaN or an infinity makes its channel's mean one. The mask lets their gradients through.
    """
    lost = ~np.isfinite(mean + variance)
    for vector in (weight, bias):
        if vector is not None:
            lost |= np.isnan(vector.ndarray)
    is_any_lost = bool(lost.any())
    if is_any_lost:
        y.ndarray[:, lost] = np.nan
    for image in images:
        if image is not None and channelwise.holds_nan(_channels_last(image)):
            is_any_lost = True
            y.ndarray[np.isnan(image.ndarray)] = np.nan
    if is_any_lost and mask is not None:
        # A bit for each element as they lie in memory.
        mask.ndarray[...] |= np.packbits(np.isnan(y.ndarray.transpose(0, 2, 3, 1)), bitorder="little")


def _move(running: Array | None, batch: np.ndarray, momentum: float) -> None:
    if running is not None:
        running.ndarray[...] += momentum * (batch - running.ndarray)


def _differentiate(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_residual: Array | None,
    grad_y: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    variance: Array,
    mask: Array | None,
    eps: float,
    relu: bool,
    given: bool,
) -> None:
    gradient = _channels_last(grad_y)
    by_result = relu and mask is not None and mask.shape == x.shape
    if by_result:
        kept = grad_residual if grad_residual is not None and grad_residual.is_channels_last else _like(x)
        elementwise.relu_backward(kept, gradient, _channels_last(mask))
        gradient = kept
    if grad_residual is not None and grad_residual is not gradient:
        elementwise.copy(grad_residual, gradient)
    fuse_relu = relu and not by_result
    flags = (
        batch_norm.USE_GIVEN_STATISTICS * given
        | batch_norm.USE_SCALE
        | batch_norm.USE_SHIFT
        | batch_norm.FUSE_RELU * fuse_relu
    )
    result = grad_x if grad_x is not None and grad_x.is_channels_last else _like(x)
    scale = _ones(mean) if weight is None else _read(weight)
    diff_scale, diff_shift = (_target(grad, mean) for grad in (grad_weight, grad_bias))
    operands = [x, result, gradient, _read(mean), _read(variance), scale, diff_scale, diff_shift]
    if fuse_relu:
        operands.append(mask)
    batch_norm.backward(x.shape, flags, eps)(*[operand.ptr for operand in operands])
    _deliver(grad_weight, diff_scale)
    _deliver(grad_bias, diff_shift)
    if grad_x is not None and grad_x is not result:
        elementwise.copy(grad_x, result)


def _serves(x: Array) -> bool:
    """Whether these kernels take x. It depends on x alone, so that forward and backward always agree."""
    return x.shape[1] % 8 == 0 and x.is_channels_last and descriptors.servable(x)


def _like(x: Array) -> Array:
    return Array(scratch(cpu, x.nbytes).storage, x.shape, x.stride, float32)


def _channels_last(array: Array) -> Array:
    if array.is_channels_last and descriptors.servable(array):
        return array
    _, c, h, w = array.shape
    dense = Array(scratch(cpu, array.nbytes).storage, array.shape, (h * w * c, 1, w * c, c), float32)
    elementwise.copy(dense, array)
    return dense


def _vector(like: Array) -> Array:
    return Array(scratch(cpu, like.size * float32.itemsize).storage, like.shape, (1,), float32)


def _read(vector: Array) -> Array:
    """The vector where oneDNN can read it: itself, or a dense copy."""
    if vector.is_contiguous and vector.dtype is float32:
        return vector
    dense = _vector(vector)
    dense.ndarray[...] = vector.ndarray
    return dense


def _target(vector: Array | None, like: Array | None = None) -> Array:
    """Where oneDNN can write a vector: itself, or a dense place for `_deliver` to bring it from."""
    if vector is not None and vector.is_contiguous and vector.dtype is float32:
        return vector
    return _vector(vector or like)  # type: ignore[arg-type]


def _deliver(vector: Array | None, place: Array) -> None:
    if vector is not None and vector is not place:
        vector.ndarray[...] = place.ndarray


def _ones(like: Array) -> Array:
    ones = _vector(like)
    ones.ndarray.fill(1)
    return ones
