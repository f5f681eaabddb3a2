"""A convolution and the batch normalisation behind it, in training, recorded as one operation."""

from __future__ import annotations

from functools import lru_cache

from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.ops import convolution, normalization
from framework.ops.checks import Pair, check_tensors
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.array import Array, Layout
from framework.vm.runtime import Runtime

# Stride, padding, dilation and groups of the convolution, eps, momentum and ReLU of the normalisation.
Settings = tuple[Pair, Pair, Pair, int, float, float, bool]


class ConvBatchNorm(Operation):
    """The kernels are those of the two operations; what lies between them is nobody else's."""

    name = "conv2d_batch_norm"
    takes_parts = True

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        kernel: Array,
        weight: Array,
        bias: Array,
        residual: Array | None,
        *,
        running: tuple[Array, Array],
        settings: Settings,
        names: tuple[str, str],
    ) -> Array:
        mean, var = running
        both = _plans(
            kernels, x.layout, kernel.layout, weight.layout, bias.layout, None if residual is None else residual.layout,
            mean.layout, var.layout, node.recording, settings,
        )  # fmt: skip
        plan, training = both
        # Memory is labelled by the module that each part belongs to.
        around = scope.here.frame
        scope.current = ((around, names[0]), "conv2d")
        between = kernels.new(plan.y)
        plan.forward(between, x, kernel, None)
        scope.current = ((around, names[1]), "batch_norm")
        y, mean, inv_std, mask = training.train(between, weight, bias, residual, mean, var)
        if node.recording:
            # mean, inv_std and mask lie in one storage: if one of them is written, so are all.
            kept = y if training.keeps_y else bias if training.remakes else None
            node.save(node.input(0, x) if node.needs[1] else None, kernel, between, weight, mean, kept)
            node.note = (names, both, inv_std, mask)
            if training.remakes:
                node.remakes(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, kernel, between, weight, mean, y = node.kept
        names, (plan, training), inv_std, mask = node.note
        needs_x, needs_kernel, *_ = node.needs
        around, _ = node.scope  # type: ignore[misc] # apply() gave the node one
        scope.current = (((around, names[1]), "batch_norm"), "backward")
        grad, grad_weight, grad_bias, grad_residual = training.backward(
            node, 2, needs_x or needs_kernel, grad_y, between, weight, mean, inv_std, y if mask is None else mask
        )
        scope.current = (((around, names[0]), "conv2d"), "backward")
        return *convolution.backward(node, kernels, 0, plan, grad, kernel, x), grad_weight, grad_bias, grad_residual

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        _, _, between, weight, mean, bias = node.kept
        _, (_, training), inv_std, mask = node.note
        y = kernels.new(training.y)
        kernels.batch_norm_again(y, between, weight, bias, mean, inv_std, mask)
        return y


def conv2d_batch_norm(
    x: Tensor,
    kernel: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
    names: tuple[str, str] = ("", ""),
) -> Tensor:
    """`batch_norm(conv2d(x, kernel), …, training=True)`, with the values, gradients and errors of the two.

    It takes the host less time than the two, and there is no tensor for what lies between them. `names` are those of the
    modules that the two belong to, for memory's labels.
    """
    is_usual = type(x) is type(running_mean) is type(running_var) is Tensor
    if not is_usual or not (residual is None or type(residual) is Tensor):
        check_tensors("conv2d", x)
        check_tensors("batch_norm", running_mean, running_var, residual)
    return apply(
        ConvBatchNorm,
        x,
        kernel,
        weight,
        bias,
        residual,
        running=(running_mean.array, running_var.array),
        settings=(
            *convolution.settings(stride, padding, dilation, groups),
            eps if type(eps) is float else float(eps),
            momentum if type(momentum) is float else float(momentum),
            relu,
        ),
        names=names,
    )


@lru_cache(maxsize=4096)
def _plans(
    kernels: Runtime,
    x: Layout,
    kernel: Layout,
    weight: Layout,
    bias: Layout,
    residual: Layout | None,
    running_mean: Layout,
    running_var: Layout,
    is_recorded: bool,
    settings: Settings,
) -> tuple[convolution.Plan, normalization.TrainingPlan]:
    """The plans of the two operations. Raises ValueError or TypeError where the operands do not fit."""
    stride, padding, dilation, groups, *rest = settings
    plan = convolution.plan(kernels, x, kernel, None, stride, padding, dilation, groups)
    normalization.check(plan.y, residual, weight, bias, running_mean, running_var, True)
    return plan, normalization.training_plan(
        kernels, plan.y, weight, bias, residual, running_mean, running_var, is_recorded, *rest
    )
