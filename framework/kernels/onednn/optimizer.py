"""Optimizer updates by oneDNN: two passes over memory with every thread, and nothing allocated."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from framework.kernels.onednn import descriptors, elementwise
from framework.kernels.onednn.primitive import Attributes, Primitive
from framework.kernels.reference import optimizer as reference
from framework.kernels.table import kernel
from framework.vm.array import Array, group

_LINEAR = 38


@kernel(outputs=2)
def sgd_step(
    parameters: reference.Arrays,
    momentum_buffers: reference.Arrays | None,
    grads: reference.Arrays,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
) -> None:
    """As the reference kernel of the same name."""
    own, others = group(parameters), group(grads)
    buffers = (None,) * len(own) if momentum_buffers is None else group(momentum_buffers)
    for parameter, buffer, grad in zip(own, buffers, others, strict=True):
        row = [parameter, grad] if buffer is None else [parameter, grad, buffer]
        if elementwise.is_row(*row):
            _step(parameter, buffer, grad, lr, momentum, dampening, weight_decay, nesterov, first)
        else:
            reference.sgd_step(
                parameter, buffer, grad, lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                nesterov=nesterov, first=first,
            )  # fmt: skip


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
    if momentum_buffer is not None:
        carried = 0.0 if first else momentum
        damped = 1.0 if first else 1.0 - dampening
        if weight_decay:
            _blend(momentum_buffer, parameter, weight_decay, grad, damped, carried)
        else:
            _accumulate(momentum_buffer, grad, damped, carried)
    if momentum_buffer is None or nesterov:
        if weight_decay:
            _accumulate(parameter, parameter, 1.0 - lr * weight_decay, 0.0)
        _accumulate(parameter, grad, -lr, 1.0)
    if momentum_buffer is not None:
        _accumulate(parameter, momentum_buffer, -lr * momentum if nesterov else -lr, 1.0)


def _accumulate(total: Array, a: Array, scale: float, carried: float) -> None:
    """total = scale · a + carried · total."""
    factor = ctypes.c_float(scale)
    _scaled_sum(total.size, carried)(a.ptr, ctypes.addressof(factor), total.ptr)


def _blend(total: Array, a: Array, scale: float, b: Array, damped: float, carried: float) -> None:
    """total = damped · (scale · a + b) + carried · total."""
    factor = ctypes.c_float(scale)
    _blended_sum(total.size, damped, carried)(a.ptr, ctypes.addressof(factor), total.ptr, b.ptr)


# `scale` is an operand, since a learning rate changes often; `carried` and `damped` are compiled in, since they do not.


@lru_cache(maxsize=512)
def _scaled_sum(size: int, carried: float) -> Primitive:
    attributes = Attributes()
    if carried:
        attributes.then_sum(carried)
    return elementwise.scaled(size, attributes)


@lru_cache(maxsize=512)
def _blended_sum(size: int, damped: float, carried: float) -> Primitive:
    row = descriptors.vector(size)
    attributes = Attributes().then_binary(elementwise.ADD, row)
    if damped != 1:
        attributes.then_eltwise(_LINEAR, damped, 0.0)
    if carried:
        attributes.then_sum(carried)
    return elementwise.scaled(size, attributes, [row])
