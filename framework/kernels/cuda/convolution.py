"""Two-dimensional convolution through cuDNN, some gradients through cuBLASLt; shapes and meanings as in the reference.

Operands that lie NHWC go to the library as they are; others are copied first. What a call needs is prepared once for each
set of shapes, strides and settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from framework import backends
from framework.device import Device
from framework.kernels.cuda import elementwise, plans, reduction, space_to_depth
from framework.kernels.cuda.plan import Plan
from framework.kernels.cuda.problem import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Problem, current_settings
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, Layout, channels_last_stride

Pair = tuple[int, int]


class Geometry(NamedTuple):
    """The attributes of a convolution."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


def _prepare_forward(
    device: Device, y: Layout, x: Layout, weight: Layout, bias: Layout | None, **attributes: Any
) -> Callable[..., None]:
    run = _prepare(FORWARD, device, x, weight, y, Geometry(**attributes))

    def forward(y: Array, x: Array, weight: Array, bias: Array | None) -> None:
        run(x, weight, y)
        if bias is not None:
            elementwise.add(y, y, bias.view((1, bias.shape[0], 1, 1), (0, bias.stride[0], 0, 0)))

    return forward


def _prepare_backward_input(
    device: Device, grad_x: Layout, grad_y: Layout, weight: Layout, **attributes: Any
) -> Callable[..., None]:
    run = _prepare(BACKWARD_INPUT, device, grad_x, weight, grad_y, Geometry(**attributes))

    def backward_input(grad_x: Array, grad_y: Array, weight: Array) -> None:
        run(grad_x, weight, grad_y)

    return backward_input


def _prepare_backward_weight(
    device: Device, grad_weight: Layout, grad_bias: Layout | None, grad_y: Layout, x: Layout, **attributes: Any
) -> Callable[..., None]:
    run = _prepare(BACKWARD_WEIGHT, device, x, grad_weight, grad_y, Geometry(**attributes))

    def backward_weight(grad_weight: Array, grad_bias: Array | None, grad_y: Array, x: Array) -> None:
        run(x, grad_weight, grad_y)
        if grad_bias is not None:
            reduction.sum(grad_bias, grad_y, axes=(0, 2, 3), keepdims=False)

    return backward_weight


