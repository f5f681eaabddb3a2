"""Convolutions by oneDNN.

Activations stay NHWC as they are. Weights are brought into the layout that oneDNN's kernels want at each call, in scratch
memory: that costs a few hundredths of the convolution, while kept copies would cost training a second set of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from framework.kernels.onednn import descriptors, patches
from framework.kernels.onednn.descriptors import Descriptor, dimensions
from framework.kernels.onednn.library import library
from framework.kernels.onednn.primitive import (
    BIAS,
    DIFF_BIAS,
    DIFF_DST,
    DIFF_SRC,
    DIFF_WEIGHTS,
    DST,
    SRC,
    WEIGHTS,
    Computation,
    Description,
    Operand,
    describe,
)
from framework.kernels.reference import convolution as reference
from framework.kernels.table import kernel
from framework.vm.array import Array

Pair = tuple[int, int]
Shape = tuple[int, ...]
# What makes a convolution another one: stride, padding, dilation, groups.
Geometry = patches.Geometry

_FORWARD_TRAINING = 64
_DIRECT = 1


@kernel(outputs=1)
def conv2d(
    y: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """As the reference kernel of the same name."""
    if descriptors.servable(y, x, weight, bias):
        geometry = (stride, padding, dilation, groups)
        run = None
        if not patches.are_faster("forward", weight.shape, y.shape, geometry):
            run = _forward(_layout(y), _layout(x), _layout(weight), bias is not None, geometry)
        if run is not None and (bias is None or bias.is_contiguous):
            addresses = (y.ptr, x.ptr, weight.ptr)
            run(*addresses) if bias is None else run(*addresses, bias.ptr)
            return
        if patches.serves(x.shape, weight.shape, y.shape, geometry):
            patches.conv2d(y, x, weight, bias, geometry)
            return
    reference.conv2d(y, x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


@kernel(outputs=1)
def conv2d_backward_input(
    grad_x: Array,
    grad_y: Array,
    weight: Array,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """As the reference kernel of the same name."""
    if descriptors.servable(grad_x, grad_y, weight):
        geometry = (stride, padding, dilation, groups)
        run = None
        if not patches.are_faster("backward_input", weight.shape, grad_y.shape, geometry):
            run = _backward_input(_layout(grad_x), _layout(grad_y), _layout(weight), geometry)
        if run is not None:
            run(grad_x.ptr, grad_y.ptr, weight.ptr)
            return
        if patches.serves(grad_x.shape, weight.shape, grad_y.shape, geometry):
            patches.conv2d_backward_input(grad_x, grad_y, weight, geometry)
            return
    reference.conv2d_backward_input(
        grad_x, grad_y, weight, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


@kernel(outputs=2)
def conv2d_backward_weight(
    grad_weight: Array,
    grad_bias: Array | None,
    grad_y: Array,
    x: Array,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> None:
    """As the reference kernel of the same name."""
    if descriptors.servable(grad_weight, grad_bias, grad_y, x):
        geometry = (stride, padding, dilation, groups)
        run = None
        if not patches.are_faster("backward_weight", grad_weight.shape, grad_y.shape, geometry):
            run = _backward_weight(_layout(grad_weight), grad_bias is not None, _layout(grad_y), _layout(x), geometry)
        if run is not None and (grad_bias is None or grad_bias.is_contiguous):
            addresses = (grad_weight.ptr, grad_y.ptr, x.ptr)
            run(*addresses) if grad_bias is None else run(*addresses, grad_bias.ptr)
            return
        if patches.serves(x.shape, grad_weight.shape, grad_y.shape, geometry):
            patches.conv2d_backward_weight(grad_weight, grad_bias, grad_y, x, geometry)
            return
    reference.conv2d_backward_weight(
        grad_weight, grad_bias, grad_y, x, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


Layout = tuple[Shape, Shape]


def _layout(array: Array) -> Layout:
    return array.shape, array.stride


@lru_cache(maxsize=512)
def _forward(y: Layout, x: Layout, weight: Layout, has_bias: bool, geometry: Geometry) -> Computation | None:
    source, target = _layouts(x[0], y[0], geometry)
    bias = weight[0][0] if has_bias else None
    description = _describe_forward(source, target, _free_weight(weight[0], geometry), bias, geometry)
    if description is None or description.is_reference:
        return None
    operands = [
        Operand(DST, descriptors.activation(*y), is_output=True),
        Operand(SRC, descriptors.activation(*x)),
        Operand(WEIGHTS, _weight(weight, geometry)),
    ]
    if has_bias:
        operands.append(Operand(BIAS, descriptors.vector(weight[0][0])))
    return Computation(description, operands)


@lru_cache(maxsize=512)
def _backward_input(grad_x: Layout, grad_y: Layout, weight: Layout, geometry: Geometry) -> Computation | None:
    source, target = _layouts(grad_x[0], grad_y[0], geometry)
    hint = _describe_forward(source, target, _free_weight(weight[0], geometry), None, geometry)
    if hint is None:
        return None
    description = _first_compiled(
        describe(
            "convolution_backward_data",
            library().engine,
            _DIRECT,
            source,
            layout,
            target,
            *_steps(geometry),
            hint.handle,
        )
        for layout in _backward_weights(weight[0], grad_y[0], geometry)
    )
    if description is None:
        return None
    operands = [
        Operand(DIFF_SRC, descriptors.activation(*grad_x), is_output=True),
        Operand(DIFF_DST, descriptors.activation(*grad_y)),
        Operand(WEIGHTS, _weight(weight, geometry)),
    ]
    return Computation(description, operands)


@lru_cache(maxsize=512)
def _backward_weight(
    grad_weight: Layout, has_bias: bool, grad_y: Layout, x: Layout, geometry: Geometry
) -> Computation | None:
    if _overruns(x[0], grad_weight[0], geometry):
        return None
    source, target = _layouts_for_weight_gradient(x[0], grad_y[0], grad_weight[0], geometry)
    bias = grad_weight[0][0] if has_bias else None
    hint = _describe_forward(source, target, _free_weight(grad_weight[0], geometry), bias, geometry)
    if hint is None:
        return None
    description = describe(
        "convolution_backward_weights",
        library().engine,
        _DIRECT,
        source,
        _free_weight(grad_weight[0], geometry),
        descriptors.vector(grad_weight[0][0]) if has_bias else None,
        target,
        *_steps(geometry),
        hint.handle,
    )
    if description is None or description.is_reference:
        return None
    operands = [
        Operand(DIFF_WEIGHTS, _weight(grad_weight, geometry), is_output=True),
        Operand(DIFF_DST, descriptors.activation(*grad_y)),
        Operand(SRC, descriptors.activation(*x)),
    ]
    if has_bias:
        operands.append(Operand(DIFF_BIAS, descriptors.vector(grad_weight[0][0]), is_output=True))
    return Computation(description, operands)


def _overruns(x: Shape, weight: Shape, geometry: Geometry) -> bool:
    """Whether oneDNN 3.2 would write behind its scratch memory: what lies there changes, or the process ends.

    For a 1×1 kernel under a stride it first gathers the pixels that are met, in whole blocks of 8 or 16 channels, into room for
    the channels that there are.
    """
    return weight[2:] == (1, 1) and geometry[0] != (1, 1) and x[1] % 16 != 0


def _layouts(x: Shape, y: Shape, geometry: Geometry) -> tuple[Descriptor, Descriptor]:
    """The layouts of x and y, or of their gradients, in which one is best made of the other.

    With AVX-512, small images are brought into blocks of 16 channels: oneDNN's kernel for these is, copies and all, 0.8 to 2.0
    times as fast by the shape (over those of ResNet50 1.22 times for one image, 1.03 times for four), and adds up block by
    block, which is as exact or up to five times as exact.
    """
    if library().has_avx512 and geometry[3] == 1 and y[2] * y[3] <= 14 * 14 and x[1] % 16 == y[1] % 16 == 0:
        return descriptors.blocked_channels(x, 16), descriptors.blocked_channels(y, 16)
    return descriptors.channels_last(x), descriptors.channels_last(y)


def _layouts_for_weight_gradient(
    x: Shape, grad_y: Shape, weight: Shape, geometry: Geometry
) -> tuple[Descriptor, Descriptor]:
    """The layouts of x and grad_y in which their product is fastest.

    With AVX2 oneDNN's kernel for blocks of 8 channels is up to 1.7 times as fast as the one for NHWC, which pays for bringing
    both there. Not so for large images under a 1×1 kernel: there the copies cost more than they save. With AVX-512 the one for
    NHWC is as fast as the one for blocks of 16, and twice as fast as the one for blocks of 8, which has no such code.
    """
    stride, _, _, groups = geometry
    is_large = grad_y[2] * grad_y[3] >= 28 * 28
    if library().has_avx512 or groups > 1 or grad_y[1] % 8 or (weight[2:] == (1, 1) and stride == (1, 1) and is_large):
        return descriptors.channels_last(x), descriptors.channels_last(grad_y)
    # An image of few channels is read in the layout that the kernel for first layers asks for.
    source = descriptors.free(x) if x[1] % 8 else descriptors.blocked_channels(x, 8)
    return source, descriptors.blocked_channels(grad_y, 8)


def _backward_weights(weight: Shape, grad_y: Shape, geometry: Geometry) -> list[Descriptor]:
    """The layouts of the weights to try in turn: with AVX2, blocks of 8×8 are faster than oneDNN's choice for some shapes.

    Those are 1×1 kernels under a stride, and the smallest images. (Forward they would be faster for 1×1 kernels too, but they
    add up in an order that is less exact.)
    """
    free = _free_weight(weight, geometry)
    stride, _, _, groups = geometry
    is_strided_pointwise = weight[2:] == (1, 1) and stride != (1, 1)
    is_small = weight[2:] != (1, 1) and stride == (1, 1) and grad_y[2] * grad_y[3] <= 7 * 7
    return (
        [descriptors.blocked_weights_transposed(weight), free]
        if not library().has_avx512 and groups == 1 and (is_strided_pointwise or is_small)
        else [free]
    )


def _first_compiled(descriptions: Iterable[Description | None]) -> Description | None:
    """The first that exists and is compiled code."""
    return next((found for found in descriptions if found is not None and not found.is_reference), None)


def _describe_forward(
    source: Descriptor, target: Descriptor, weight: Descriptor, bias: int | None, geometry: Geometry
) -> Description | None:
    return describe(
        "convolution_forward",
        library().engine,
        _FORWARD_TRAINING,
        _DIRECT,
        source,
        weight,
        None if bias is None else descriptors.vector(bias),
        target,
        *_steps(geometry),
    )


def _steps(geometry: Geometry) -> list:
    stride, padding, dilation, _ = geometry
    # oneDNN counts the gaps between the kernel's elements, so that 0 is no dilation.
    gaps = (dilation[0] - 1, dilation[1] - 1)
    return [dimensions(stride), dimensions(gaps), dimensions(padding), dimensions(padding)]


def _weight(layout: Layout, geometry: Geometry) -> Descriptor:
    shape, stride = layout
    groups = geometry[3]
    if groups == 1:
        return descriptors.strided(shape, stride)
    per_group = shape[0] // groups
    return descriptors.strided((groups, per_group, *shape[1:]), (per_group * stride[0], *stride))


def _free_weight(shape: Shape, geometry: Geometry) -> Descriptor:
    groups = geometry[3]
    return descriptors.free(shape if groups == 1 else (groups, shape[0] // groups, *shape[1:]))
