"""Parameter: a tensor that a module learns."""

from __future__ import annotations

from typing import Any

from framework.autograd.gradient import Home
from framework.tensor import Tensor
from framework.vm.array import Array, Layout
from framework.words import kind_of


class Parameter(Tensor):
    """A leaf tensor that requires a gradient; a module that gets it as an attribute lists it.

    `home` is where its gradient is to lie, for those who want the gradients of several in one piece of memory.
    """

    __slots__ = ("home",)
    home: Home | None

    def __new__(cls, *_: Any, **__: Any) -> Parameter:
        made = super().__new__(cls)
        # Here, since a copy is made without a call of __init__.
        made.home = None
        return made

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        if not isinstance(data, Tensor):
            raise TypeError(f"Parameter takes a tensor; got {kind_of(data)}, which flow.tensor() converts")
        super().__init__(data.array)
        self.requires_grad_(requires_grad)

    def room(self, layout: Layout) -> Array | None:
        """Memory at home for a gradient that is to be made now; None where there is none, or someone may keep what is there."""
        home = self.home
        if home is None or self.grad is not None or self._hooks or home.array.layout is not layout or home.is_lent:
            return None
        home.is_lent = True
        return home.array
