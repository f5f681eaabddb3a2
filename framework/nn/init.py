"""Initial values of parameters, drawn in place from the default generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod, sqrt

from framework.autograd import no_grad
from framework.ops.checks import check_tensor
from framework.random import default_generator
from framework.tensor import Tensor

_is_skipped = ContextVar("is_skipped", default=False)


@contextmanager
def skipped() -> Iterator[None]:
    """Within it this thread draws no initial values: large modules, whose weights are loaded next, are made at once.

    What a new parameter then holds is whatever was in its memory. The default generator stays where it is.
    """
    token = _is_skipped.set(True)
    try:
        yield
    finally:
        _is_skipped.reset(token)


def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Fills with U[low, high)."""
    check_tensor("uniform_", tensor)
    if not _is_skipped.get():
        default_generator.uniform(tensor.array, low, high)
    return tensor


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fills with N(mean, std²)."""
    check_tensor("normal_", tensor)
    if not _is_skipped.get():
        default_generator.normal(tensor.array, mean, std)
    return tensor


@no_grad()
def constant_(tensor: Tensor, value: float) -> Tensor:
    """Fills with one value."""
    check_tensor("constant_", tensor)
    tensor.fill_(value)
    return tensor


def kaiming_normal_(tensor: Tensor, *, mode: str = "fan_in", nonlinearity: str = "relu") -> Tensor:
    """Fills with N(0, 2 / fan), which keeps the variance through layers with ReLU, the one `nonlinearity` there is.

    `mode` is fan_in (forward) or fan_out (backward). He et al., "Delving deep into rectifiers", 2015.
    """
    if nonlinearity != "relu":
        raise ValueError(f"kaiming_normal_ is for layers with nonlinearity 'relu'; got {nonlinearity!r}")
    return normal_(tensor, 0.0, sqrt(2 / _fan(tensor, mode)))


def kaiming_uniform_(tensor: Tensor, *, mode: str = "fan_in", gain: float = sqrt(2)) -> Tensor:
    """Fills with U[-b, b), b = gain · √(3 / fan). He et al., 2015."""
    bound = gain * sqrt(3 / _fan(tensor, mode))
    return uniform_(tensor, -bound, bound)


def _fan(tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode is fan_in or fan_out, not {mode!r}")
    check_tensor("kaiming initialisation", tensor)
    if tensor.ndim < 2:
        raise ValueError(f"a fan is that of a weight with at least two dimensions; got shape {list(tensor.shape)}")
    receptive = prod(tensor.shape[2:])
    return max(1, receptive * (tensor.shape[1] if mode == "fan_in" else tensor.shape[0]))
