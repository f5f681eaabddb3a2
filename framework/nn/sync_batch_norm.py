"""SyncBatchNorm: batch normalisation whose batch is that of all ranks together."""

from __future__ import annotations

from framework import distributed, ops
from framework.distributed.batch_norm import sync_batch_norm
from framework.distributed.world import world
from framework.nn.layers import BatchNorm2d
from framework.nn.module import Module
from framework.tensor import Tensor
from framework.words import kind_of


class SyncBatchNorm(BatchNorm2d):
    """As BatchNorm2d, but in training mean and variance are over the images of all ranks of a group.

    Every rank runs it in the same step. Outside training, or where there is only one rank, it is a BatchNorm2d.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: distributed.Group | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group

    def forward(self, x: Tensor, *, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        group = self._group() if self.training else None
        if group is None or group.size == 1:
            return super().forward(x, residual=residual, relu=relu)
        y = sync_batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            momentum=self.momentum,
            eps=self.eps,
            group=group,
        )
        self._count()
        if residual is not None:
            y = ops.add(y, residual)
        return ops.relu(y) if relu else y

    _own_forward = forward

    @staticmethod
    def convert_sync_batchnorm(module: Module, process_group: distributed.Group | None = None) -> Module:
        """The module with a SyncBatchNorm in place of each BatchNorm2d in it, with the same parameters and buffers."""
        if not isinstance(module, Module):
            raise TypeError(f"convert_sync_batchnorm takes a Module; got {kind_of(module)}")
        if type(module) is BatchNorm2d:
            return _converted(module, process_group)
        for name, child in list(module._modules.items()):
            setattr(module, name, SyncBatchNorm.convert_sync_batchnorm(child, process_group))
        return module

    def _group(self) -> distributed.Group | None:
        if self.process_group is not None:
            return self.process_group
        return world().everyone if distributed.is_initialized() else None


def _converted(norm: BatchNorm2d, process_group: distributed.Group | None) -> SyncBatchNorm:
    made = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, process_group=process_group)
    made.weight, made.bias = norm.weight, norm.bias
    for name, buffer in norm._buffers.items():
        made.register_buffer(name, buffer)
    made.training = norm.training
    return made
