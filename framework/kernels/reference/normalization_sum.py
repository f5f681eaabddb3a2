"""The end of a residual block whose shortcut has a batch normalisation of its own: relu(bn(x) + bn(shortcut)).

Both kernels are made of those of one normalisation: that is what they mean, and what serves a device that gains nothing by
one pass over both. Shapes: y, x, shortcut [N, C, H, W]; every weight, bias, mean, inv_std, running_* [C].
"""

from __future__ import annotations

from framework.kernels.reference import normalization
from framework.kernels.table import Kernel, kernel
from framework.vm import scratch
from framework.vm.array import Array, channels_last_stride


def train_by(batch_norm_train: Kernel) -> Kernel:
    """`batch_norm_sum_train` of a table that has this `batch_norm_train`."""

    @kernel(outputs=10)
    def batch_norm_sum_train(
        y: Array,
        mean: Array,
        inv_std: Array,
        shortcut_mean: Array,
        shortcut_inv_std: Array,
        mask: Array | None,
        running_mean: Array | None,
        running_var: Array | None,
        shortcut_running_mean: Array | None,
        shortcut_running_var: Array | None,
        x: Array,
        weight: Array | None,
        bias: Array | None,
        shortcut: Array,
        shortcut_weight: Array | None,
        shortcut_bias: Array | None,
        *,
        eps: float,
        momentum: float,
        shortcut_eps: float,
        shortcut_momentum: float,
    ) -> None:
        """y = relu(bn(x) + bn(shortcut)), each `batch_norm_train` with its own figures.

        The mask is that of a ReLU behind a residual. bn(shortcut) is rounded to y's element type before it is added.
        """
        residual = _like(shortcut)
        batch_norm_train(
            residual, shortcut_mean, shortcut_inv_std, None, shortcut_running_mean, shortcut_running_var, shortcut,
            shortcut_weight, shortcut_bias, None, eps=shortcut_eps, momentum=shortcut_momentum, relu=False,
        )  # fmt: skip
        batch_norm_train(
            y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, residual,
            eps=eps, momentum=momentum, relu=True,
        )  # fmt: skip

    return batch_norm_sum_train  # type: ignore[return-value]


def backward_by(batch_norm_backward: Kernel) -> Kernel:
    """`batch_norm_sum_backward` of a table that has this `batch_norm_backward`."""

    @kernel(outputs=6)
    def batch_norm_sum_backward(
        grad_x: Array | None,
        grad_weight: Array | None,
        grad_bias: Array | None,
        grad_shortcut: Array | None,
        grad_shortcut_weight: Array | None,
        grad_shortcut_bias: Array | None,
        grad_y: Array,
        x: Array,
        weight: Array | None,
        mean: Array,
        inv_std: Array,
        shortcut: Array,
        shortcut_weight: Array | None,
        shortcut_mean: Array,
        shortcut_inv_std: Array,
        mask: Array,
        second_grad_y: Array | None = None,
    ) -> None:
        """Gradients of batch_norm_sum_train. Where y was used twice, grad_y may come in two parts, to be added up.

        grad_x and grad_shortcut may each be written over one of the two parts. With g = grad_y where the ReLU was open,
        else 0, they and those of the parameters are what `batch_norm_backward` makes of g without a ReLU.
        """
        masked = _like(shortcut) if grad_shortcut is None else grad_shortcut
        batch_norm_backward(
            grad_x, grad_weight, grad_bias, masked, grad_y, x, weight, mean, inv_std, mask, second_grad_y, relu=True
        )
        batch_norm_backward(
            grad_shortcut, grad_shortcut_weight, grad_shortcut_bias, None, masked, shortcut, shortcut_weight,
            shortcut_mean, shortcut_inv_std, None, relu=False,
        )  # fmt: skip

    return batch_norm_sum_backward  # type: ignore[return-value]


batch_norm_sum_train = train_by(normalization.batch_norm_train)
batch_norm_sum_backward = backward_by(normalization.batch_norm_backward)


def _like(images: Array) -> Array:
    room = scratch(images.storage.device, images.nbytes)
    return Array(room.storage, images.shape, channels_last_stride(images.shape), images.dtype)  # type: ignore[arg-type]
