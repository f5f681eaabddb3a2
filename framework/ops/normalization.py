"""Batch normalisation, with a residual addition and a ReLU fused in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.dtype import DType, float32, uint8
from framework.ops.checks import check_floats, check_images, check_tensors
from framework.tensor import Tensor
from framework.vm.array import Array, Layout
from framework.vm.runtime import Runtime

# Kernels take operands in packs of so many bytes.
_ALIGNMENT = 16


class BatchNormTrain(Operation):
    name = "batch_norm"
    takes_parts = True

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
        *,
        eps: float,
        momentum: float,
        relu: bool,
    ) -> Array:
        settings = {"eps": eps, "momentum": momentum, "relu": relu}
        y, mean, inv_std, mask = train(
            kernels, x, weight, bias, residual, running_mean, running_var, node.recording, **settings
        )
        if node.recording:
            remakes = relu and residual is None and kernels.table.batch_norm_remakes(x)
            # mean, inv_std and mask lie in one storage: if one of them is written, so are all.
            node.save(x, weight, mean, y if mask is None and relu else None, bias if remakes else None)
            node.note = (relu, parameter_type(x, weight, bias), inv_std, mask)
            if remakes:
                node.remakes(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, weight, mean, y, _ = node.saved
        relu, dtype, inv_std, mask = node.note
        grads = train_backward(
            node, kernels, 1, node.needs[0], grad_y, x, weight, mean, inv_std, y if mask is None else mask, relu, dtype
        )
        return (*grads, None, None)

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        x, weight, mean, _, bias = node.saved
        *_, inv_std, mask = node.note
        y = kernels.new(Layout.like(x.layout))
        kernels.batch_norm_again(y, x, weight, bias, mean, inv_std, mask)
        return y


class BatchNormEval(Operation):
    name = "batch_norm"

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None,
        running_mean: Array,
        running_var: Array,
        *,
        eps: float,
        relu: bool,
    ) -> Array:
        y = kernels.new(Layout.like(x.layout))
        mask = _mask(node, kernels, x, residual, relu)
        kernels.batch_norm_eval(y, mask, x, weight, bias, running_mean, running_var, residual, eps=eps, relu=relu)
        node.save(x, weight, running_mean, running_var, y if mask is None and relu else mask)
        node.note = (relu, parameter_type(x, weight, bias), eps)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight, running_mean, running_var, mask = node.saved
        relu, dtype, eps = node.note
        grads = _new_gradients(node, kernels, 1, node.needs[0], x, dtype, changed=relu, spare=[])
        kernels.batch_norm_eval_backward(*grads, grad_y, x, weight, running_mean, running_var, mask, eps=eps, relu=relu)
        return (*_with_residual(node.needs[3], grads, grad_y), None, None)


def train(
    kernels: Runtime,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    is_recorded: bool,
    *,
    eps: float,
    momentum: float,
    relu: bool,
) -> tuple[Array, Array, Array, Array | None]:
    """What batch normalisation gives in training: y, mean, 1/√(variance + eps), and the mask of the ReLU for backward.

    Where there is no mask although it `is_recorded`, y tells where the ReLU was open.
    """
    y = kernels.new(Layout.like(x.layout))
    mean, inv_std, mask = _kept(kernels, x, residual is not None, relu and is_recorded)
    kernels.batch_norm_train(
        y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual,
        eps=eps, momentum=momentum, relu=relu,
    )  # fmt: skip
    return y, mean, inv_std, mask


def train_backward(
    node: Node,
    kernels: Runtime,
    at: int,
    needs_x: object,
    grad_y: Gradient,
    x: Array,
    weight: Array | None,
    mean: Array,
    inv_std: Array,
    mask: Array | None,
    relu: bool,
    dtype: DType,
) -> tuple[Array | None, ...]:
    """The gradients of x, weight, bias and residual as far as they are wanted; `at` is the weight's place in the inputs."""
    first, second = grad_y.array, grad_y.second
    changed = relu or second is not None
    # The residual's gradient may take the place of the first part, and that of x the place of the last.
    spare = [second] if second is not None and grad_y.second_owned else []
    needs_residual = node.needs[at + 2]
    if grad_y.owned and (changed or not needs_residual):
        spare.append(first)
    grads = _new_gradients(node, kernels, at, needs_x, x, dtype, changed=changed, spare=spare)
    kernels.batch_norm_backward(*grads, first, x, weight, mean, inv_std, mask, second, relu=relu)
    return _with_residual(needs_residual, grads, first)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """act(weight · (x - mean) / √(variance + eps) + bias + residual), per channel of images [N, C, H, W].

    In training, mean and variance are the batch's, and the running ones move towards them by `momentum`;
    otherwise the running ones are used. `residual` has the shape of x; act is ReLU where `relu` is set.
    Raises ValueError for shapes that do not fit, or for fewer than two values per channel in training.
    """
    check_tensors("batch_norm", x, residual, weight, bias, running_mean, running_var)
    check(
        x.array.layout,
        None if residual is None else residual.array.layout,
        None if weight is None else weight.array.layout,
        None if bias is None else bias.array.layout,
        None if running_mean is None else running_mean.array.layout,
        None if running_var is None else running_var.array.layout,
        training,
    )
    if training:
        return apply(
            BatchNormTrain, x, weight, bias, residual, running_mean, running_var,
            eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
    if running_mean is None or running_var is None:
        raise ValueError("batch_norm outside training needs running_mean and running_var")
    return apply(BatchNormEval, x, weight, bias, residual, running_mean, running_var, eps=eps, relu=relu)


@lru_cache(maxsize=4096)
def check(
    x: Layout,
    residual: Layout | None,
    weight: Layout | None,
    bias: Layout | None,
    running_mean: Layout | None,
    running_var: Layout | None,
    training: bool,
) -> None:
    """Raises ValueError or TypeError unless operands of these layouts fit."""
    check_images("batch_norm", x)
    check_floats("batch_norm", x, residual)
    n, channels, height, width = x.shape
    for name, given in (
        ("weight", weight),
        ("bias", bias),
        ("running_mean", running_mean),
        ("running_var", running_var),
    ):
        if given is not None and given.shape != (channels,):
            raise ValueError(f"batch_norm over {channels} channels got a {name} of shape {list(given.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"batch_norm of shape {list(x.shape)} got a residual of {list(residual.shape)}")
    if training and n * height * width < 2:
        raise ValueError(f"batch_norm in training needs more than one value per channel; got shape {list(x.shape)}")


def _mask(node: Node, kernels: Runtime, x: Array, residual: Array | None, relu: bool) -> Array | None:
    """Room for what backward must know of the ReLU; None where the result itself tells that."""
    if not (relu and node.recording):
        return None
    nbytes = kernels.table.batch_norm_mask_bytes(x, has_residual=residual is not None)
    return None if nbytes is None else kernels.empty((nbytes,), uint8)


class _Room(NamedTuple):
    """Where mean, 1/√(variance + eps) and the ReLU's mask lie in the one storage that serves all three."""

    nbytes: int
    vector: Layout
    mask: Layout | None
    mask_offset: int


_rooms: dict[tuple[Any, Layout, bool, bool], _Room] = {}


def _kept(kernels: Runtime, x: Array, has_residual: bool, has_mask: bool) -> tuple[Array, Array, Array | None]:
    """Room for mean, 1/√(variance + eps), and what backward must know of the ReLU."""
    key = (kernels.table, x.layout, has_residual, has_mask)
    room = _rooms.get(key)
    if room is None:
        room = _rooms[key] = _room(kernels.table, x, has_residual, has_mask)
    storage, vector, mask = kernels.storage(room.nbytes), room.vector, room.mask
    channels, step, dtype = vector.shape, vector.stride, vector.dtype
    return (
        Array(storage, channels, step, dtype, 0, vector),
        Array(storage, channels, step, dtype, channels[0], vector),
        None if mask is None else Array(storage, mask.shape, mask.stride, uint8, room.mask_offset, mask),
    )


def _room(table: Any, x: Array, has_residual: bool, has_mask: bool) -> _Room:
    # The statistics are in float32 also for images of fewer digits.
    vector = Layout.of(x.shape[1:2], (1,), x.dtype if x.dtype.itemsize >= 4 else float32)
    nbytes = 2 * vector.nbytes
    mask_bytes = table.batch_norm_mask_bytes(x, has_residual=has_residual) if has_mask else None
    if mask_bytes is None:
        return _Room(nbytes, vector, None, 0)
    start = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return _Room(start + mask_bytes, vector, Layout.of((mask_bytes,), (1,), uint8), start)


def parameter_type(x: Array, weight: Array | None, bias: Array | None) -> DType:
    """The element type that weight and bias have, and so their gradients."""
    return weight.dtype if weight is not None else x.dtype if bias is None else bias.dtype


def _new_gradients(
    node: Node, kernels: Runtime, at: int, needs_x: object, x: Array, dtype: DType, *, changed: bool, spare: list[Array]
) -> tuple[Array | None, ...]:
    """Room for the gradients. That of the residual is grad_y itself unless it is `changed` on the way.

    Images may take the place of the `spare` ones.
    """
    needs_weight, needs_bias, needs_residual = node.needs[at : at + 3]
    vector = Layout.of(x.shape[1:2], (1,), dtype)
    return (
        _images(kernels, x, spare) if needs_x else None,
        node.room(at, vector) if needs_weight else None,
        node.room(at + 1, vector) if needs_bias else None,
        _images(kernels, x, spare) if needs_residual and changed else None,
    )


def _images(kernels: Runtime, x: Array, spare: list[Array]) -> Array:
    if spare and spare[0].stride == x.stride and spare[0].dtype is x.dtype:
        return spare.pop(0)
    return kernels.new(Layout.like(x.layout))


def _with_residual(needed: object, grads: tuple[Array | None, ...], grad_y: Array) -> tuple[Array | None, ...]:
    return (*grads[:3], grad_y) if needed and grads[3] is None else grads
