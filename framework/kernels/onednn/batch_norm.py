"""oneDNN's own batch normalisation: its primitives, made once for each shape.

Forward they are given the statistics: finding them, oneDNN's kernel would halt all its threads several times, spinning until
the last has come, which costs a busy machine a scheduler's slice each time.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

from framework.kernels.onednn import descriptors
from framework.kernels.onednn.library import library
from framework.kernels.onednn.primitive import (
    DIFF_DST,
    DIFF_SCALE,
    DIFF_SHIFT,
    DIFF_SRC,
    DST,
    MEAN,
    SCALE,
    SHIFT,
    SRC,
    VARIANCE,
    WORKSPACE,
    Description,
    Primitive,
    describe,
)

USE_GIVEN_STATISTICS, USE_SCALE, USE_SHIFT, FUSE_RELU = 1, 2, 4, 8
_FORWARD_TRAINING = 64
_BACKWARD = 128


@lru_cache(maxsize=512)
def forward(shape: tuple[int, ...], flags: int, eps: float) -> Primitive:
    layout, channels = descriptors.channels_last(shape), descriptors.vector(shape[1])
    description = _describe_forward(shape, flags, eps)
    operands = [(SRC, layout), (DST, layout), (MEAN, channels), (VARIANCE, channels)]
    if flags & USE_SCALE:
        operands.append((SCALE, channels))
    if flags & USE_SHIFT:
        operands.append((SHIFT, channels))
    if flags & FUSE_RELU:
        operands.append((WORKSPACE, description.layout(WORKSPACE)))
    return Primitive(description, operands)


@lru_cache(maxsize=512)
def backward(shape: tuple[int, ...], flags: int, eps: float) -> Primitive:
    layout, channels = descriptors.channels_last(shape), descriptors.vector(shape[1])
    hint = _describe_forward(shape, flags, eps)
    description = describe(
        "batch_normalization_backward",
        library().engine,
        _BACKWARD,
        layout,
        layout,
        layout,
        ctypes.c_float(eps),
        flags,
        hint.handle,
    )
    if description is None:
        raise NotImplementedError(f"oneDNN has no backward batch normalisation for {shape}")
    operands = [
        (SRC, layout),
        (DIFF_SRC, layout),
        (DIFF_DST, layout),
        (MEAN, channels),
        (VARIANCE, channels),
        (SCALE, channels),
        (DIFF_SCALE, channels),
        (DIFF_SHIFT, channels),
    ]
    if flags & FUSE_RELU:
        operands.append((WORKSPACE, description.layout(WORKSPACE)))
    return Primitive(description, operands)


def _describe_forward(shape: tuple[int, ...], flags: int, eps: float) -> Description:
    layout = descriptors.channels_last(shape)
    description = describe(
        "batch_normalization_forward",
        library().engine,
        _FORWARD_TRAINING,
        layout,
        layout,
        ctypes.c_float(eps),
        flags,
    )
    if description is None:
        raise NotImplementedError(f"oneDNN has no batch normalisation for {shape}")
    return description
