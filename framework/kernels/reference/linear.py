"""Matrix products."""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array


@kernel(outputs=1)
def matmul(c: Array, a: Array, b: Array) -> None:
    """c = a @ b: [..., M, K] times [..., K, N], the leading dimensions broadcast."""
    np.matmul(a.ndarray, b.ndarray, out=c.ndarray)


@kernel(outputs=1)
def linear(y: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """y = x · weightᵀ + bias, with x [N, I], weight [O, I], bias [O]."""
    np.matmul(x.ndarray, weight.ndarray.T, out=y.ndarray)
    if bias is not None:
        np.add(y.ndarray, bias.ndarray, out=y.ndarray)


@kernel(outputs=3)
def linear_backward(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_y: Array,
    x: Array | None,
    weight: Array | None,
) -> None:
    """grad_x = grad_y · weight, grad_weight = grad_yᵀ · x, grad_bias = Σ_n grad_y. What none of these needs may be left out."""
    if grad_x is not None:
        np.matmul(grad_y.ndarray, weight.ndarray, out=grad_x.ndarray)
    if grad_weight is not None:
        np.matmul(grad_y.ndarray.T, x.ndarray, out=grad_weight.ndarray)
    if grad_bias is not None:
        grad_bias.ndarray[...] = np.sum(grad_y.ndarray, axis=0, dtype=np.float64)
