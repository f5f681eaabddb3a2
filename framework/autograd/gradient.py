"""Gradient: what backward has found so far for one tensor, and whether its memory may be used again; and where it ends."""

from __future__ import annotations

from framework.vm.array import Array
from framework.vm.runtime import runtime


class Gradient:
    """A gradient as it adds up. `owned` says that nobody else holds the memory of `array`: it may be written.

    `second` is a part that is not added yet, and `second_owned` says the same of it.
    """

    __slots__ = ("array", "owned", "second", "second_owned")

    def __init__(self, array: Array, owned: bool) -> None:
        self.array = array
        self.owned = owned
        self.second: Array | None = None
        self.second_owned = False

    def add(self, array: Array, owned: bool, *, in_parts: bool = False) -> None:
        """One more gradient of the same tensor; the last one stays a part of its own where `in_parts` is set."""
        if in_parts and self.second is None:
            self.second, self.second_owned = array, owned
            return
        kernels = runtime(array.storage.device)
        if not self.owned:
            if not owned:
                total = kernels.empty_like(self.array)
                kernels.add(total, self.array, array)
                self.array, self.owned = total, True
                return
            self.array, array, self.owned = array, self.array, True
        kernels.add(self.array, self.array, array)

    def total(self) -> Array:
        """The whole gradient."""
        if self.second is not None:
            second, self.second = self.second, None
            self.add(second, self.second_owned)
        return self.array

    def owned_serials(self) -> list[int]:
        """The serials of the memory that nobody else holds. Not the memory itself: whoever is done with it may free it."""
        owned = [self.array.storage.serial] if self.owned else []
        if self.second is not None and self.second_owned:
            owned.append(self.second.storage.serial)
        return owned


class Home:
    """Where the gradient of a leaf is to lie, instead of in memory of its own.

    A backward may write the gradient there at once, if it is the first to ask: then it `is_lent`. Whoever comes second gets
    memory of its own, and what they found is added up elsewhere and copied.
    """

    __slots__ = ("array", "is_lent")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.is_lent = False

    def move_in(self, gradient: Array) -> Array:
        """The memory, with the whole gradient in it, which was made elsewhere."""
        runtime(gradient.storage.device).copy(self.array, gradient)
        return self.array
