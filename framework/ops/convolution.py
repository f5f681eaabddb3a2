"""Two-dimensional convolution. Images are `[N, C, H, W]`; results lie NHWC in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.ops.checks import Pair, check_floats, check_images, check_tensor, check_tensors, pair, window_count
from framework.tensor import Tensor
from framework.vm.array import Array, Layout, channels_last_stride
from framework.vm.runtime import Runtime, runtime


class Conv2d(Operation):
    name = "conv2d"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array, weight: Array, bias: Array | None, *, plan: Plan) -> Array:
        y = kernels.new(plan.y)
        plan.forward(y, x, weight, bias)
        if node.recording:
            needs_x, needs_weight, needs_bias = node.needs
            node.save(node.input(0, x) if needs_weight or needs_bias else None, weight if needs_x else None)
            node.note = plan
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight = node.saved
        plan: Plan = node.note
        needs_x, needs_weight, needs_bias = node.needs
        grad_x = grad_weight = grad_bias = None
        if needs_weight or needs_bias:
            grad_bias = node.room(2, plan.grad_bias) if needs_bias else None
            grad_weight = backward_weight(node, kernels, plan, grad_y, x, grad_bias)
        if needs_x:
            grad_x = backward_input(kernels, plan, grad_y, weight)
        return grad_x, grad_weight if needs_weight else None, grad_bias


def backward(
    node: Node, kernels: Runtime, at: int, plan: Plan, grad_y: Array | None, weight: Any, x: Any
) -> tuple[Array | None, Array | None]:
    """The gradients of images and weight, inputs number `at` and `at` + 1 of `node`, as far as they are wanted.

    x is what `node.input` gave for the images; grad_y is None where neither gradient is wanted.
    """
    grad_x = grad_weight = None
    if grad_y is not None:
        needs_x, needs_weight = node.needs[at : at + 2]
        if needs_weight:
            grad_weight = backward_weight(node, kernels, plan, grad_y, x.remake() if type(x) is Node else x, at=at + 1)
        if needs_x:
            grad_x = backward_input(kernels, plan, grad_y, weight)
    return grad_x, grad_weight


def backward_input(kernels: Runtime, plan: Plan, grad_y: Array, weight: Array) -> Array:
    """The gradient of the images."""
    grad_x = kernels.new(plan.grad_x)
    if grad_y.layout is plan.y:
        plan.backward_input(grad_x, grad_y, weight)
    else:
        kernels.conv2d_backward_input(grad_x, grad_y, weight, **plan.geometry)
    return grad_x


def backward_weight(
    node: Node,
    kernels: Runtime,
    plan: Plan,
    grad_y: Array,
    x: Array | None,
    grad_bias: Array | None = None,
    at: int = 1,
) -> Array:
    """The gradient of the weight, which is input number `at` of `node`; writes that of the bias."""
    grad_weight = node.room(at, plan.grad_weight)
    # The walk goes on with the gradient of x; that of a parameter has time.
    on = kernels.beside(plan.multiplications)
    if on is not kernels and not node.leads_to_leaf(at):
        on = kernels
    if on is kernels and grad_y.layout is plan.y:
        plan.backward_weight(grad_weight, grad_bias, grad_y, x)
    else:
        on.conv2d_backward_weight(grad_weight, grad_bias, grad_y, x, **plan.geometry)
    return grad_weight


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """The cross-correlation of images x [N, C, H, W] with weight [O, C/groups, kh, kw], plus bias [O].

    Returns [N, O, Ho, Wo], Ho = ⌊(H + 2·padding - dilation·(kh-1) - 1) / stride⌋ + 1 and Wo alike.
    Raises ValueError where the shapes do not fit, TypeError where the element types do not.
    """
    check_tensors("conv2d", x, bias)
    check_tensor("conv2d", weight)
    found = plan(
        runtime(x.array.storage.device),
        x.array.layout,
        weight.array.layout,
        None if bias is None else bias.array.layout,
        *settings(stride, padding, dilation, groups),
    )
    return apply(Conv2d, x, weight, bias, plan=found)


def settings(
    stride: int | Pair, padding: int | Pair, dilation: int | Pair, groups: int
) -> tuple[Pair, Pair, Pair, int]:
    """Those of a convolution as plans are found by them. Raises TypeError or ValueError for what is no such setting."""
    return (
        stride if type(stride) is tuple else pair("stride", stride, least=1),
        padding if type(padding) is tuple else pair("padding", padding, least=0),
        dilation if type(dilation) is tuple else pair("dilation", dilation, least=1),
        groups if type(groups) is int else index(groups),
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What a convolution of operands that lie in some way is run with, and how what it makes lies.

    `forward`, `backward_input` and `backward_weight` issue the kernels, the last two for a gradient that lies as y.
    """

    geometry: dict[str, Any]
    y: Layout
    grad_x: Layout
    grad_weight: Layout
    grad_bias: Layout
    multiplications: int
    forward: Callable[..., None]
    backward_input: Callable[..., None]
    backward_weight: Callable[..., None]


@lru_cache(maxsize=4096)
def plan(
    kernels: Runtime,
    x: Layout,
    weight: Layout,
    bias: Layout | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Plan:
    """The plan for operands of these layouts. Raises ValueError or TypeError where they do not fit."""
    check_images("conv2d", x)
    check_floats("conv2d", x, weight, bias)
    stride, padding = pair("stride", stride, least=1), pair("padding", padding, least=0)
    dilation = pair("dilation", dilation, least=1)
    n, channels, *image = x.shape
    if len(weight.shape) != 4 or weight.shape[1] * groups != channels or weight.shape[0] % groups:
        raise ValueError(
            f"conv2d of images {list(x.shape)} in {groups} group(s) needs a weight [O, {channels}/groups, kh, kw] "
            f"with O a multiple of groups; got {list(weight.shape)}"
        )
    out_channels = weight.shape[0]
    if bias is not None and bias.shape != (out_channels,):
        raise ValueError(
            f"conv2d with {out_channels} output channels needs a bias of shape [{out_channels}]; got {list(bias.shape)}"
        )
    height, width = (
        window_count("conv2d", image[i], weight.shape[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)
    )
    geometry: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y, grad_x = _nhwc((n, out_channels, height, width), x), _nhwc(x.shape, x)
    grad_weight, grad_bias = Layout.like(weight), Layout.of((out_channels,), (1,), weight.dtype)
    return Plan(
        geometry,
        y,
        grad_x,
        grad_weight,
        grad_bias,
        n * height * width * prod(weight.shape),
        kernels.prepared("conv2d", y, x, weight, bias, **geometry),
        kernels.prepared("conv2d_backward_input", grad_x, y, weight, **geometry),
        kernels.prepared("conv2d_backward_weight", grad_weight, bias and grad_bias, y, x, **geometry),
    )


def _nhwc(shape: Any, like: Layout) -> Layout:
    return Layout.of(shape, channels_last_stride(shape), like.dtype)
