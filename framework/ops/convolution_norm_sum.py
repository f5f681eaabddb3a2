"""The end of a residual block whose shortcut has a convolution and a normalisation of its own, in training: one operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from framework.autograd.function import Operation, apply
from framework.autograd.gradient import Gradient
from framework.autograd.node import Node
from framework.ops import convolution, normalization
from framework.ops.checks import Pair, check_tensors
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.array import Array, Layout
from framework.vm.runtime import Runtime

# Stride, padding, dilation and groups of a convolution, eps and momentum of its normalisation.
Settings = tuple[Pair, Pair, Pair, int, float, float]
# The mean and 1/√(variance + eps) of a branch, and those of its shortcut.
Figures = tuple[Array, Array, Array, Array]
# How x, the kernel, weight, bias, running_mean and running_var of a branch lie.
Layouts = tuple[Layout, Layout, Layout, Layout, Layout, Layout]


class Branch(NamedTuple):
    """What `batch_norm(conv2d(x, kernel), …, training=True)` is given.

    `names` are those of the modules that the two belong to, for memory's labels.
    """

    x: Tensor
    kernel: Tensor
    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor
    stride: int | Pair = 1
    padding: int | Pair = 0
    dilation: int | Pair = 1
    groups: int = 1
    momentum: float = 0.1
    eps: float = 1e-5
    names: tuple[str, str] = ("", "")


class ConvBatchNormSum(Operation):
    """The convolutions' kernels are their own; both normalisations, the addition and the ReLU are one kernel.

    Of the inputs, the first four are the branch's x, kernel, weight and bias, the next four the shortcut's.
    """

    name = "conv2d_batch_norm_sum"
    takes_parts = True

    @staticmethod
    def forward(
        node: Node,
        kernels: Runtime,
        *inputs: Array,
        running: tuple[tuple[Array, Array], tuple[Array, Array]],
        settings: tuple[Settings, Settings],
        names: tuple[tuple[str, str], tuple[str, str]],
    ) -> Array:
        x, kernel, weight, bias, shortcut, shortcut_kernel, shortcut_weight, shortcut_bias = inputs
        (mean, var), (shortcut_mean, shortcut_var) = running
        plan = _plan(
            kernels,
            (x.layout, kernel.layout, weight.layout, bias.layout, mean.layout, var.layout),
            (
                shortcut.layout, shortcut_kernel.layout, shortcut_weight.layout, shortcut_bias.layout,
                shortcut_mean.layout, shortcut_var.layout,
            ),
            settings, node.recording,
        )  # fmt: skip
        # Memory is labelled by the module that each part belongs to.
        around = scope.here.frame
        scope.current = ((around, names[1][0]), "conv2d")
        beside = kernels.new(plan.shortcut.y)
        plan.shortcut.forward(beside, shortcut, shortcut_kernel, None)
        scope.current = ((around, names[0][0]), "conv2d")
        between = kernels.new(plan.main.y)
        plan.main.forward(between, x, kernel, None)
        scope.current = ((around, names[0][1]), "batch_norm")
        y, figures, mask = plan.train(
            mean, var, shortcut_mean, shortcut_var, between, weight, bias, beside, shortcut_weight, shortcut_bias
        )
        if node.recording:
            needs_x, needs_kernel, _, _, needs_shortcut, needs_shortcut_kernel, *_ = node.needs
            # A frozen shortcut keeps nothing.
            is_kept = any(node.needs[4:])
            node.save(
                node.input(0, x) if needs_kernel else None, kernel if needs_x else None, between, weight,
                node.input(4, shortcut) if needs_shortcut_kernel else None, shortcut_kernel if needs_shortcut else None,
                beside if is_kept else None, shortcut_weight if is_kept else None, y if mask is None else None,
            )  # fmt: skip
            node.note = (names, plan, figures, mask)
        return y

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad_y: Gradient) -> tuple[Array | None, ...]:
        x, kernel, between, weight, shortcut, shortcut_kernel, beside, shortcut_weight, y = node.kept
        names, plan, figures, mask = node.note
        around, _ = node.scope  # type: ignore[misc] # apply() gave the node one
        scope.current = (((around, names[0][1]), "batch_norm"), "backward")
        of_main, of_shortcut = plan.backward(
            node, grad_y, between, weight, beside, shortcut_weight, figures, y if mask is None else mask
        )
        # As with an operation for each: nothing is held beyond the last that reads it.
        del between, beside, y
        node.release(2, 6, 8)
        scope.current = (((around, names[0][0]), "conv2d"), "backward")
        grads = convolution.backward(node, kernels, 0, plan.main, of_main.pop(0), kernel, x)
        del x
        node.release(0)
        scope.current = (((around, names[1][0]), "conv2d"), "backward")
        shortcut_grads = convolution.backward(
            node, kernels, 4, plan.shortcut, of_shortcut.pop(0), shortcut_kernel, shortcut
        )
        return *grads, *of_main, *shortcut_grads, *of_shortcut


def conv2d_batch_norm_sum(branch: Branch, shortcut: Branch) -> Tensor:
    """`relu(bn(conv(x)) + bn(conv(x)))` of a branch and its shortcut, in training.

    Values, gradients and errors are those of `conv2d` and `batch_norm`, in the shortcut and then in the branch with the
    shortcut's result as its residual; that result is never written to memory. Returns the shape of both. Raises ValueError
    where shapes do not fit, TypeError where element types do not.
    """
    for given in (branch, shortcut):
        if not (type(given.x) is type(given.running_mean) is type(given.running_var) is Tensor):
            check_tensors("conv2d", given.x)
            check_tensors("batch_norm", given.running_mean, given.running_var)
    return apply(
        ConvBatchNormSum,
        branch.x,
        branch.kernel,
        branch.weight,
        branch.bias,
        shortcut.x,
        shortcut.kernel,
        shortcut.weight,
        shortcut.bias,
        running=(
            (branch.running_mean.array, branch.running_var.array),
            (shortcut.running_mean.array, shortcut.running_var.array),
        ),
        settings=(_settings(branch), _settings(shortcut)),
        names=(branch.names, shortcut.names),
    )


def _settings(given: Branch) -> Settings:
    """Those of a branch, so that plans can be found by them."""
    eps, momentum = given.eps, given.momentum
    return (
        *convolution.settings(given.stride, given.padding, given.dilation, given.groups),
        eps if type(eps) is float else float(eps),
        momentum if type(momentum) is float else float(momentum),
    )


class _Plan:
    """What it is run with for operands that lie in some way: the plans of both convolutions, and both normalisations."""

    __slots__ = ("_kernels", "_known", "_operands", "_room", "_run", "_shortcut_room", "_vectors", "main", "shortcut")

    def __init__(
        self,
        kernels: Runtime,
        branch: Layouts,
        shortcut: Layouts,
        settings: tuple[Settings, Settings],
        is_recorded: bool,
    ) -> None:
        # In the order in which the parts would refuse what does not fit.
        self.shortcut = _convolution(kernels, shortcut, settings[1], None)
        self.main = _convolution(kernels, branch, settings[0], self.shortcut.y)
        self._kernels = kernels
        images, added = self.main.y, self.shortcut.y
        self._room = room = normalization.room_for(kernels, images, has_residual=True, has_mask=is_recorded)
        self._shortcut_room = normalization.room_for(kernels, added, has_residual=False, has_mask=False)
        (_, _, weight, bias, *running), (_, _, shortcut_weight, shortcut_bias, *shortcut_running) = branch, shortcut
        self._vectors = [Layout.of(vector.shape, (1,), vector.dtype) for vector in (weight, shortcut_weight)]
        vector = room.vector
        (*_, eps, momentum), (*_, shortcut_eps, shortcut_momentum) = settings
        self._run = kernels.prepared(
            "batch_norm_sum_train", images, *[vector] * 4, room.mask, *running, *shortcut_running, images, weight, bias,
            added, shortcut_weight, shortcut_bias, eps=eps, momentum=momentum, shortcut_eps=shortcut_eps,
            shortcut_momentum=shortcut_momentum,
        )  # fmt: skip
        mask = images if room.mask is None else room.mask
        self._operands = (images, weight, vector, vector, added, shortcut_weight, vector, vector, mask)
        # What issues backward, by the layouts of what it writes and of the gradient's parts.
        self._known: dict[tuple[Layout | None, ...], Callable[..., None]] = {}

    def train(self, *operands: Array) -> tuple[Array, Figures, Array | None]:
        """y, the figures, and the mask for backward; the operands are the kernel's running figures and what it reads."""
        kernels = self._kernels
        y = kernels.new(self.main.y)
        mean, inv_std, mask = self._room.arrays(kernels)
        shortcut_mean, shortcut_inv_std, _ = self._shortcut_room.arrays(kernels)
        figures = mean, inv_std, shortcut_mean, shortcut_inv_std
        self._run(y, *figures, mask, *operands)
        return y, figures, mask

    def backward(
        self,
        node: Node,
        grad_y: Gradient,
        x: Array,
        weight: Array,
        shortcut: Array | None,
        shortcut_weight: Array | None,
        figures: Figures,
        mask: Array,
    ) -> tuple[list[Array | None], list[Array | None]]:
        """The gradients of what the branch's normalisation took, of its weight and bias, and the same of the shortcut.

        None for those that are not wanted; `shortcut` is None where none of its are.
        """
        first, second = grad_y.array, grad_y.second
        grad_y.second = None  # so that nothing but what takes its place keeps its memory
        # Those of the images may take the places of the gradient's parts: the shortcut's, which is needed longest, that of
        # the first, which is held until the end.
        own_first, own_second = first if grad_y.owned else None, second if grad_y.second_owned else None
        of_main = self._rooms(node, 0, own_first if shortcut is None and own_second is None else own_second)
        of_shortcut = self._rooms(node, 4, own_first)
        mean, inv_std, shortcut_mean, shortcut_inv_std = figures
        if shortcut is None:
            self._kernels.batch_norm_backward(*of_main, None, first, x, weight, mean, inv_std, mask, second, relu=True)
            return of_main, of_shortcut
        key = tuple([None if array is None else array.layout for array in (*of_main, *of_shortcut, first, second)])
        run = self._known.get(key) or self._prepare_backward(*key)
        run(
            *of_main, *of_shortcut, first, x, weight, mean, inv_std, shortcut, shortcut_weight, shortcut_mean,
            shortcut_inv_std, mask, second,
        )  # fmt: skip
        return of_main, of_shortcut

    def _rooms(self, node: Node, at: int, spare: Array | None) -> list[Array | None]:
        """Where the gradients of a branch go whose inputs start at number `at`: that of the images in `spare` if it fits."""
        images, vector = (self.shortcut.y, self._vectors[1]) if at else (self.main.y, self._vectors[0])
        needs_x, needs_kernel, needs_weight, needs_bias = node.needs[at : at + 4]
        room = None
        if needs_x or needs_kernel:
            room = spare if spare is not None and spare.layout is images else self._kernels.new(images)
        return [
            room,
            node.room(at + 2, vector) if needs_weight else None,
            node.room(at + 3, vector) if needs_bias else None,
        ]

    def _prepare_backward(self, *key: Layout | None) -> Callable[..., None]:
        run = self._known[key] = self._kernels.prepared("batch_norm_sum_backward", *key[:7], *self._operands, key[7])
        return run


def _convolution(kernels: Runtime, given: Layouts, settings: Settings, residual: Layout | None) -> convolution.Plan:
    """The plan of a branch's convolution. Raises ValueError or TypeError where it or its normalisation does not fit."""
    x, kernel, *vectors = given
    plan = convolution.plan(kernels, x, kernel, None, *settings[:4])
    normalization.check(plan.y, residual, *vectors, True)
    return plan


@lru_cache(maxsize=4096)
def _plan(
    kernels: Runtime, branch: Layouts, shortcut: Layouts, settings: tuple[Settings, Settings], is_recorded: bool
) -> _Plan:
    """The plan for operands of these layouts. Raises ValueError or TypeError where they do not fit."""
    return _Plan(kernels, branch, shortcut, settings, is_recorded)
