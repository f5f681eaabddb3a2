"""Loss functions."""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array


@kernel(outputs=2)
def cross_entropy(loss: Array, probabilities: Array, logits: Array, target: Array) -> None:
    """loss = mean_n(-log softmax(logits[n])[target[n]]), with logits [N, C], target [N] of integers in [0, C).

    probabilities = softmax(logits), kept for backward. The largest logit is subtracted first, so that nothing
    overflows. Raises ValueError for a target outside the classes.
    """
    scores, labels = logits.ndarray, target.ndarray
    if labels.size and not (labels.min() >= 0 and labels.max() < scores.shape[1]):
        raise ValueError(
            f"cross_entropy: targets must lie in [0, {scores.shape[1]}), the number of classes; "
            f"got {labels.min()} to {labels.max()}"
        )
    shifted = scores - scores.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = np.sum(exponentials, axis=1, keepdims=True)
    probabilities.ndarray[...] = exponentials / total
    picked = np.take_along_axis(shifted, labels[:, None], axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        loss.ndarray[...] = np.divide(np.sum(np.log(total) - picked, dtype=np.float64), labels.size)


@kernel(outputs=1)
def cross_entropy_backward(grad_logits: Array, grad_loss: Array, probabilities: Array, target: Array) -> None:
    """grad_logits[n, c] = grad_loss · (probabilities[n, c] - [c is target[n]]) / N."""
    count = probabilities.shape[0]
    gradient = probabilities.ndarray.copy()
    gradient[np.arange(count), target.ndarray] -= 1
    np.multiply(gradient, grad_loss.ndarray / max(count, 1), out=grad_logits.ndarray)
