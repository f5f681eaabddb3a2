"""The shm backend for CUDA tensors: through the host's memory, so that ranks may also share a GPU. Slow, and always right."""

from __future__ import annotations

from framework.device import Device, cpu
from framework.distributed.shm import ShmGroup
from framework.vm.array import Array
from framework.vm.cuda import CudaStream
from framework.vm.runtime import runtime
from framework.vm.transfer import Staging


class StagedGroup:
    """A group on the host, for arrays of a CUDA device: each is copied there and back. To be used in a host stream."""

    backend = "shm"

    def __init__(self, group: ShmGroup, device: Device) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self._stream = CudaStream(device, "staging")
        self._staging = Staging(self._stream)

    def all_reduce(self, array: Array, op: str) -> None:
        host = self._fetch(array)
        self._group.all_reduce(host, op)
        self._put(array, host)

    def broadcast(self, array: Array, src: int) -> None:
        host = self._fetch(array) if src == self.rank else self._like(array)
        self._group.broadcast(host, src)
        if src != self.rank:
            self._put(array, host)

    def all_gather(self, out: Array, array: Array) -> None:
        host = self._like(out)
        self._group.all_gather(host, self._fetch(array))
        self._put(out, host)

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        host = self._like(out)
        self._group.reduce_scatter(host, self._fetch(array), op)
        self._put(out, host)

    def barrier(self, array: Array) -> None:
        self._group.barrier(array)

    def send(self, array: Array, dst: int) -> None:
        self._group.send(self._fetch(array), dst)

    def recv(self, array: Array, src: int) -> None:
        host = self._like(array)
        self._group.recv(host, src)
        self._put(array, host)

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        self._group.close()

    def _like(self, array: Array) -> Array:
        return runtime(cpu).empty(array.shape, array.dtype)

    def _fetch(self, array: Array) -> Array:
        """A copy on the host. What wrote the array has run: the host stream waits for it."""
        host = self._like(array)
        if array.size:
            self._staging.receive(host.host_view(), array.ptr)
        return host

    def _put(self, array: Array, host: Array) -> None:
        """Copies back; done when it returns, as all that a host stream runs."""
        self._staging.send(array.ptr, host.host_view())
        self._stream.synchronize()
