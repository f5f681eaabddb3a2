"""A convolution and the batch normalisation behind it, in training, recorded as one operation."""

from __future__ import annotations

from typing import Any, cast

from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.ops import convolution, normalization
from framework.ops.checks import Pair, check_tensors
from framework.ops.convolution import Plan
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.array import Array, Layout
from framework.vm.runtime import Runtime


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
        plan: Plan,
        running: tuple[Array, Array],
        settings: dict[str, Any],
        names: tuple[str, str],
    ) -> Array:
        # Memory is labelled by the module that each part belongs to.
        around = scope.here.frame
        scope.current = ((around, names[0]), "conv2d")
        between = kernels.new(plan.y)
        kernels.conv2d(between, x, kernel, None, **plan.geometry)
        scope.current = ((around, names[1]), "batch_norm")
        y, mean, inv_std, mask = normalization.train(
            kernels, between, weight, bias, residual, *running, node.recording, **settings
        )
        if node.recording:
            relu = settings["relu"]
            remakes = relu and residual is None and kernels.table.batch_norm_remakes(between)
            node.save(
                node.input(0, x) if node.needs[1] else None,
                kernel,
                between,
                weight,
                mean,
                y if mask is None and relu else None,
                bias if remakes else None,
            )
            node.note = (names, plan, relu, inv_std, mask)
            if remakes:
                node.remakes(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, kernel, between, weight, mean, y, _ = node.kept
        names, plan, relu, inv_std, mask = node.note
        needs_x, needs_kernel, *_ = node.needs
        around, _ = cast(scope.Frame, node.scope)  # apply() gave the node one
        scope.current = (((around, names[1]), "batch_norm"), "backward")
        grad, grad_weight, grad_bias, grad_residual = normalization.train_backward(
            node, kernels, 2, needs_x or needs_kernel, grad_y, between, weight, mean, inv_std,
            y if mask is None else mask, relu, weight.dtype,
        )  # fmt: skip
        scope.current = (((around, names[0]), "conv2d"), "backward")
        grad_x = grad_kernel = None
        if needs_kernel:
            grad_kernel = convolution.backward_weight(node, kernels, plan, grad, x.remake() if type(x) is Node else x)
        if needs_x:
            grad_x = kernels.new(plan.grad_x)
            kernels.conv2d_backward_input(grad_x, grad, kernel, **plan.geometry)
        return grad_x, grad_kernel, grad_weight, grad_bias, grad_residual

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        _, _, between, weight, mean, _, bias = node.kept
        *_, inv_std, mask = node.note
        y = kernels.new(Layout.like(between.layout))
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
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
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
    check_tensors("conv2d", x, kernel)
    check_tensors("batch_norm", residual, weight, bias, running_mean, running_var)
    plan = convolution.plan(x.array.layout, kernel.array.layout, None, stride, padding, dilation, groups)
    normalization.check(
        plan.y,
        None if residual is None else residual.array.layout,
        weight.array.layout,
        bias.array.layout,
        running_mean.array.layout,
        running_var.array.layout,
        True,
    )
    return apply(
        ConvBatchNorm,
        x,
        kernel,
        weight,
        bias,
        residual,
        plan=plan,
        running=(running_mean.array, running_var.array),
        settings={"eps": eps, "momentum": momentum, "relu": relu},
        names=names,
    )
