"""Storage: a block of a device's memory that arrays view, given back when the last view is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from framework.device import Device

if TYPE_CHECKING:
    from framework.vm.dependence import Uses
    from framework.vm.memory import Block, CachingAllocator


class Storage:
    """Memory on one device.

    `version` counts the writes, so that a value saved for backward can tell that it was overwritten.
    `serial` grows with every storage made, so that one can tell which came first.
    `uses` says which streams touched it, where more than one is at work.
    """

    __slots__ = ("__weakref__", "allocator", "block", "nbytes", "ptr", "serial", "uses", "version")

    _made = 0

    def __init__(self, allocator: CachingAllocator, nbytes: int) -> None:
        self.block: Block = allocator.allocate(nbytes)
        self.allocator = allocator
        self.nbytes = nbytes
        self.ptr = self.block.ptr
        self.version = 0
        self.uses: Uses | None = None
        Storage._made = self.serial = Storage._made + 1

    @property
    def device(self) -> Device:
        return self.allocator.device

    def host_buffer(self) -> Any:
        """The buffer to make NumPy views of. Raises TypeError for memory that the host cannot read."""
        return self.block.segment.memory.buffer

    def host_offset(self) -> int:
        """Where in `host_buffer` this storage starts, in bytes."""
        return self.block.offset

    def __del__(self) -> None:
        # Absent where __init__ ran out of memory.
        block = getattr(self, "block", None)
        if block is not None:
            self.allocator.give_back(block, self.uses)

    @staticmethod
    def latest_serial() -> int:
        """The serial number of the storage made last; 0 before the first."""
        return Storage._made
