"""Counter: a number that a module counts on the host, as a tensor for whoever looks at it."""

from __future__ import annotations

from framework.creation import zeros
from framework.dtype import int64
from framework.tensor import Tensor
from framework.vm.array import Array
from framework.vm.runtime import runtime


class Counter(Tensor):
    """A 0-d tensor of int64 that starts at 0.

    Counting costs no instruction: the memory is brought up to date when `array` is asked for, that is, by whatever
    reads or writes the tensor. A tensor that shares its memory, such as `state_dict()` gives, shows the number at the
    time it was made or of the last look.
    """

    __slots__ = ("_memory", "_uncounted")

    _uncounted: int

    def __init__(self) -> None:
        super().__init__(zeros((), dtype=int64).array)

    def count(self) -> None:
        """Adds 1."""
        self._uncounted += 1

    @property
    def array(self) -> Array:
        """The number's memory."""
        if self._uncounted:
            added, self._uncounted = self._uncounted, 0
            runtime(self._memory.storage.device).add(self._memory, self._memory, added)
        return self._memory

    @array.setter
    def array(self, array: Array) -> None:
        self._memory, self._uncounted = array, 0
