"""Operation: what is differentiable; and applying one, which runs it and records it for backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from framework.autograd.mode import mode
from framework.autograd.node import Edge, Node
from framework.device import Device
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.array import Array, overlap_partly
from framework.vm.machine import machine
from framework.vm.runtime import Runtime, runtime
from framework.vm.scope import here
from framework.words import kind_of

_NUMBERS = (int, float, np.integer, np.floating)
Gradients = Array | tuple[Array | None, ...] | None


class Operation:
    """A differentiable operation on arrays: subclasses say how it runs forward, and backward.

    `kernels` is the runtime of the device: new arrays, and its kernels as attributes.
    `takes_parts` says that backward gets each gradient as a `Gradient`: it adds up the parts itself, and may write its
    results over what is `owned`.
    """

    name: str
    takes_parts = False

    @staticmethod
    def forward(node: Node, kernels: Runtime, *inputs: Any, **attributes: Any) -> Any:
        """The output array, or a tuple of them."""
        raise TypeError("an Operation defines forward")

    @staticmethod
    def backward(node: Node, kernels: Runtime, *grads: Any) -> Gradients:
        """The gradient of each input, None where none is wanted. Gets None for an output that got no gradient."""
        raise TypeError("an Operation defines backward")

    @staticmethod
    def remake(node: Node, kernels: Runtime) -> Array:
        """The output once more, from what was saved, where forward called `node.remakes`."""
        raise TypeError("an Operation that can make its output again defines remake")


def apply(operation: type[Operation], *inputs: Any, **attributes: Any) -> Any:
    """Runs `operation` on tensors (or None, or numbers, where it allows them), recorded if a gradient is wanted."""
    arrays: list[Any] = []
    edges: list[Edge | None] = []
    device: Device | None = None
    wanted = False
    for item in inputs:
        if item is None:
            arrays.append(None)
            edges.append(None)
        elif isinstance(item, Tensor):
            array = item.array
            arrays.append(array)
            if array.storage.device is not device:
                if device is not None:
                    raise ValueError(
                        f"{operation.name} got tensors on {device} and on {array.storage.device};"
                        " move them to one with .to()"
                    )
                device = array.storage.device
            if item.requires_grad:
                wanted = True
                edges.append((item, 0) if item.node is None else (item.node, item._output))
            else:
                edges.append(None)
        elif isinstance(item, _NUMBERS):
            arrays.append(item)
            edges.append(None)
        else:
            raise TypeError(f"{operation.name} takes tensors; got {kind_of(item)}, which flow.tensor() converts")
    if device is None:
        raise TypeError(f"{operation.name} needs a tensor; got {', '.join(map(repr, inputs))}")
    recording = wanted and mode.recording
    outer = here.frame
    scope.current = (outer, operation.name)
    try:
        kernels = runtime(device)
        node = Node(operation, kernels, edges if recording else [None] * len(edges), recording)
        result = operation.forward(node, kernels, *arrays, **attributes)
    finally:
        scope.current = outer
    if not recording:
        return Tensor(result) if isinstance(result, Array) else tuple([Tensor(a) for a in result])
    if isinstance(result, Array):
        # What is cut off to integers does not follow its inputs' small changes.
        return Tensor(result, True, node, 0) if result.dtype.is_floating else Tensor(result)
    return tuple([Tensor(a, a.dtype.is_floating, node, i) for i, a in enumerate(result)])


def apply_in_place(operation: type[Operation], target: Tensor, *inputs: Any, **attributes: Any) -> Tensor:
    """Runs `operation`, whose output is its first input's memory; `target` then stands for the result."""
    recording = mode.recording and (
        target.requires_grad or any(isinstance(i, Tensor) and i.requires_grad for i in inputs)
    )
    if recording:
        if target.is_leaf and target.requires_grad:
            raise RuntimeError(
                f"{operation.name}: a leaf tensor that requires a gradient cannot be written in place; "
                "do it under no_grad()"
            )
        if target.base is not None or target.views:
            raise RuntimeError(
                f"{operation.name}: writing in place to a view, or to a tensor of which a view is alive, is not recorded"
                " for backward; write to a clone() of it"
            )
    if any(step == 0 and extent > 1 for extent, step in zip(target.shape, target.stride(), strict=True)):
        raise RuntimeError(
            f"{operation.name}: a tensor of shape {list(target.shape)} with several elements in one place, such as"
            " expand() gives, cannot be written in place; write to a clone() of it"
        )
    for item in inputs:
        if isinstance(item, Tensor) and overlap_partly(target.array, item.array):
            raise RuntimeError(
                f"{operation.name}: a tensor of shape {list(target.shape)} cannot be written from one of shape"
                f" {list(item.shape)} that lies partly in the same memory: elements would change before they are read;"
                " pass a clone() of it"
            )
    machine.settle(target.array)
    result = apply(operation, target, *inputs, **attributes)
    if recording:
        target.become(result)
    return target
