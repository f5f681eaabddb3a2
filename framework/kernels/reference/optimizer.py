"""Optimizer updates, in place."""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array, group

Arrays = Array | tuple[Array, ...]


@kernel(outputs=2)
def sgd_step(
    parameters: Arrays,
    momentum_buffers: Arrays | None,
    grads: Arrays,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    """One step of stochastic gradient descent, as PyTorch defines it, for one parameter or for many.

    g = grad + weight_decay · parameter; buffer = g at the `first` step, later momentum · buffer + (1 - dampening) · g;
    parameter -= lr · (g + momentum · buffer with Nesterov, else buffer). Without a buffer, parameter -= lr · g.
    """
    own, others = group(parameters), group(grads)
    buffers = (None,) * len(own) if momentum_buffers is None else group(momentum_buffers)
    for parameter, buffer, grad in zip(own, buffers, others, strict=True):
        _step(parameter, buffer, grad, lr, momentum, dampening, weight_decay, nesterov, first)


def _step(
    parameter: Array,
    momentum_buffer: Array | None,
    grad: Array,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    update = grad.ndarray
    if weight_decay:
        update = update + weight_decay * parameter.ndarray
    if momentum_buffer is not None:
        buffer = momentum_buffer.ndarray
        if first:
            np.copyto(buffer, update)
        else:
            buffer *= momentum
            buffer += (1 - dampening) * update if dampening else update
        update = update + momentum * buffer if nesterov else buffer
    np.subtract(parameter.ndarray, lr * update, out=parameter.ndarray)
