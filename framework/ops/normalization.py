"""Batch normalisation, with a residual addition and a ReLU fused in."""

from __future__ import annotations

from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.dtype import DType, float32, uint8
from framework.ops.checks import check_floats, check_images
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime


class BatchNormTrain(Operation):
    name = "batch_norm"
    takes_parts = True

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
        *,
        eps: float,
        momentum: float,
        relu: bool,
    ) -> Array:
        y = kernels.empty_like(x)
        mean, inv_std = _statistics(kernels, x)
        mask = _mask(node, kernels, x, residual, relu)
        kernels.batch_norm_train(
            y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual,
            eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
        remakes = node.recording and relu and residual is None and kernels.table.batch_norm_remakes(x)
        kept = y if mask is None and relu else mask
        node.save(x, weight, mean, inv_std, kept, bias if remakes else None)
        node.note = (relu, _parameter_type(x, weight, bias))
        if remakes:
            node.remakes(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, weight, mean, inv_std, mask, _ = node.saved
        first, second = grad_y.array, grad_y.second
        relu, dtype = node.note
        changed = relu or second is not None
        # The residual's gradient may take the place of the first part, and that of x the place of the last.
        spare = [second] if grad_y.second_owned else []
        if grad_y.owned and (changed or not node.needs[3]):
            spare.append(first)
        grads = _new_gradients(node, kernels, x, dtype, changed=changed, spare=spare)
        kernels.batch_norm_backward(*grads, first, x, weight, mean, inv_std, mask, second, relu=relu)
        return _with_residual(node, grads, first)

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        x, weight, mean, inv_std, mask, bias = node.saved
        y = kernels.empty_like(x)
        kernels.batch_norm_again(y, x, weight, bias, mean, inv_std, mask)
        return y


class BatchNormEval(Operation):
    name = "batch_norm"

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None,
        running_mean: Array,
        running_var: Array,
        *,
        eps: float,
        relu: bool,
    ) -> Array:
        y = kernels.empty_like(x)
        mask = _mask(node, kernels, x, residual, relu)
        kernels.batch_norm_eval(y, mask, x, weight, bias, running_mean, running_var, residual, eps=eps, relu=relu)
        node.save(x, weight, running_mean, running_var, y if mask is None and relu else mask)
        node.note = (relu, _parameter_type(x, weight, bias), eps)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight, running_mean, running_var, mask = node.saved
        relu, dtype, eps = node.note
        grads = _new_gradients(node, kernels, x, dtype, changed=relu, spare=[])
        kernels.batch_norm_eval_backward(*grads, grad_y, x, weight, running_mean, running_var, mask, eps=eps, relu=relu)
        return _with_residual(node, grads, grad_y)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """act(weight · (x - mean) / √(variance + eps) + bias + residual), per channel of images [N, C, H, W].

    In training, mean and variance are the batch's, and the running ones move towards them by `momentum`;
    otherwise the running ones are used. `residual` has the shape of x; act is ReLU where `relu` is set.
    Raises ValueError for shapes that do not fit, or for fewer than two values per channel in training.
    """
    check_images("batch_norm", x)
    check_floats("batch_norm", x, residual)
    shape = x.array.shape
    channels = shape[1:2]
    for name, given in (
        ("weight", weight),
        ("bias", bias),
        ("running_mean", running_mean),
        ("running_var", running_var),
    ):
        if given is not None and given.array.shape != channels:
            raise ValueError(f"batch_norm over {channels[0]} channels got a {name} of shape {list(given.shape)}")
    if residual is not None and residual.array.shape != shape:
        raise ValueError(f"batch_norm of shape {list(x.shape)} got a residual of {list(residual.shape)}")
    if training:
        if shape[0] * shape[2] * shape[3] < 2:
            raise ValueError(f"batch_norm in training needs more than one value per channel; got shape {list(x.shape)}")
        return apply(
            BatchNormTrain, x, weight, bias, residual, running_mean, running_var,
            eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
    if running_mean is None or running_var is None:
        raise ValueError("batch_norm outside training needs running_mean and running_var")
    return apply(BatchNormEval, x, weight, bias, residual, running_mean, running_var, eps=eps, relu=relu)


def _mask(node: Node, kernels: Runtime, x: Array, residual: Array | None, relu: bool) -> Array | None:
    """Room for what backward must know of the ReLU; None where the result itself tells that."""
    if not (relu and node.recording):
        return None
    nbytes = kernels.table.batch_norm_mask_bytes(x, has_residual=residual is not None)
    return None if nbytes is None else kernels.empty((nbytes,), uint8)


def _statistics(kernels: Runtime, x: Array) -> tuple[Array, Array]:
    """Room for mean and 1/√(variance + eps), in float32 also for images of fewer digits; one allocation serves both."""
    channels = x.shape[1]
    both = kernels.empty((2, channels), x.dtype if x.dtype.itemsize >= 4 else float32)
    return both.view((channels,), (1,)), both.view((channels,), (1,), channels)


def _parameter_type(x: Array, weight: Array | None, bias: Array | None) -> DType:
    """The element type that weight and bias have, and so their gradients."""
    return weight.dtype if weight is not None else x.dtype if bias is None else bias.dtype


def _new_gradients(
    node: Node, kernels: Runtime, x: Array, dtype: DType, *, changed: bool, spare: list[Array]
) -> tuple[Array | None, ...]:
    """Room for the gradients. That of the residual is grad_y itself unless it is `changed` on the way.

    Images may take the place of the `spare` ones.
    """
    needs_x, needs_weight, needs_bias, needs_residual, *_ = node.needs
    per_channel = (x.shape[1],)
    return (
        _images(kernels, x, spare) if needs_x else None,
        kernels.empty(per_channel, dtype) if needs_weight else None,
        kernels.empty(per_channel, dtype) if needs_bias else None,
        _images(kernels, x, spare) if needs_residual and changed else None,
    )


def _images(kernels: Runtime, x: Array, spare: list[Array]) -> Array:
    if spare and spare[0].stride == x.stride and spare[0].dtype is x.dtype:
        return spare.pop(0)
    return kernels.empty_like(x)


def _with_residual(node: Node, grads: tuple[Array | None, ...], grad_y: Array) -> tuple[Array | None, ...]:
    residual = grad_y if node.needs[3] and grads[3] is None else grads[3]
    return (*grads[:3], residual, None, None)
