"""Batch normalisation over the images of all ranks together."""

from __future__ import annotations

from typing import cast

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.distributed import collectives
from framework.distributed.groups import Group
from framework.dtype import float32
from framework.ops import add, divide, multiply, reshape, sqrt, subtract
from framework.ops import sum as sum_of
from framework.ops.checks import check_floats, check_images
from framework.ops.inplace import add_, mul_
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime


class SyncBatchNorm(Operation):
    """Ranks gather their means, variances and counts forward, and add up two sums per channel backward."""

    name = "sync_batch_norm"

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
        *,
        eps: float,
        momentum: float,
        group: Group,
    ) -> Array:
        y = kernels.empty_like(x)
        count, mean, variance = _gathered(kernels, x, y, eps, group)
        kernels.batch_norm_eval(
            y, None, x, weight, bias, mean.array, variance.array, None, eps=eps, relu=False
        )  # fmt: skip
        unbiased = multiply(variance, divide(count, subtract(count, 1)))
        for running, new in ((running_mean, mean), (running_var, unbiased)):
            if running is not None:
                mul_(Tensor(running), 1 - momentum)
                add_(Tensor(running), multiply(new, momentum))
        node.save(x, mean.array, divide(1, sqrt(add(variance, eps))).array, weight)
        node.note = (group, count)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, mean, inv_std = cast("tuple[Array, ...]", node.saved[:3])
        weight = node.saved[3]
        group, count = node.note
        channels = x.shape[1]
        own = kernels.empty((2, channels), mean.dtype)
        grad_weight, grad_bias = (own.view((channels,), (1,), start) for start in (0, channels))
        kernels.batch_norm_backward(
            None, grad_weight, grad_bias, None, grad_y, x, weight, mean, inv_std, None, None, relu=False
        )  # fmt: skip
        grad_x = None
        if node.needs[0]:
            sums = kernels.empty_like(own)
            kernels.copy(sums, own)
            collectives.all_reduce(Tensor(sums), "sum", group)
            slope, shift = (
                _per_channel(divide(Tensor(sums.view((channels,), (1,), start)), count)) for start in (0, channels)
            )
            scale, middle = _per_channel(Tensor(inv_std)), _per_channel(Tensor(mean))
            # As Ioffe and Szegedy, 2015, with the two means over all ranks' images.
            off = multiply(subtract(Tensor(x), middle), multiply(scale, slope))
            inner = subtract(subtract(Tensor(grad_y), shift), off)
            steepness = scale if weight is None else multiply(scale, _per_channel(Tensor(weight)))
            grad_x = multiply(inner, steepness).array
        needs = node.needs
        return grad_x, grad_weight if needs[1] else None, grad_bias if needs[2] else None, None, None


def sync_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
    group: Group,
) -> Tensor:
    """As `batch_norm` in training, with mean and variance over the images of all ranks of the group.

    Ranks may have different numbers of images. Raises ValueError where all together have fewer than two values per channel.
    """
    check_images("sync_batch_norm", x)
    check_floats("sync_batch_norm", x)
    for held in (weight, bias, running_mean, running_var):
        if held is not None and held.shape != x.shape[1:2]:
            raise ValueError(f"sync_batch_norm over {held.shape[0]} channels got images of shape {list(x.shape)}")
    result: Tensor = apply(
        SyncBatchNorm, x, weight, bias, running_mean, running_var,
        eps=float(eps), momentum=float(momentum), group=group,
    )  # fmt: skip
    return result


def _gathered(kernels: Runtime, x: Array, room: Array, eps: float, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """How many values per channel all ranks have, their mean and their biased variance; `room` is written over."""
    channels = x.shape[1]
    dtype = x.dtype if x.dtype.itemsize >= 4 else float32
    own = kernels.full((2 * channels + 1,), 0.0, dtype)
    mean, variance = (own.view((channels,), (1,), start) for start in (0, channels))
    unused = kernels.empty((2, channels), dtype)
    # Running figures that move all the way are the batch's own.
    kernels.batch_norm_train(
        room, unused.view((channels,), (1,)), unused.view((channels,), (1,), channels), None, mean, variance,
        x, None, None, None, eps=eps, momentum=1.0, relu=False,
    )  # fmt: skip
    count = x.shape[0] * x.shape[2] * x.shape[3]
    kernels.fill(own.view((1,), (1,), 2 * channels), value=count)
    gathered = kernels.empty((group.size, 2 * channels + 1), dtype)
    collectives.all_gather(Tensor(gathered), Tensor(own), group)
    means, variances, counts = (
        Tensor(gathered.view((group.size, width), gathered.stride, start))
        for start, width in ((0, channels), (channels, channels), (2 * channels, 1))
    )
    total = sum_of(counts)
    mean_of_all = divide(sum_of(multiply(means, counts), 0), total)
    off = subtract(means, mean_of_all)
    # The kernel's running variance is the unbiased one: of n values it is n / (n - 1) times theirs.
    spread = add(multiply(variances, subtract(counts, 1)), multiply(multiply(off, off), counts))
    return total, mean_of_all, divide(sum_of(spread, 0), total)


def _per_channel(values: Tensor) -> Tensor:
    return reshape(values, (1, values.shape[0], 1, 1))
