"""Buffers of a module in one piece of memory, so that one collective makes them the same on every rank."""

from __future__ import annotations

from framework import distributed
from framework.distributed.collectives import Repeated
from framework.nn.counter import Counter
from framework.nn.module import Module
from framework.tensor import Tensor
from framework.vm.array import Array, dense_stride_like
from framework.vm.runtime import runtime
from framework.vm.storage import SharedStorage


class FlatBuffers:
    """A module's buffers, moved together by element type and device.

    Counters stay where they are: each rank counts its batches on the host, and comes to the same number.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._flats: list[Array] = []
        # From which rank, in which group.
        self._broadcasts: dict[tuple[int, distributed.Group], list[Repeated]] = {}
        self._homes: list[object] = []
        self._arrays: list[Array] = []
        self._find()
        self._move()

    def broadcast(self, src: int, group: distributed.Group) -> None:
        """Replaces the buffers of all ranks by those of rank `src` (its number in the world)."""
        if self._changes != Module.changes:
            self._find()
        arrays = [buffer.array for buffer in self._buffers]
        if arrays != self._arrays:
            # Others, or written in place since.
            if [array.storage for array in arrays] != self._homes:
                self._move()  # the module was converted or moved since
            self._arrays = [buffer.array for buffer in self._buffers]
        calls = self._broadcasts.get((src, group))
        if calls is None:
            calls = [Repeated.broadcast(flat, src, group) for flat in self._flats]
            self._broadcasts[src, group] = calls
        for work in [call.issue() for call in calls]:
            work.wait()

    def _find(self) -> None:
        self._changes = Module.changes
        self._buffers = [buffer for buffer in self._module.buffers() if not isinstance(buffer, Counter)]

    def _move(self) -> None:
        kinds: dict[object, list[Tensor]] = {}
        for buffer in self._buffers:
            kinds.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._flats = []
        self._broadcasts.clear()
        for alike in kinds.values():
            kernels = runtime(alike[0].device)
            flat = kernels.empty((sum(buffer.numel() for buffer in alike),), alike[0].dtype)
            offset = 0
            for buffer in alike:
                shape, stride = buffer.shape, dense_stride_like(buffer.shape, buffer.stride())
                # A counter of writes of its own: writing one buffer must not look like writing another that backward needs.
                part = Array(SharedStorage(flat.storage), shape, stride, buffer.dtype, offset)
                kernels.copy(part, buffer.array)
                buffer.array = part
                offset += buffer.numel()
            self._flats.append(flat)
        self._homes = [buffer.array.storage for buffer in self._buffers]
