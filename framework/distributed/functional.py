"""Collectives that gradients flow through."""

from __future__ import annotations

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.distributed import collectives
from framework.distributed.groups import Group
from framework.distributed.world import chosen_group
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime


class _AllReduce(Operation):
    name = "all_reduce"

    @staticmethod
    def forward(node: Node, kernels: Runtime, a: Array, *, op: str, group: Group) -> Array:
        node.note = (op, group)
        return _reduced(kernels, a, op, group)

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> Array:
        # Every rank's result depends on this rank's input alike, so its gradient is that of all results together.
        op, group = node.note
        return _reduced(kernels, grad, op, group)


def all_reduce(tensor: Tensor, op: str = "sum", group: Group | None = None) -> Tensor:
    """The sum or avg over all ranks, as a new tensor; backward reduces the ranks' gradients in the same way."""
    if op not in ("sum", "avg"):
        raise ValueError(f"the differentiable all_reduce has sum and avg, not {op!r}")
    result: Tensor = apply(_AllReduce, tensor, op=op, group=chosen_group(group))
    return result


def _reduced(kernels: Runtime, array: Array, op: str, group: Group) -> Array:
    out = kernels.empty(array.shape, array.dtype)
    kernels.copy(out, array)
    collectives.all_reduce(Tensor(out), op, group)
    return out
