"""Layers as functions, under the names they have in PyTorch."""

from framework.ops import (
    batch_norm,
    conv2d,
    cross_entropy,
    flatten,
    global_avg_pool2d,
    linear,
    max_pool2d,
    relu,
)

__all__ = [
    "batch_norm",
    "conv2d",
    "cross_entropy",
    "flatten",
    "global_avg_pool2d",
    "linear",
    "max_pool2d",
    "relu",
]
