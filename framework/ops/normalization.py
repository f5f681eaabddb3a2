"""Batch normalisation, with a residual addition and a ReLU fused in."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

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
        plan = training_plan(
            kernels, x.layout, _layout(weight), _layout(bias), _layout(residual), _layout(running_mean),
            _layout(running_var), node.recording, eps, momentum, relu,
        )  # fmt: skip
        y, mean, inv_std, mask = plan.train(x, weight, bias, residual, running_mean, running_var)
        if node.recording:
            # mean, inv_std and mask lie in one storage: if one of them is written, so are all.
            node.save(x, weight, mean, y if plan.keeps_y else None, bias if plan.remakes else None)
            node.note = (plan, inv_std, mask)
            if plan.remakes:
                node.remakes(y)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, weight, mean, y, _ = node.saved
        plan, inv_std, mask = node.note
        grads = plan.backward(node, 1, node.needs[0], grad_y, x, weight, mean, inv_std, y if mask is None else mask)
        return (*grads, None, None)

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        x, weight, mean, _, bias = node.saved
        plan, inv_std, mask = node.note
        y = kernels.new(plan.y)
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
        node.note = (relu, _parameter_type(x.layout, _layout(weight), _layout(bias)), eps)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Array) -> tuple[Array | None, ...]:
        x, weight, running_mean, running_var, mask = node.saved
        relu, dtype, eps = node.note
        needs_x, needs_weight, needs_bias, needs_residual, *_ = node.needs
        vector = Layout.of(x.shape[1:2], (1,), dtype)
        grads = (
            kernels.new(Layout.like(x.layout)) if needs_x else None,
            node.room(1, vector) if needs_weight else None,
            node.room(2, vector) if needs_bias else None,
            kernels.new(Layout.like(x.layout)) if needs_residual and relu else None,
        )
        kernels.batch_norm_eval_backward(*grads, grad_y, x, weight, running_mean, running_var, mask, eps=eps, relu=relu)
        # Without a ReLU the residual's gradient is grad_y itself.
        return (*grads[:3], grad_y if needs_residual and not relu else grads[3], None, None)


class TrainingPlan:
    """What normalisation in training of operands that lie in some way is run with.

    y lies like x. `keeps_y` says that y tells backward where the ReLU was open, since there is no mask for it; `remakes`
    that y is made again for backward rather than kept.
    """

    __slots__ = ("_kernels", "_known", "_operands", "_relu", "_room", "_run", "_vector", "keeps_y", "remakes", "y")

    def __init__(
        self,
        kernels: Runtime,
        x: Layout,
        weight: Layout | None,
        bias: Layout | None,
        residual: Layout | None,
        running_mean: Layout | None,
        running_var: Layout | None,
        is_recorded: bool,
        eps: float,
        momentum: float,
        relu: bool,
    ) -> None:
        self._kernels = kernels
        self._relu = relu
        self._room = room = room_for(kernels, x, residual is not None, relu and is_recorded)
        self._vector = Layout.of(x.shape[1:2], (1,), _parameter_type(x, weight, bias))
        self.y = Layout.like(x)
        self.keeps_y = relu and room.mask is None
        self.remakes = is_recorded and relu and residual is None and kernels.table.batch_norm_remakes(x)
        self._operands = (x, weight, room.vector, room.vector, self.y if self.keeps_y else room.mask)
        self._run = kernels.prepared(
            "batch_norm_train", self.y, room.vector, room.vector, room.mask, running_mean, running_var, x, weight, bias,
            residual, eps=eps, momentum=momentum, relu=relu,
        )  # fmt: skip
        # What issues backward, by the layouts of what it writes and of the gradient's parts.
        self._known: dict[tuple[Layout | None, ...], Callable[..., None]] = {}

    def train(
        self,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        residual: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """y, mean, 1/√(variance + eps), and the mask of the ReLU for backward."""
        kernels, room = self._kernels, self._room
        y = kernels.new(self.y)
        mean, inv_std, mask = room.arrays(kernels)
        self._run(y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual)
        return y, mean, inv_std, mask

    def backward(
        self,
        node: Node,
        at: int,
        needs_x: object,
        grad_y: Gradient,
        x: Array,
        weight: Array | None,
        mean: Array,
        inv_std: Array,
        mask: Array | None,
    ) -> tuple[Array | None, ...]:
        """The gradients of x, weight, bias and residual as far as they are wanted; `at` is the weight's place in the inputs."""
        first, second = grad_y.array, grad_y.second
        needs_weight, needs_bias, needs_residual = node.needs[at : at + 3]
        # That of the residual is grad_y itself unless it is changed on the way.
        changed = self._relu or second is not None
        # It may take the place of the first part, and that of x the place of the last.
        spare = [second] if second is not None and grad_y.second_owned else []
        if grad_y.owned and (changed or not needs_residual):
            spare.append(first)
        grad_x = self._images(x, spare) if needs_x else None
        grad_weight = node.room(at, self._vector) if needs_weight else None
        grad_bias = node.room(at + 1, self._vector) if needs_bias else None
        grad_residual = self._images(x, spare) if needs_residual and changed else None
        key = (
            None if grad_x is None else grad_x.layout,
            grad_weight and self._vector,
            grad_bias and self._vector,
            None if grad_residual is None else grad_residual.layout,
            first.layout,
            None if second is None else second.layout,
        )
        run = self._known.get(key) or self._prepare_backward(*key)
        run(grad_x, grad_weight, grad_bias, grad_residual, first, x, weight, mean, inv_std, mask, second)
        return grad_x, grad_weight, grad_bias, first if needs_residual and not changed else grad_residual

    def _images(self, x: Array, spare: list[Array]) -> Array:
        """Room for a gradient that lies like x: the next of the spare ones, if it does."""
        return spare.pop(0) if spare and spare[0].layout is x.layout else self._kernels.new(self.y)

    def _prepare_backward(self, *key: Layout | None) -> Callable[..., None]:
        run = self._known[key] = self._kernels.prepared(
            "batch_norm_backward", *key[:5], *self._operands, key[5], relu=self._relu
        )
        return run


