"""How many threads the CPU's kernels use."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

from framework.kernels import onednn


def set_num_threads(count: int) -> None:
    """Lets oneDNN's kernels use `count` threads. NumPy's own are set by its library's environment, before import."""
    if not isinstance(count, SupportsIndex) or index(count) < 1:
        raise ValueError(f"a number of threads is an integer of at least 1, not {count!r}")
    if onednn.available():
        onednn.set_num_threads(count)


def get_num_threads() -> int:
    """The threads that oneDNN's kernels use; 1 without oneDNN."""
    return onednn.get_num_threads() if onednn.available() else 1
