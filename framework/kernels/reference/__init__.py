"""The reference kernels, in NumPy: the specification that the kernels of every device are tested against."""

from __future__ import annotations

from framework.kernels.reference import (
    convolution,
    elementwise,
    linear,
    loss,
    normalization,
    normalization_sum,
    optimizer,
    pooling,
    random,
    reduction,
)
from framework.kernels.table import Table

_MODULES = (
    convolution,
    elementwise,
    linear,
    loss,
    normalization,
    normalization_sum,
    optimizer,
    pooling,
    random,
    reduction,
)

TABLE = Table(
    "reference",
    {name: function for module in _MODULES for name, function in vars(module).items() if hasattr(function, "outputs")},
    batch_norm_mask_bytes=normalization.batch_norm_mask_bytes,
    max_pool2d_indices=pooling.max_pool2d_indices,
)
