"""Kernel tables: a device is a table of functions that all devices name alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Kernel(Protocol):
    """A function of arrays: outputs first, already allocated, then inputs; everything else by keyword.

    `prepare`, where a kernel has it, does once what depends on nothing but how operands lie:
    `prepare(device, *layouts, **attributes)` gives a function that does the same with arrays of these layouts (None for
    one that is left out), at less cost for each call.
    """

    __name__: str
    outputs: int
    prepare: Callable[..., Callable[..., None]] | None

    def __call__(self, *arrays: Any, **attributes: Any) -> None: ...


def kernel(
    outputs: int, prepare: Callable[..., Callable[..., None]] | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Declares a function a kernel that writes its first `outputs` arrays and reads the rest."""

    def declare(function: Callable[..., None]) -> Kernel:
        function.outputs, function.prepare = outputs, prepare  # type: ignore[attr-defined]
        return function  # type: ignore[return-value]

    return declare


class Table:
    """The kernels of one device, by name, and what its operations must know before they allocate.

    `batch_norm_mask_bytes(x, has_residual=)` is the size of the ReLU mask that batch normalisation keeps for backward,
    None where backward takes the result itself in its place; `max_pool2d_indices(y_shape, kernel)` is the element type
    and the shape of a maximum's place. `batch_norm_remakes(x)` says of a normalisation with a ReLU and no residual whether
    its result is large enough to be made again for backward, by `batch_norm_again`, rather than kept. `x` is an array or a
    layout.
    """

    def __init__(
        self,
        name: str,
        kernels: Mapping[str, Kernel],
        *,
        batch_norm_mask_bytes: Callable[..., int | None],
        max_pool2d_indices: Callable[..., tuple],
        batch_norm_remakes: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self.name = name
        self.kernels = dict(kernels)
        self.batch_norm_mask_bytes = batch_norm_mask_bytes
        self.max_pool2d_indices = max_pool2d_indices
        self.batch_norm_remakes = batch_norm_remakes
