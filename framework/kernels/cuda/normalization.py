"""Batch normalisation in CUDA C++, with the residual addition and the ReLU in the same passes.

Images lie NHWC; other layouts are copied there and back. The mask holds one bit an element in the order of memory
where something was added before the ReLU, and else each channel's mean, scale and bias, from which the ReLU's input
is had again in backward. Which of the two it is shows in its size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from framework.device import Device
from framework.kernels.cuda import launch, normalization_plans
from framework.kernels.cuda.dense import Dense
from framework.kernels.table import kernel
from framework.vm.array import Array, Layout

# A result of at least so many bytes, and so many for each image, is made again for backward. In short steps the launch would
# cost more than the memory is worth; in long ones less is worth it.
_REMADE_BYTES = ((6 * 1024 * 1024, 512 * 1024), (16 * 1024 * 1024, 384 * 1024))


def batch_norm_mask_bytes(x: Array | Layout, *, has_residual: bool) -> int:
    """Bytes of the mask that a forward kernel writes for backward; never the same with and without a residual."""
    bits = (x.size + 7) // 8
    if has_residual:
        return bits
    coefficients = 3 * x.shape[1] * normalization_plans.value_bytes(x.dtype)
    return coefficients if coefficients != bits else coefficients + 1


def batch_norm_remakes(x: Array | Layout) -> bool:
    """Whether a result is large, for the device and for the two passes over it that making it again costs."""
    nbytes, images = x.nbytes, x.shape[0]
    return any(nbytes >= least and nbytes >= images * of_image for least, of_image in _REMADE_BYTES)


def _prepare_train(
    device: Device,
    y: Layout,
    mean: Layout,
    inv_std: Layout,
    mask: Layout | None,
    running_mean: Layout | None,
    running_var: Layout | None,
    x: Layout,
    weight: Layout | None,
    bias: Layout | None,
    residual: Layout | None,
    *,
    eps: float,
    momentum: float,
    relu: bool,
) -> Callable[..., None]:
    def plan(is_aligned: bool) -> normalization_plans.Run | None:
        return normalization_plans.train(
            device, relu, mask is not None, is_aligned, y, x, residual, mean, inv_std, running_mean, running_var, weight,
            bias,
        )  # fmt: skip

    stream = launch.stream
    aligned = plan(True)
    if aligned is None:
        return partial(_train_densely, eps=eps, momentum=momentum, relu=relu)
    recomputes = residual is None

    def train(y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual):
        y_at, x_at = y.ptr, x.ptr
        residual_at = 0 if residual is None else residual.ptr
        mask_at = 0 if mask is None else mask.ptr
        run: Any = plan(False) if (y_at | x_at | residual_at) & 15 else aligned
        run(
            stream(device),
            y_at,
            mask_at,
            0 if running_mean is None else running_mean.ptr,
            0 if running_var is None else running_var.ptr,
            mean.ptr,
            inv_std.ptr,
            mask_at if recomputes else 0,
            x_at,
            residual_at,
            0 if weight is None else weight.ptr,
            0 if bias is None else bias.ptr,
            eps,
            momentum,
        )

    return train


def _train_densely(
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
    **attributes: Any,
) -> None:
    """With dense stand-ins for what lies otherwise."""
    dense = Dense()
    batch_norm_train(
        dense.written(y), dense.written(mean), dense.written(inv_std), mask, dense.updated(running_mean),
        dense.updated(running_var), dense.read(x), dense.read(weight), dense.read(bias), dense.read(residual),
        **attributes,
    )  # fmt: skip
    dense.give_back()


@kernel(outputs=6, prepare=_prepare_train)
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
    operands = (y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual)
    layouts = [_layout(operand) for operand in operands]
    _prepare_train(x.storage.device, *layouts, eps=eps, momentum=momentum, relu=relu)(*operands)  # type: ignore[arg-type]


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
        dense = Dense()
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
        dense = Dense()
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


def _layout(array: Array | None) -> Layout | None:
    return None if array is None else array.layout
