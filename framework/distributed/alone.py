"""A group of one rank: what its collectives come to, for which nothing has to be sent."""

from __future__ import annotations

import numpy as np

from framework.device import cpu
from framework.vm.array import Array
from framework.vm.runtime import runtime


class AloneGroup:
    """One rank, whose array is already the sum, avg, min and max of all, and the one that is broadcast.

    What remains are the copies from one array to another. They are work of the compute stream.
    """

    backend = "alone"
    rank, size = 0, 1

    def all_reduce(self, array: Array, op: str) -> None:
        """The array is what it has to become."""

    def broadcast(self, array: Array, src: int) -> None:
        """The array is what it has to become."""

    def all_gather(self, out: Array, array: Array) -> None:
        _copy(out, array)

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        _copy(out, array)

    def barrier(self, array: Array) -> None:
        """Every rank has come."""

    def send(self, array: Array, dst: int) -> None:
        raise ValueError("there is no other rank to send to")

    def recv(self, array: Array, src: int) -> None:
        raise ValueError("there is no other rank to receive from")

    def check(self) -> None:
        """Nothing can fail."""

    def close(self) -> None:
        """Nothing is held."""


def _copy(out: Array, array: Array) -> None:
    """Copies dense arrays of as many elements."""
    if array.storage.device is cpu:
        # The host's kernel takes no bfloat16.
        np.copyto(out.host_view().reshape(-1), array.host_view().reshape(-1))
    else:
        runtime(array.storage.device).table.kernels["copy"](out.view(array.shape, array.stride), array)
