"""Batch normalisation in CUDA C++, with the residual addition and the ReLU in the same passes.

Images lie NHWC; other layouts are copied there and back. The mask holds one bit an element in the order of memory
where something was added before the ReLU, and else each channel's mean, scale and bias, from which the ReLU's input
is had again in backward. Which of the two it is shows in its size.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from framework.kernels.cuda import elementwise, launch, normalization_plans
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, Layout, channels_last_stride

# What is smaller than this, or than so much for each image, is kept: the launch would cost more than the memory is worth.
_REMADE_BYTES = 8 * 1024 * 1024
_REMADE_IMAGE_BYTES = 512 * 1024


def batch_norm_mask_bytes(x: Array, *, has_residual: bool) -> int:
    """Bytes of the mask that a forward kernel writes for backward; never the same with and without a residual."""
    bits = (x.size + 7) // 8
    if has_residual:
        return bits
    coefficients = 3 * x.shape[1] * normalization_plans.value_bytes(x.dtype)
    return coefficients if coefficients != bits else coefficients + 1


def batch_norm_remakes(x: Array) -> bool:
    """Whether a result is large, for the device and for the two passes over it that making it again costs."""
    nbytes = x.nbytes
    return nbytes >= _REMADE_BYTES and nbytes >= x.shape[0] * _REMADE_IMAGE_BYTES


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
    device = x.storage.device
    y_at, x_at = y.ptr, x.ptr
    residual_at, residual_layout = (0, None) if residual is None else (residual.ptr, residual.layout)
    mean_at, mean_layout = (0, None) if running_mean is None else (running_mean.ptr, running_mean.layout)
    var_at, var_layout = (0, None) if running_var is None else (running_var.ptr, running_var.layout)
    weight_at, weight_layout = (0, None) if weight is None else (weight.ptr, weight.layout)
    bias_at, bias_layout = (0, None) if bias is None else (bias.ptr, bias.layout)
    run = normalization_plans.train(
        device, relu, mask is not None, not (y_at | x_at | residual_at) & 15, y.layout, x.layout, residual_layout,
        mean.layout, inv_std.layout, mean_layout, var_layout, weight_layout, bias_layout,
    )  # fmt: skip
    if run is None:
        dense = _Dense()
        batch_norm_train(
            dense.written(y), dense.written(mean), dense.written(inv_std), mask, dense.updated(running_mean),
            dense.updated(running_var), dense.read(x), dense.read(weight), dense.read(bias), dense.read(residual),
            eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
        dense.give_back()
        return
    run(
        launch.stream(device), y_at, 0 if mask is None else mask.ptr, mean_at, var_at, mean.ptr, inv_std.ptr, x_at,
        residual_at, weight_at, bias_at, eps, momentum,
    )  # fmt: skip


@kernel(outputs=1)
def batch_norm_again(
    y: Array,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    mean: Array,
    inv_std: Array,
    mask: Array,
) -> None:
    """As the reference kernel of the same name; the mask holds what is needed."""
    device, y_at, x_at = x.storage.device, y.ptr, x.ptr
    run = normalization_plans.again(
        device, not (y_at | x_at) & 15, y.layout, x.layout, mean.layout, inv_std.layout, _layout(weight), _layout(bias)
    )
    if run is None:
        dense = _Dense()
        batch_norm_again(
            dense.written(y), dense.read(x), dense.read(weight), dense.read(bias), dense.read(mean),
            dense.read(inv_std), mask,
        )  # fmt: skip
        dense.give_back()
        return
    run(launch.stream(device), y_at, 0, x_at, 0, mask.ptr)


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
    device, address = x.storage.device, launch.address
    y_at, x_at, residual_at = y.ptr, x.ptr, address(residual)
    run = normalization_plans.evaluate(
        device, relu, mask is not None, not (y_at | x_at | residual_at) & 15, y.layout, x.layout, _layout(residual),
        running_mean.layout, running_var.layout, _layout(weight), _layout(bias),
    )  # fmt: skip
    if run is None:
        dense = _Dense()
        batch_norm_eval(
            dense.written(y), mask, dense.read(x), dense.read(weight), dense.read(bias), dense.read(running_mean),
            dense.read(running_var), dense.read(residual), eps=eps, relu=relu,
        )  # fmt: skip
        dense.give_back()
        return
    run(
        launch.stream(device), y_at, address(mask), x_at, residual_at, address(weight), address(bias),
        running_mean.ptr, running_var.ptr, eps,
    )  # fmt: skip


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
    _differentiate(
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, mean, inv_std, mask if relu else None, None,
        second_grad_y,
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
    _differentiate(
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, running_mean, running_var,
        mask if relu else None, eps,
    )  # fmt: skip


def _differentiate(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_residual: Array | None,
    grad_y: Array,
    x: Array,
    weight: Array | None,
    mean: Array,
    spread: Array,
    mask: Array | None,
    eps: float | None,
    second_grad_y: Array | None = None,
) -> None:
    """`spread` is 1/√(variance + eps), or the variance where `eps` is given, outside training."""
    kind = "open" if mask is None else "bits" if _is_bits(mask.layout, x.layout) else "recomputed"
    if second_grad_y is not None and (kind != "bits" or grad_residual is None):
        # The kernels take two parts only where the block that they end is used twice, as residual networks do.
        total = _like(x)
        elementwise.add(total, grad_y, second_grad_y)
        grad_y, second_grad_y = total, None
    if grad_residual is not None and mask is None:
        elementwise.copy(grad_residual, grad_y)
        grad_residual = None
    device = x.storage.device
    x_at, grad_y_at = x.ptr, grad_y.ptr
    grad_x_at, grad_x_layout = (0, None) if grad_x is None else (grad_x.ptr, grad_x.layout)
    masked_at, masked_layout = (0, None) if grad_residual is None else (grad_residual.ptr, grad_residual.layout)
    second_at, second_layout = (0, None) if second_grad_y is None else (second_grad_y.ptr, second_grad_y.layout)
    weight_at, weight_layout = (0, None) if weight is None else (weight.ptr, weight.layout)
    grad_weight_at, grad_weight_layout = (0, None) if grad_weight is None else (grad_weight.ptr, grad_weight.layout)
    grad_bias_at, grad_bias_layout = (0, None) if grad_bias is None else (grad_bias.ptr, grad_bias.layout)
    run = normalization_plans.backward(
        device, kind, eps is not None, not (x_at | grad_y_at | grad_x_at | masked_at | second_at) & 15,
        grad_x_layout, masked_layout, grad_y.layout, second_layout, x.layout,
        mean.layout, spread.layout, weight_layout, grad_weight_layout, grad_bias_layout,
    )  # fmt: skip
    if run is None:
        dense = _Dense()
        _differentiate(
            dense.written(grad_x), dense.written(grad_weight), dense.written(grad_bias), dense.written(grad_residual),
            dense.read(grad_y), dense.read(x), dense.read(weight), dense.read(mean), dense.read(spread), mask, eps,
            dense.read(second_grad_y),
        )  # fmt: skip
        dense.give_back()
        return
    run(
        launch.stream(device), grad_x_at, masked_at, grad_weight_at, grad_bias_at, grad_y_at, second_at, x_at,
        weight_at, mean.ptr, spread.ptr, 0 if mask is None else mask.ptr, -1.0 if eps is None else eps,
    )  # fmt: skip


# ---- operands


@lru_cache(maxsize=4096)
def _is_bits(mask: Layout, x: Layout) -> bool:
    """Whether a mask has a bit for each element of x; one with figures per channel never has the same size."""
    return mask.nbytes == (prod(x.shape) + 7) // 8


def _layout(array: Array | None) -> Layout | None:
    return None if array is None else array.layout


def _like(x: Array) -> Array:
    return Array(scratch(x.storage.device, x.nbytes).storage, x.shape, channels_last_stride(x.shape), x.dtype)


class _Dense:
    """Dense stand-ins for operands, and the way back for those that are written."""

    def __init__(self) -> None:
        self._back: list[tuple[Array, Array]] = []

    def read(self, array: Array | None) -> Any:
        """A copy; the array itself where it is dense."""
        stand_in = self._stand_in(array)
        if stand_in is not array:
            elementwise.copy(stand_in, array)
        return stand_in

    def written(self, array: Array | None) -> Any:
        """Room for what is to be written."""
        stand_in = self._stand_in(array)
        if stand_in is not array:
            self._back.append((array, stand_in))
        return stand_in

    def updated(self, array: Array | None) -> Any:
        """A copy that goes back."""
        stand_in = self.written(array)
        if stand_in is not array:
            elementwise.copy(stand_in, array)
        return stand_in

    def give_back(self) -> None:
        """Copies what was written to where it belongs."""
        for array, stand_in in self._back:
            elementwise.copy(array, stand_in)

    @staticmethod
    def _stand_in(array: Array | None) -> Any:
        if array is None or (array.is_channels_last if array.ndim == 4 else array.is_contiguous):
            return array
        room = scratch(array.storage.device, prod(array.shape) * array.dtype.itemsize)
        stride = channels_last_stride(array.shape) if array.ndim == 4 else (1,)
        return Array(room.storage, array.shape, stride, array.dtype)
