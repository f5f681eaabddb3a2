"""Storage: a block of a device's memory that arrays view, given back when the last view is gone."""

from __future__ import annotations

from itertools import count

from framework.device import Device
from framework.vm.allocator import CachingAllocator
from framework.vm.block import Block
from framework.vm.uses import Uses

# A count is stepped atomically, whichever threads make storages.
_serials = count(1)


class Storage:
    """Memory on one device.

    `version` counts the writes, so that a value saved for backward can tell that it was overwritten.
    `serial` grows with every storage made, so that one can tell which came first.
    `uses` says which streams touched it, where more than one is at work.
    """

    __slots__ = ("__weakref__", "allocator", "block", "device", "nbytes", "ptr", "serial", "uses", "version")

    def __init__(self, allocator: CachingAllocator, nbytes: int) -> None:
        self.block: Block = allocator.allocate(nbytes)
        self.allocator = allocator
        self.device: Device = allocator.device
        self.nbytes = nbytes
        self.ptr = self.block.ptr
        self.version = 0
        self.uses: Uses | None = None
        self.serial = next(_serials)

    def __del__(self) -> None:
        # Absent where __init__ ran out of memory.
        try:
            block = self.block
        except AttributeError:
            return
        # As `give_back`, which costs a call for every storage.
        self.allocator.returned.append((block, self.uses))

    @staticmethod
    def next_serial() -> int:
        """A number above the serial of every storage made so far, and below that of every later one."""
        return next(_serials)


class SharedStorage(Storage):
    """The memory of another storage, with a version of its own: for arrays in one piece of memory that are written apart.

    Which streams use it is noted of the whole memory, as for all its parts.
    """

    __slots__ = ("whole",)

    def __init__(self, whole: Storage) -> None:
        self.whole = whole
        self.allocator, self.block, self.device = whole.allocator, whole.block, whole.device
        self.nbytes, self.ptr = whole.nbytes, whole.ptr
        self.version = 0
        self.serial = next(_serials)

    @property
    def uses(self) -> Uses | None:
        """Who used the memory last."""
        return self.whole.uses

    @uses.setter
    def uses(self, uses: Uses | None) -> None:
        self.whole.uses = uses

    def __del__(self) -> None:
        """The whole gives the memory back."""
