"""Parameter: a tensor that a module learns."""

from __future__ import annotations

from framework.tensor import Tensor


class Parameter(Tensor):
    """A leaf tensor that requires a gradient; a module that gets it as an attribute lists it."""

    __slots__ = ()

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        super().__init__(data.array)
        self.requires_grad_(requires_grad)
