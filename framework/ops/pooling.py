"""Pooling over images `[N, C, H, W]`."""

from __future__ import annotations

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.ops.checks import Pair, check_floats, check_images, pair, window_count
from framework.tensor import Tensor
from framework.vm.array import Array, channels_last_stride, dense_stride_like
from framework.vm.runtime import Runtime


class MaxPool2d(Operation):
    name = "max_pool2d"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Array:
        sizes = [window_count("max_pool2d", x.shape[2 + i], kernel[i], stride[i], padding[i]) for i in (0, 1)]
        shape = (*x.shape[:2], *sizes)
        layout = channels_last_stride(shape) if x.is_channels_last else None
        y = kernels.empty(shape, x.dtype, layout)
        dtype, indices_shape = kernels.table.max_pool2d_indices(shape, kernel)
        indices = kernels.empty(indices_shape, dtype, layout if indices_shape == shape else None)
        geometry = {"kernel": kernel, "stride": stride, "padding": padding}
        kernels.max_pool2d(y, indices, x, **geometry)
        node.save(indices)
        node.note = (geometry, x.shape, dense_stride_like(x.shape, x.stride))
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> Array:
        (indices,) = node.saved
        geometry, shape, stride = node.note
        grad_x = kernels.empty(shape, grad_y.dtype, stride)
        kernels.max_pool2d_backward(grad_x, grad_y, indices, **geometry)
        return grad_x


class GlobalAvgPool2d(Operation):
    name = "global_avg_pool2d"

    @staticmethod
    def forward(node: Node, kernels: Runtime, x: Array) -> Array:
        shape = (*x.shape[:2], 1, 1)
        y = kernels.empty(shape, x.dtype, channels_last_stride(shape))
        kernels.global_avg_pool2d(y, x)
        node.note = (x.shape, dense_stride_like(x.shape, x.stride))
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> Array:
        shape, stride = node.note
        grad_x = kernels.empty(shape, grad_y.dtype, stride)
        kernels.global_avg_pool2d_backward(grad_x, grad_y)
        return grad_x


def max_pool2d(x: Tensor, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> Tensor:
    """The largest element of each window; `stride` is the window's size where it is not given.

    The image is padded with -∞. Raises ValueError where no window fits, padding exceeds half the window, or the window
    has more than 256 elements.
    """
    check_images("max_pool2d", x)
    check_floats("max_pool2d", x)
    kernel = pair("kernel_size", kernel_size, least=1)
    padded = pair("padding", padding, least=0)
    if any(2 * p > k for p, k in zip(padded, kernel, strict=True)):
        raise ValueError(f"max_pool2d pads a window of {kernel} by at most half of it; got {padded}")
    steps = kernel if stride is None else pair("stride", stride, least=1)
    return apply(MaxPool2d, x, kernel=kernel, stride=steps, padding=padded)


def global_avg_pool2d(x: Tensor) -> Tensor:
    """The mean over each channel's image: [N, C, H, W] -> [N, C, 1, 1]."""
    check_images("global_avg_pool2d", x)
    check_floats("global_avg_pool2d", x)
    return apply(GlobalAvgPool2d, x)
