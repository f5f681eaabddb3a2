"""Two-dimensional convolution. Images are `[N, C, H, W]`; results lie NHWC in memory."""

from __future__ import annotations

from functools import lru_cache

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.ops.checks import Pair, check_floats, check_images, pair, window_count
from framework.tensor import Tensor
from framework.vm.array import Array, channels_last_stride
from framework.vm.runtime import Runtime


class Conv2d(Operation):
    name = "conv2d"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array, weight: Array, bias: Array | None, **geometry: object) -> Array:
        shape = _output_shape(x.shape, weight.shape, **geometry)
        y = kernels.empty(shape, x.dtype, channels_last_stride(shape))
        kernels.conv2d(y, x, weight, bias, **geometry)
        node.save(node.input(0, x) if node.needs[1] or node.needs[2] else None, weight if node.needs[0] else None)
        node.note = (geometry, x.shape, weight)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight = node.saved
        geometry, x_shape, like = node.note
        grad_x = grad_weight = grad_bias = None
        if node.needs[1] or node.needs[2]:
            grad_weight = kernels.empty_like(like)
            grad_bias = kernels.empty((like.shape[0],), like.dtype) if node.needs[2] else None
            kernels.conv2d_backward_weight(grad_weight, grad_bias, grad_y, x, **geometry)
        if node.needs[0]:
            grad_x = kernels.empty(x_shape, grad_y.dtype, channels_last_stride(x_shape))
            kernels.conv2d_backward_input(grad_x, grad_y, weight, **geometry)
        return grad_x, grad_weight if node.needs[1] else None, grad_bias


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """The cross-correlation of images x [N, C, H, W] with weight [O, C/groups, kh, kw], plus bias [O].

    Returns [N, O, Ho, Wo], Ho = ⌊(H + 2·padding - dilation·(kh-1) - 1) / stride⌋ + 1 and Wo alike.
    Raises ValueError where the shapes do not fit, TypeError where the element types do not.
    """
    check_images("conv2d", x)
    check_floats("conv2d", x, weight, bias)
    if weight.ndim != 4 or weight.shape[1] * groups != x.shape[1] or weight.shape[0] % groups:
        raise ValueError(
            f"conv2d of images {list(x.shape)} in {groups} group(s) needs a weight [O, {x.shape[1]}/groups, kh, kw] "
            f"with O a multiple of groups; got {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        o = weight.shape[0]
        raise ValueError(f"conv2d with {o} output channels needs a bias of shape [{o}]; got {list(bias.shape)}")
    return apply(
        Conv2d,
        x,
        weight,
        bias,
        stride=pair("stride", stride, least=1),
        padding=pair("padding", padding, least=0),
        dilation=pair("dilation", dilation, least=1),
        groups=groups,
    )


@lru_cache(maxsize=4096)
def _output_shape(
    x: tuple[int, ...], weight: tuple[int, ...], *, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> tuple[int, int, int, int]:
    height, width = (
        window_count("conv2d", x[2 + i], weight[2 + i], stride[i], padding[i], dilation[i]) for i in (0, 1)
    )
    return x[0], weight[0], height, width