@lru_cache(maxsize=4096)
def training_plan(
    kernels: Runtime,
    x: Layout,
    weight: Layout | None,
    bias: Layout | None,
    residual: Layout | None,
    running_mean: Layout | None,
    running_var: Layout | None,
    is_recorded: bool,
    eps: float,
    momentum: float,
    relu: bool,
) -> TrainingPlan:
    """The plan for operands of these layouts."""
    return TrainingPlan(kernels, x, weight, bias, residual, running_mean, running_var, is_recorded, eps, momentum, relu)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
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
    # Plans are found by them, so that they have to be hashable.
    eps = eps if type(eps) is float else float(eps)
    momentum = momentum if type(momentum) is float else float(momentum)
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


class Room(NamedTuple):
    """Where mean, 1/√(variance + eps) and the ReLU's mask lie in the one storage that serves all three."""

    nbytes: int
    vector: Layout
    mask: Layout | None
    mask_offset: int

    def arrays(self, kernels: Runtime) -> tuple[Array, Array, Array | None]:
        """New ones: mean, 1/√(variance + eps) and the mask."""
        storage, vector, masked = kernels.storage(self.nbytes), self.vector, self.mask
        mean = Array(storage, vector.shape, vector.stride, vector.dtype, 0, vector)
        inv_std = Array(storage, vector.shape, vector.stride, vector.dtype, vector.size, vector)
        mask = None
        if masked is not None:
            mask = Array(storage, masked.shape, masked.stride, uint8, self.mask_offset, masked)
        return mean, inv_std, mask


def room_for(kernels: Runtime, x: Layout, has_residual: bool, has_mask: bool) -> Room:
    """That of a normalisation of images that lie so."""
    # The statistics are in float32 also for images of fewer digits.
    vector = Layout.of(x.shape[1:2], (1,), x.dtype if x.dtype.itemsize >= 4 else float32)
    nbytes = 2 * vector.nbytes
    mask_bytes = kernels.table.batch_norm_mask_bytes(x, has_residual=has_residual) if has_mask else None
    if mask_bytes is None:
        return Room(nbytes, vector, None, 0)
    start = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return Room(start + mask_bytes, vector, Layout.of((mask_bytes,), (1,), uint8), start)


def _parameter_type(x: Layout, weight: Layout | None, bias: Layout | None) -> DType:
    """The element type that weight and bias have, and so their gradients."""
    return weight.dtype if weight is not None else x.dtype if bias is None else bias.dtype


def _layout(array: Array | None) -> Layout | None:
    return None if array is None else array.layout
