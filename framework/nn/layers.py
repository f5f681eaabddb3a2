"""Layers: convolution, normalisation, pooling, linear, activation and loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from math import sqrt
from typing import Any

from framework import ops
from framework.creation import empty, ones, zeros
from framework.nn import init
from framework.nn.containers import Sequential
from framework.nn.counter import Counter
from framework.nn.module import Module
from framework.nn.parameter import Parameter
from framework.ops.checks import Pair, pair
from framework.tensor import Tensor

# U(-1/√fan_in, 1/√fan_in)
_DRAW_WEIGHT = partial(init.kaiming_uniform_, gain=1 / sqrt(3))
_CALL = Module.__call__


class Conv2d(Module):
    """A convolution over images [N, in, H, W]; weight [out, in/groups, kh, kw], drawn from U(-1/√fan_in, 1/√fan_in).

    `draw_weight` fills the new weight in its own way instead.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        draw_weight: Callable[[Tensor], object] = _DRAW_WEIGHT,
    ) -> None:
        super().__init__()
        if in_channels < 1 or out_channels < 1:
            raise ValueError(f"channels are integers from 1; got {in_channels} and {out_channels}")
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"groups must divide both channel numbers; got {groups} for {in_channels} and {out_channels}"
            )
        kernel = pair("kernel_size", kernel_size, least=1)
        self.stride = pair("stride", stride, least=1)
        self.padding = pair("padding", padding, least=0)
        self.dilation = pair("dilation", dilation, least=1)
        self.groups = groups
        self.weight = Parameter(empty(out_channels, in_channels // groups, *kernel))
        draw_weight(self.weight)
        self.register_parameter("bias", _bias(out_channels, self.weight.numel() // out_channels) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(
            x,
            self.weight,
            self.bias,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )

    # As it stands here: where `forward` is another by now, somebody wants that one called.
    _own_forward = forward

    def describe(self) -> str:
        return f"weight={list(self.weight.shape)}, stride={self.stride}, padding={self.padding}"


class BatchNorm2d(Module):
    """Batch normalisation of images [N, C, H, W], which can add a residual and apply a ReLU in the same pass.

    In training by the batch's mean and variance per channel, which also move the running ones; else by the running ones.
    Without `affine` there is no weight and no bias, without `track_running_stats` the batch's own figures always serve.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        if momentum is None:
            raise ValueError("momentum is a number: running figures that are plain averages, its None, are not there")
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.register_parameter("weight", Parameter(ones(num_features)) if affine else None)
        self.register_parameter("bias", Parameter(zeros(num_features)) if affine else None)
        self.register_buffer("running_mean", zeros(num_features) if track_running_stats else None)
        self.register_buffer("running_var", ones(num_features) if track_running_stats else None)
        self.register_buffer("num_batches_tracked", Counter() if track_running_stats else None)

    def forward(self, x: Tensor, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        y = ops.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training or (self.running_mean is None and self.running_var is None),
            momentum=self.momentum,
            eps=self.eps,
            residual=residual,
            relu=relu,
        )
        # Only now: a batch that was refused is not counted.
        if self.training:
            self._count()
        return y

    _own_forward = forward

    def after(
        self,
        convolution: Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        shortcut: Module | None = None,
        relu: bool = False,
    ) -> Tensor:
        """self(convolution(x), …); with a `shortcut`, that of the residual in its place.

        Where nothing forbids it, it is one operation in training: that takes the host less time, and if the shortcut is a
        convolution and its normalisation, in front of a ReLU, the device less time and memory. A `forward` that somebody puts
        into a module, its class or a subclass is called; a normalisation's may take the images alone.
        """
        as_one = _are_one_operation(convolution, self)
        if shortcut is not None:
            if residual is None:
                raise TypeError("after() takes a shortcut for a residual; there is no residual")
            parts = _parts(shortcut, self) if as_one and relu else None
            if parts is not None:
                prefix = shortcut._name and f"{shortcut._name}."
                y = ops.conv2d_batch_norm_sum(_branch(convolution, self, x, ""), _branch(*parts, residual, prefix))
                parts[1]._count()
                self._count()
                return y
            residual = shortcut(residual)
        if not as_one:
            if _is_as_made(self) or _takes_residual(self.forward):
                return self(convolution(x), residual=residual, relu=relu)
            return super().after(convolution, x, residual=residual, relu=relu)
        y = ops.conv2d_batch_norm(
            x,
            convolution.weight,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            stride=convolution.stride,
            padding=convolution.padding,
            dilation=convolution.dilation,
            groups=convolution.groups,
            momentum=self.momentum,
            eps=self.eps,
            residual=residual,
            relu=relu,
            names=(convolution._name, self._name),
        )
        self._count()
        return y

    def _count(self) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.count()

    def describe(self) -> str:
        left_out = ", affine=False" * (self.weight is None and self.bias is None)
        left_out += ", track_running_stats=False" * (self.running_mean is None and self.running_var is None)
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}{left_out}"


def _are_one_operation(convolution: Any, norm: Any) -> bool:
    """Whether a convolution and the normalisation behind it are just that, in training."""
    return (
        norm.training
        and type(norm) is BatchNorm2d
        and type(convolution) is Conv2d
        and convolution.bias is None
        and norm.weight is not None
        and norm.bias is not None
        and norm.running_mean is not None
        and norm.running_var is not None
        # Both are as made; written out, which takes the host half the time of the calls.
        and "forward" not in norm.__dict__
        and "forward" not in convolution.__dict__
        and BatchNorm2d.forward is BatchNorm2d._own_forward
        and Conv2d.forward is Conv2d._own_forward
        and BatchNorm2d.__call__ is _CALL
        and Conv2d.__call__ is _CALL
    )


def _is_as_made(module: Any) -> bool:
    """Whether a call of the module computes what its class here says: nobody put a forward or a call in its place."""
    kind = type(module)
    return kind.forward is kind._own_forward and "forward" not in module.__dict__ and kind.__call__ is _CALL


def _takes_residual(forward: Callable[..., Any]) -> bool:
    """Whether a forward that somebody put into a normalisation takes what BatchNorm2d's does, not the images alone."""
    try:
        parameters = signature(forward).parameters.values()
    except ValueError:  # a function in C that does not say
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name == "residual" for p in parameters)


def _parts(shortcut: Module, beside: BatchNorm2d) -> tuple[Any, Any] | None:
    """The convolution and the normalisation that a shortcut consists of; None where it is anything else.

    None also where both normalisations move the same running figures: one after the other, not at once.
    """
    if type(shortcut) is Sequential and len(shortcut._modules) == 2 and _is_as_made(shortcut):
        convolution, norm = shortcut._modules.values()
        shares = norm is beside or norm.running_mean is beside.running_mean or norm.running_var is beside.running_var
        if _are_one_operation(convolution, norm) and not shares:
            return convolution, norm
    return None


def _branch(convolution: Any, norm: Any, x: Tensor, prefix: str) -> ops.Branch:
    """What one operation is given of a convolution, the normalisation behind it and the images."""
    return ops.Branch(
        x,
        convolution.weight,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
        norm.momentum,
        norm.eps,
        (prefix + convolution._name, prefix + norm._name),
    )


class Linear(Module):
    """x · weightᵀ + bias, [N, in] to [N, out]; weight [out, in], both drawn from U(-1/√in, 1/√in)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = Parameter(empty(out_features, in_features))
        _DRAW_WEIGHT(self.weight)
        self.register_parameter("bias", _bias(out_features, in_features) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def describe(self) -> str:
        return f"{self.weight.shape[1]} -> {self.weight.shape[0]}"


class MaxPool2d(Module):
    """The largest element of each window of images [N, C, H, W]; `stride` is the window's size where it is not given."""

    def __init__(self, kernel_size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AdaptiveAvgPool2d(Module):
    """The mean over each channel's image: [N, C, H, W] to [N, C, 1, 1]."""

    def __init__(self, output_size: int | Pair) -> None:
        super().__init__()
        if pair("output_size", output_size, least=1) != (1, 1):
            raise ValueError(f"AdaptiveAvgPool2d gives 1×1 images; {output_size} is not supported")

    def forward(self, x: Tensor) -> Tensor:
        return ops.global_avg_pool2d(x)


class ReLU(Module):
    """max(x, 0). With `inplace` it may be written over its input; it never is, which changes no result."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class Flatten(Module):
    """Joins all dimensions from `start_dim` on, those behind the batch's: [N, …] to [N, elements of one]."""

    def __init__(self, start_dim: int = 1) -> None:
        super().__init__()
        self.start_dim = start_dim

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(x, self.start_dim)


class Identity(Module):
    """Passes its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class CrossEntropyLoss(Module):
    """The mean cross-entropy of logits [N, C] against class numbers [N]."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return ops.cross_entropy(logits, target)


def _bias(size: int, fan_in: int) -> Parameter:
    bound = 1 / sqrt(fan_in) if fan_in else 0.0
    return Parameter(init.uniform_(empty(size), -bound, bound))
