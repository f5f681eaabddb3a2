"""Softmax cross-entropy in CUDA C++.

The host cannot look at the targets without waiting for the device. A target that is no class therefore makes the loss
NaN, and its row's gradient with it, and leaves a note on the device; `raise_for_bad_target` waits and reads it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

from framework.device import Device
from framework.dtype import DType, int64
from framework.kernels.cuda import compiler, elementwise, launch
from framework.kernels.cuda.geometry import Shape
from framework.kernels.table import kernel
from framework.vm import cuda, launch_groups
from framework.vm.array import Array

# The note lies in the last of the counters, which no other kernel uses.
_NOTE_OFFSET = launch.COUNTER_BYTES - 8
_TO_HOST = 2  # cudaMemcpyDeviceToHost


class BadTargetError(ValueError):
    """A target was no class."""


@kernel(outputs=2)
def cross_entropy(loss: Array, probabilities: Array, logits: Array, target: Array) -> None:
    """As the reference kernel of the same name, but for targets that are no class: see above."""
    device = logits.storage.device
    rows = logits.shape[0]
    if rows == 0:
        elementwise.fill(loss, value=float("nan"))
        return
    run = _plan(device, "cross_entropy", logits.dtype, logits.shape, logits.stride, probabilities.stride,
                target.stride, target.dtype)  # fmt: skip
    on = launch.stream(device)
    counters = launch.workspace(device, on, 8 * rows)
    run(on, loss.ptr, probabilities.ptr, logits.ptr, target.ptr, counters + launch.COUNTER_BYTES, counters,
        counters + _NOTE_OFFSET)  # fmt: skip


@kernel(outputs=1)
def cross_entropy_backward(grad_logits: Array, grad_loss: Array, probabilities: Array, target: Array) -> None:
    """As the reference kernel of the same name."""
    if grad_logits.size == 0:
        return
    device = grad_logits.storage.device
    run = _plan(device, "cross_entropy_backward", grad_logits.dtype, probabilities.shape, probabilities.stride,
                grad_logits.stride, target.stride, target.dtype)  # fmt: skip
    run(launch.stream(device), grad_logits.ptr, grad_loss.ptr, probabilities.ptr, target.ptr)


def raise_for_bad_target(device: Device) -> None:
    """Waits for the device. Raises BadTargetError where cross_entropy met a target that is no class, and forgets it."""
    note = ctypes.c_int64()
    for on, room in launch.workspaces(device):
        where = room + _NOTE_OFFSET
        launch_groups.flush(on)
        cuda.api().memcpyAsync(ctypes.addressof(note), where, 8, _TO_HOST, on)
        cuda.api().streamSynchronize(on)
        if note.value:
            cuda.api().memsetAsync(where, 0, 8, on)
            target = note.value - 1 if note.value > 0 else note.value
            raise BadTargetError(
                f"cross_entropy: targets must lie in [0, C), C being the number of classes; got {target}, which made"
                " the loss NaN"
            )


@lru_cache(maxsize=1024)
def _plan(
    device: Device,
    name: str,
    dtype: DType,
    shape: Shape,
    stride: Shape,
    out_stride: Shape,
    target_stride: Shape,
    target: DType,
) -> Callable[..., None]:
    is_forward = name == "cross_entropy"
    grid = shape[0] if is_forward else launch.blocks(device, shape[0] * shape[1])
    return launch.prepare(
        compiler.function(device, "loss.cu", name, TYPE=compiler.cxx(dtype)),
        (grid, 1),
        "7Q" if is_forward else "4Q",
        "8q",
        (*shape, *stride, *out_stride, *target_stride, int(target is int64)),
    )
