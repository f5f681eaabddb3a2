"""Generator: a stream of random numbers that a seed decides."""

from __future__ import annotations

from operator import index

from framework.vm.array import Array
from framework.vm.runtime import runtime


class Generator:
    """Draws from Philox4x32-10. The same seed and the same draws give the same numbers, on every device."""

    def __init__(self, seed: int = 0) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> Generator:
        """Starts again from `seed`, an integer in [0, 2⁶⁴)."""
        number = index(seed)
        if not 0 <= number < 2**64:
            raise ValueError(f"a seed is an integer from 0 to 2⁶⁴ - 1, not {seed}")
        self.seed = number
        self.offset = 0
        return self

    def uniform(self, out: Array, low: float, high: float) -> None:
        """Fills `out` from U[low, high)."""
        runtime(out.storage.device).random_uniform(out, seed=self.seed, offset=self._advance(out), low=low, high=high)

    def normal(self, out: Array, mean: float, std: float) -> None:
        """Fills `out` from N(mean, std²)."""
        runtime(out.storage.device).random_normal(out, seed=self.seed, offset=self._advance(out), mean=mean, std=std)

    def _advance(self, out: Array) -> int:
        """The block to start from; four numbers come from one block. Raises TypeError for integers."""
        if not out.dtype.is_floating:
            raise TypeError(f"random numbers are floating-point, not {out.dtype}; convert them with .to()")
        start = self.offset
        self.offset += -(-out.size // 4)
        return start


default_generator = Generator()


def manual_seed(seed: int) -> Generator:
    """Seeds the default generator, which initialisation and `rand` draw from."""
    return default_generator.manual_seed(seed)
