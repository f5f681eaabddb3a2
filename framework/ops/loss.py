"""Loss functions."""

from __future__ import annotations

from framework.autograd.function import Operation, apply
from framework.autograd.node import Node
from framework.ops.checks import check_floats, check_tensor
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import Runtime


class CrossEntropy(Operation):
    name = "cross_entropy"

    @staticmethod
    def forward(node: Node, kernels: Runtime, logits: Array, target: Array) -> Array:
        loss = kernels.empty((), logits.dtype)
        probabilities = kernels.empty(logits.shape, logits.dtype)
        kernels.cross_entropy(loss, probabilities, logits, target)
        node.save(probabilities, target)
        return loss

    @staticmethod
    def backward(node: Node, kernels: Runtime, grad: Array) -> tuple[Array | None, ...]:
        probabilities, target = node.saved
        grad_logits = kernels.empty(probabilities.shape, probabilities.dtype)
        kernels.cross_entropy_backward(grad_logits, grad, probabilities, target)
        return grad_logits, None


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over the batch of -log softmax(logits)[target]; logits [N, C], target [N] of integers.

    Raises ValueError for shapes that do not fit or a target outside [0, C), TypeError for logits that are no floats
    or a target of floats.
    """
    check_tensor("cross_entropy", logits)
    check_tensor("cross_entropy", target)
    if logits.ndim != 2 or target.shape != logits.shape[:1]:
        raise ValueError(
            f"cross_entropy takes logits [N, C] and targets [N]; got {list(logits.shape)} and {list(target.shape)}"
        )
    check_floats("cross_entropy", logits)
    if target.dtype.name not in ("int64", "int32"):
        raise TypeError(f"cross_entropy takes class numbers as int64 or int32; got {target.dtype}")
    return apply(CrossEntropy, logits, target)
