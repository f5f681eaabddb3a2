"""Neural network layers and what holds them together."""

from framework.nn import functional, init, parallel
from framework.nn.containers import ModuleList, Sequential
from framework.nn.layers import (
    AdaptiveAvgPool2d,
    BatchNorm2d,
    Conv2d,
    CrossEntropyLoss,
    Flatten,
    Identity,
    Linear,
    MaxPool2d,
    ReLU,
)
from framework.nn.module import Module
from framework.nn.parameter import Parameter
from framework.nn.sync_batch_norm import SyncBatchNorm

__all__ = [
    "AdaptiveAvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Flatten",
    "Identity",
    "Linear",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "Parameter",
    "ReLU",
    "Sequential",
    "SyncBatchNorm",
    "functional",
    "init",
    "parallel",
]
