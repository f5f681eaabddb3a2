"""relu(bn(x) + bn(shortcut)) in CUDA C++: one pass over both where two normalisations take one each.

Images that lie other than NHWC, and parameters of two types, go through the kernels of one normalisation instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from framework.device import Device
from framework.kernels.cuda import launch, normalization, normalization_backward, normalization_plans
from framework.kernels.cuda.normalization_plans import Layouts, Run, Spread
from framework.kernels.reference import normalization_sum as reference
from framework.kernels.table import kernel
from framework.vm.array import Array, Layout

_LARGE, _SMALL = "normalization_sum.cu", "normalization_small_sum.cu"
# The channels of a block, at least, wherever its operands lie.
_LEAST_TILE = 32


def _prepare_train(device: Device, *layouts: Layout | None, **attributes: float) -> Callable[..., None]:
    y, mean, inv_std, shortcut_mean, shortcut_inv_std, mask, *moved = layouts[:10]
    x, weight, bias, shortcut, shortcut_weight, shortcut_bias = layouts[10:]
    vectors = (mean, inv_std, shortcut_mean, shortcut_inv_std, *moved, weight, bias, shortcut_weight, shortcut_bias)

    def plan(is_aligned: bool) -> Run | None:
        return _train(device, mask is not None, is_aligned, (y, x, shortcut), vectors)

    stream = launch.stream
    aligned = plan(True)
    if aligned is None:
        return partial(reference.train_by(normalization.batch_norm_train), **attributes)
    numbers = attributes["eps"], attributes["momentum"]
    shortcut_numbers = attributes["shortcut_eps"], attributes["shortcut_momentum"]

    def train(
        y, mean, inv_std, shortcut_mean, shortcut_inv_std, mask, running_mean, running_var, shortcut_running_mean,
        shortcut_running_var, x, weight, bias, shortcut, shortcut_weight, shortcut_bias,
    ):  # fmt: skip
        y_at, x_at, shortcut_at = y.ptr, x.ptr, shortcut.ptr
        run: Any = plan(False) if (y_at | x_at | shortcut_at) & 15 else aligned
        run(
            stream(device),
            y_at,
            0 if mask is None else mask.ptr,
            (
                x_at,
                0 if weight is None else weight.ptr,
                0 if bias is None else bias.ptr,
                0 if running_mean is None else running_mean.ptr,
                0 if running_var is None else running_var.ptr,
                mean.ptr,
                inv_std.ptr,
            ),
            numbers,
            (
                shortcut_at,
                0 if shortcut_weight is None else shortcut_weight.ptr,
                0 if shortcut_bias is None else shortcut_bias.ptr,
                0 if shortcut_running_mean is None else shortcut_running_mean.ptr,
                0 if shortcut_running_var is None else shortcut_running_var.ptr,
                shortcut_mean.ptr,
                shortcut_inv_std.ptr,
            ),
            shortcut_numbers,
        )

    return train


@lru_cache(maxsize=1024)
def _train(device: Device, has_mask: bool, is_aligned: bool, images: Layouts, vectors: Layouts) -> Run | None:
    """The launch of batch_norm_sum_train, None for operands that one pass does not take."""
    spread = _spread(device, is_aligned, images, vectors)
    if spread is None:
        return None
    if spread.channels == 0:
        return normalization_plans.nothing
    name = "apply_sum_relu" + "_bits" * has_mask
    small = spread.small(device, name, "2Q7Q2d7Q2d", "", file=_SMALL)
    if small is not None:
        return lambda on, y, mask, main, numbers, shortcut, others: small(
            on, y, mask, *main, *numbers, *shortcut, *others
        )
    statistics = spread.reduce(device, "statistics", "10Q2d", "")
    apply = spread.apply(device, name, "6Q", _LARGE)
    parts_bytes, coefficient_bytes = spread.parts_bytes, spread.coefficient_bytes
    room = parts_bytes + 2 * coefficient_bytes

    def run(on, y, mask, main, numbers, shortcut, others):
        counters = launch.workspace(device, on, room)
        parts = counters + launch.COUNTER_BYTES
        own = parts + parts_bytes
        added = own + coefficient_bytes
        statistics(on, *shortcut, added, parts, counters, *others)
        statistics(on, *main, own, parts, counters, *numbers)
        apply(on, y, mask, main[0], shortcut[0], own, added)

    return run


@kernel(outputs=10, prepare=_prepare_train)
def batch_norm_sum_train(*operands: Array | None, **attributes: float) -> None:
    """As the reference kernel of the same name."""
    _run_prepared(_prepare_train, 10, operands, attributes)


def _prepare_backward(device: Device, *layouts: Layout | None) -> Callable[..., None]:
    grad_x, grad_weight, grad_bias, grad_shortcut, grad_shortcut_weight, grad_shortcut_bias, grad_y = layouts[:7]
    x, weight, mean, inv_std, shortcut, shortcut_weight, shortcut_mean, shortcut_inv_std = layouts[7:15]
    second = layouts[16] if len(layouts) > 16 else None
    vectors = (
        mean, inv_std, shortcut_mean, shortcut_inv_std, weight, shortcut_weight, grad_weight, grad_bias,
        grad_shortcut_weight, grad_shortcut_bias,
    )  # fmt: skip

    def plan(is_aligned: bool) -> Run | None:
        return _backward(device, is_aligned, (grad_x, grad_shortcut, grad_y, second, x, shortcut), vectors)

    stream = launch.stream
    aligned = plan(True)
    if aligned is None:
        return reference.backward_by(normalization_backward.batch_norm_backward)

    def differentiate(
        grad_x, grad_weight, grad_bias, grad_shortcut, grad_shortcut_weight, grad_shortcut_bias, grad_y, x, weight, mean,
        inv_std, shortcut, shortcut_weight, shortcut_mean, shortcut_inv_std, mask, second_grad_y=None,
    ):  # fmt: skip
        grad_y_at, x_at, shortcut_at = grad_y.ptr, x.ptr, shortcut.ptr
        grad_x_at = 0 if grad_x is None else grad_x.ptr
        grad_shortcut_at = 0 if grad_shortcut is None else grad_shortcut.ptr
        second_at = 0 if second_grad_y is None else second_grad_y.ptr
        odd = (grad_y_at | x_at | shortcut_at | grad_x_at | grad_shortcut_at | second_at) & 15
        run: Any = plan(False) if odd else aligned
        run(
            stream(device),
            grad_x_at,
            grad_shortcut_at,
            grad_y_at,
            second_at,
            mask.ptr,
            (
                x_at,
                0 if weight is None else weight.ptr,
                mean.ptr,
                inv_std.ptr,
                0 if grad_weight is None else grad_weight.ptr,
                0 if grad_bias is None else grad_bias.ptr,
            ),
            (
                shortcut_at,
                0 if shortcut_weight is None else shortcut_weight.ptr,
                shortcut_mean.ptr,
                shortcut_inv_std.ptr,
                0 if grad_shortcut_weight is None else grad_shortcut_weight.ptr,
                0 if grad_shortcut_bias is None else grad_shortcut_bias.ptr,
            ),
        )

    return differentiate


@lru_cache(maxsize=1024)
def _backward(device: Device, is_aligned: bool, images: Layouts, vectors: Layouts) -> Run | None:
    """The launch of batch_norm_sum_backward, None for operands that one pass does not take."""
    spread = _spread(device, is_aligned, images, vectors)
    if spread is None:
        return None
    if spread.channels == 0:
        return normalization_plans.nothing
    grad_x, grad_shortcut, _, second, *_ = images
    two = "_two" * (second is not None)
    is_applied = grad_x is not None or grad_shortcut is not None
    small = spread.small(device, f"gradients_of_sum{two}", "5Q6Q6Q", "", file=_SMALL) if is_applied else None
    if small is not None:
        return lambda on, grad_x, grad_shortcut, grad_y, second, mask, main, shortcut: small(
            on, grad_x, grad_shortcut, grad_y, second, mask, *main, *shortcut
        )
    sums = spread.reduce(device, f"sum_gradients_of_sum{two}", "6Q6Q6Q", "", file=_LARGE)
    apply = spread.apply(device, f"apply_gradients_of_sum{two}", "8Q", _LARGE)
    parts_bytes = 2 * spread.parts_bytes
    room = parts_bytes + 2 * spread.coefficient_bytes

    def run(on, grad_x, grad_shortcut, grad_y, second, mask, main, shortcut):
        counters = launch.workspace(device, on, room)
        parts = counters + launch.COUNTER_BYTES
        coefficients = parts + parts_bytes
        sums(on, *main, *shortcut, coefficients, grad_y, second, mask, parts, counters)
        if is_applied:
            apply(on, grad_x, grad_shortcut, grad_y, second, main[0], shortcut[0], mask, coefficients)

    return run


@kernel(outputs=6, prepare=_prepare_backward)
def batch_norm_sum_backward(*operands: Array | None) -> None:
    """As the reference kernel of the same name."""
    _run_prepared(_prepare_backward, 7, operands, {})


def _run_prepared(prepare: Callable[..., Callable[..., None]], x: int, operands: Any, attributes: Any) -> None:
    """Prepares and runs, on the device of operand number `x`."""
    layouts = [None if operand is None else operand.layout for operand in operands]
    prepare(operands[x].storage.device, *layouts, **attributes)(*operands)


def _spread(device: Device, is_aligned: bool, images: Layouts, vectors: Layouts) -> Spread | None:
    """How the images are spread over blocks; None for what is not dense, or of more types than one pass takes."""
    types = {vector.dtype for vector in vectors[4:] if vector is not None}
    if len(types) > 1 or not normalization_plans.are_dense(images, vectors):
        return None
    shortcut: Any = images[-1]
    of = normalization_plans.types_of(shortcut.dtype, vectors[2:])
    spread = Spread(device, shortcut.shape, of, is_aligned)
    # Backward counts for each branch, see `sum_gradients` there, and tiles are smaller where addresses are odd.
    return spread if 8 * -(-spread.channels // _LEAST_TILE) <= launch.COUNTER_BYTES else None
