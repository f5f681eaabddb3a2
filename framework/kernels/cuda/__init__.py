"""Kernels of CUDA devices: cuDNN and cuBLASLt for convolutions, cuBLASLt for matrix products, own CUDA C++ for the rest."""

from __future__ import annotations

from functools import lru_cache

from framework.kernels.table import Table

__all__ = ["table"]


@lru_cache(maxsize=1)
def table() -> Table:
    """The table of every CUDA device. A name that is missing here is missing there: nothing runs on the host instead."""
    from framework.kernels.cuda import (
        convolution,
        elementwise,
        linear,
        loss,
        normalization,
        normalization_backward,
        normalization_sum,
        optimizer,
        pooling,
        random,
        reduction,
    )

    modules = (
        convolution, elementwise, linear, loss, normalization, normalization_backward, normalization_sum, optimizer,
        pooling, random, reduction,
    )  # fmt: skip
    return Table(
        "cuda",
        {
            name: function
            for module in modules
            for name, function in vars(module).items()
            if hasattr(function, "outputs")
        },
        batch_norm_mask_bytes=normalization.batch_norm_mask_bytes,
        max_pool2d_indices=pooling.max_pool2d_indices,
        batch_norm_remakes=normalization.batch_norm_remakes,
    )
