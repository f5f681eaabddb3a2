"""Gradients of batch normalisation in CUDA C++, with those of the residual addition and the ReLU in the same passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from framework.device import Device
from framework.kernels.cuda import elementwise, launch, normalization_plans
from framework.kernels.cuda.dense import Dense
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, Layout, channels_last_stride


def _prepare_backward(
    device: Device,
    grad_x: Layout | None,
    grad_weight: Layout | None,
    grad_bias: Layout | None,
    grad_residual: Layout | None,
    grad_y: Layout,
    x: Layout,
    weight: Layout | None,
    mean: Layout,
    spread: Layout,
    mask: Layout | None,
    second_grad_y: Layout | None = None,
    *,
    relu: bool,
    eps: float | None = None,
) -> Callable[..., None]:
    """`spread` is 1/√(variance + eps), or the variance where `eps` is given, outside training."""
    if not relu:
        mask = None
    kind = "open" if mask is None else "bits" if _is_bits(mask, x) else "recomputed"
    # The kernels take two parts only where the block that they end is used twice, as residual networks do.
    adds = second_grad_y is not None and (kind != "bits" or grad_residual is None)
    copies = grad_residual is not None and mask is None
    rest = (mean, spread, weight, grad_weight, grad_bias)

    def plan(is_aligned: bool) -> normalization_plans.Run | None:
        return normalization_plans.backward(
            device, kind, eps is not None, is_aligned, grad_x, None if copies else grad_residual, grad_y,
            None if adds else second_grad_y, x, *rest,
        )  # fmt: skip

    stream = launch.stream
    aligned = None if adds else plan(True)
    if aligned is None:
        return partial(_differentiate_otherwise, adds=adds, relu=relu, eps=eps)
    constant = -1.0 if eps is None else eps

    def differentiate(
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, mean, spread, mask, second_grad_y=None
    ):
        if copies:
            elementwise.copy(grad_residual, grad_y)
            grad_residual = None
        grad_y_at, x_at = grad_y.ptr, x.ptr
        grad_x_at = 0 if grad_x is None else grad_x.ptr
        masked_at = 0 if grad_residual is None else grad_residual.ptr
        second_at = 0 if second_grad_y is None else second_grad_y.ptr
        run: Any = plan(False) if (x_at | grad_y_at | grad_x_at | masked_at | second_at) & 15 else aligned
        run(
            stream(device),
            grad_x_at,
            masked_at,
            0 if grad_weight is None else grad_weight.ptr,
            0 if grad_bias is None else grad_bias.ptr,
            grad_y_at,
            second_at,
            x_at,
            0 if weight is None else weight.ptr,
            mean.ptr,
            spread.ptr,
            mask.ptr if relu and mask is not None else 0,
            constant,
        )

    return differentiate


def _differentiate_otherwise(
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
    second_grad_y: Array | None = None,
    *,
    adds: bool,
    relu: bool,
    eps: float | None,
) -> None:
    """With the two parts added up first, or with dense stand-ins for what lies otherwise."""
    if adds:
        total = _like(x)
        elementwise.add(total, grad_y, second_grad_y)
        _differentiate(
            (grad_x, grad_weight, grad_bias, grad_residual, total, x, weight, mean, spread, mask, None), relu, eps
        )
        return
    dense = Dense()
    stand_ins = (
        dense.written(grad_x), dense.written(grad_weight), dense.written(grad_bias), dense.written(grad_residual),
        dense.read(grad_y), dense.read(x), dense.read(weight), dense.read(mean), dense.read(spread), mask,
        dense.read(second_grad_y),
    )  # fmt: skip
    _differentiate(stand_ins, relu, eps)
    dense.give_back()


def _differentiate(operands: tuple[Array | None, ...], relu: bool, eps: float | None) -> None:
    layouts: Any = [None if operand is None else operand.layout for operand in operands]
    device = operands[5].storage.device  # type: ignore[union-attr]
    _prepare_backward(device, *layouts, relu=relu, eps=eps)(*operands)


@kernel(outputs=4, prepare=_prepare_backward)
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
    operands = (
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, mean, inv_std, mask, second_grad_y,
    )  # fmt: skip
    _differentiate(operands, relu, None)


@kernel(outputs=4, prepare=_prepare_backward)
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
    operands = (
        grad_x, grad_weight, grad_bias, grad_residual, grad_y, x, weight, running_mean, running_var, mask, None,
    )  # fmt: skip
    _differentiate(operands, relu, eps)


@lru_cache(maxsize=4096)
def _is_bits(mask: Layout, x: Layout) -> bool:
    """Whether a mask has a bit for each element of x; one with figures per channel never has the same size."""
    return mask.nbytes == (x.size + 7) // 8


def _like(x: Array) -> Array:
    return Array(scratch(x.storage.device, x.nbytes).storage, x.shape, channels_last_stride(x.shape), x.dtype)