@kernel(outputs=1, prepare=_prepare_forward)
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
    """y = x convolved with weight, plus bias."""
    run = _prepare_forward(
        x.storage.device, y.layout, x.layout, weight.layout, None if bias is None else bias.layout,
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    run(y, x, weight, bias)


@kernel(outputs=1, prepare=_prepare_backward_input)
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
    """grad_x: the gradient of conv2d's input, its transpose applied to grad_y."""
    _run(BACKWARD_INPUT, grad_x, weight, grad_y, Geometry(stride, padding, dilation, groups))


@kernel(outputs=2, prepare=_prepare_backward_weight)
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
    """Gradients of conv2d's weight and bias."""
    run = _prepare_backward_weight(
        x.storage.device, grad_weight.layout, None if grad_bias is None else grad_bias.layout, grad_y.layout, x.layout,
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip
    run(grad_weight, grad_bias, grad_y, x)


# What is run under some settings where it takes the operands as they lie, and the choice for operands that all lie NHWC.
_direct: dict[tuple, dict[tuple, Plan]] = {}
_choices: dict[tuple, plans.Choice] = {}


def forget() -> None:
    """Lets every convolution be as it is met first, but for the choice of its algorithm."""
    for known in _direct.values():
        known.clear()


def _prepare(
    kind: str, device: Device, x: Layout, weight: Layout, y: Layout, geometry: Geometry
) -> Callable[[Array, Array, Array], None]:
    """What runs a convolution of one kind on x, weight and y of these layouts; which is the output depends on the kind."""
    settings = backends.cudnn
    direct = _direct.setdefault((kind, device, x, weight, y, geometry), {})

    def run(x: Array, weight: Array, y: Array) -> None:
        key = (settings.allow_tf32, settings.workspace_bytes, settings.timed_plans, backends.deterministic)
        plan = direct.get(key)
        at_x, at_weight, at_y = x.ptr, weight.ptr, y.ptr
        if plan is not None and not (at_x | at_weight | at_y) & 15:
            plan.run(at_x, at_weight, at_y)
            return
        plan = _run_slowly(kind, x, weight, y, geometry)
        if plan is not None:
            direct[key] = plan

    return run


def _run(kind: str, x: Array, weight: Array, y: Array, geometry: Geometry) -> None:
    _prepare(kind, x.storage.device, x.layout, weight.layout, y.layout, geometry)(x, weight, y)


def _run_slowly(kind: str, x: Array, weight: Array, y: Array, geometry: Geometry) -> Plan | None:
    """Everything but the usual case: the first call, empty operands, other layouts, and a batch cut into pieces.

    Returns the plan that is enough from now on, where one is.
    """
    output = {FORWARD: y, BACKWARD_INPUT: x, BACKWARD_WEIGHT: weight}[kind]
    if 0 in (x.size, weight.size, y.size):
        if output.size:
            elementwise.fill(output, value=0)
        return None
    if kind != BACKWARD_INPUT and space_to_depth.applies(x, weight, geometry):
        _run_folded(kind, x, weight, y, geometry)
        return None
    given = (x, weight, y)
    used_x, used_weight, used_y = (
        array if _fits(array) else _nhwc_copy(array, filled=array is not output) for array in given
    )
    choice = _run_dense(kind, used_x, used_weight, used_y, geometry)
    copied = [
        (array, used) for array, used in zip(given, (used_x, used_weight, used_y), strict=True) if used is not array
    ]
    for array, used in copied:
        if array is output:
            elementwise.copy(array, used)
    if copied or choice.pieces > 1:
        return None
    choice.plan.learn(x.ptr, weight.ptr, y.ptr)
    return choice.plan


def _run_folded(kind: str, x: Array, weight: Array, y: Array, geometry: Geometry) -> None:
    """As a convolution with stride 1 over images whose pixels were folded into channels."""
    fold = space_to_depth.Fold.of(x.shape, weight.shape, y.shape, geometry, x.dtype)
    images = fold.images(x)
    if kind == FORWARD:
        _run(kind, images, fold.weights(weight), y, Geometry(*fold.geometry))
    else:
        weights = fold.empty_weights(weight.storage.device)
        _run(kind, images, weights, y, Geometry(*fold.geometry))
        fold.unfold_weights(weight, weights)


def _run_dense(kind: str, x: Array, weight: Array, y: Array, geometry: Geometry) -> plans.Choice:
    """Runs a convolution whose operands all lie NHWC, and returns how."""
    settings = current_settings()
    known = (kind, x.shape, weight.shape, y.shape, geometry, x.dtype, x.storage.device, settings)
    choice = _choices.get(known)
    if choice is None:
        problem = Problem(
            kind, x.dtype.name, x.shape, weight.shape, y.shape, geometry.stride, geometry.padding, geometry.dilation
        )
        choice = plans.choose(problem, settings, x.storage.device, (x.ptr, weight.ptr, y.ptr))
        _choices[known] = choice
    if choice.pieces == 1:
        choice.plan.run(x.ptr, weight.ptr, y.ptr)
        return choice
    # Only gradients of weights are cut: those of the pieces are added up.
    pieces = choice.pieces
    parts = scratch(x.storage.device, pieces * weight.nbytes)
    step_x, step_weight, step_y = x.nbytes // pieces, weight.nbytes, y.nbytes // pieces
    for piece in range(pieces):
        choice.plan.run(x.ptr + piece * step_x, parts.ptr + piece * step_weight, y.ptr + piece * step_y)
    stride = (weight.size, *channels_last_stride(weight.shape))
    stacked = Array(parts.storage, (pieces, *weight.shape), stride, x.dtype)
    reduction.sum(weight, stacked, axes=(0,), keepdims=False)
    return choice


def _fits(array: Array) -> bool:
    """Whether the libraries can take it as it lies."""
    return array.is_channels_last and array.ptr % 16 == 0


def _nhwc_copy(array: Array, *, filled: bool) -> Array:
    """Scratch memory of the same shape that lies NHWC, with the array's values where they are to be read."""
    room = scratch(array.storage.device, array.nbytes)
    copy = Array(room.storage, array.shape, channels_last_stride(array.shape), array.dtype)
    if filled:
        elementwise.copy(copy, array)
    return copy
