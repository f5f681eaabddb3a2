"""ProcessGroup: what a backend does for a group of ranks, on arrays."""

from __future__ import annotations

from typing import Protocol

from framework.vm.array import Array


class ProcessGroup(Protocol):
    """The collectives of one backend among `size` ranks, of which this process is number `rank`.

    Arrays are dense and row-major; ranks count within the group. Groups on the host (`shm`, `mpi`) return when the
    collective is done and raise CollectiveError where it fails; `nccl` enqueues it on the CUDA stream that is current for
    the array's device. A group is used by one thread at a time, and by every rank in the same order.

    `prepared`, where a group has it, does once what is the same in every call of a collective of one array:
    `prepared("all_reduce", array, op="sum")` gives a function that calls it, at less cost for each call.
    """

    backend: str
    rank: int
    size: int

    def all_reduce(self, array: Array, op: str) -> None:
        """Replaces every rank's array by the reduction of all."""
        ...

    def broadcast(self, array: Array, src: int) -> None:
        """Replaces every rank's array by that of rank `src`."""
        ...

    def all_gather(self, out: Array, array: Array) -> None:
        """Puts the ranks' arrays one behind the other into `out`, which has `size` times as many elements."""
        ...

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        """Cuts every rank's array into `size` pieces; the reduction of the pieces number `rank` goes to `out`."""
        ...

    def barrier(self, array: Array) -> None:
        """Returns, or lets the stream go on, when every rank has come; `array` is one element to work on."""
        ...

    def send(self, array: Array, dst: int) -> None:
        """Sends an array to one rank, which has to receive it."""
        ...

    def recv(self, array: Array, src: int) -> None:
        """Receives an array that rank `src` sends."""
        ...

    def check(self) -> None:
        """Raises CollectiveError if the group failed before and cannot be used any more."""
        ...

    def close(self) -> None:
        """Gives back what the group holds. Raises CollectiveError where one had failed and nobody was told."""
        ...
