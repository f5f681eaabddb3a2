"""Kernels of the CPU by oneDNN, where it is installed: those that a network spends its time in."""

from __future__ import annotations

from functools import lru_cache

from framework.kernels.onednn.library import available, get_num_threads, set_num_threads, why
from framework.kernels.table import Table

__all__ = ["available", "get_num_threads", "set_num_threads", "table", "why"]


@lru_cache(maxsize=1)
def table(reference: Table) -> Table:
    """`reference` with oneDNN's kernels in place of its own. Only where oneDNN is `available()`."""
    from framework.kernels.onednn import convolution, elementwise, matmul, normalization, optimizer, pooling

    modules = (convolution, elementwise, matmul, normalization, optimizer, pooling)
    overrides = {
        name: function for module in modules for name, function in vars(module).items() if hasattr(function, "outputs")
    }
    return Table(
        "onednn",
        {**reference.kernels, **overrides},
        batch_norm_mask_bytes=normalization.batch_norm_mask_bytes,
        max_pool2d_indices=pooling.max_pool2d_indices,
    )
