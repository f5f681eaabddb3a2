"""What an allocator deals in: memory that a source gives, as segments cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from framework.device import Device
from framework.vm import scope

if TYPE_CHECKING:
    from framework.vm.overlay import Overlay


class Memory(Protocol):
    """Raw memory of a device, as its source gives it. `buffer` is what NumPy can view, on the host."""

    ptr: int

    @property
    def buffer(self) -> Any: ...


class Source(Protocol):
    """Where an allocator gets its memory: the operating system, a driver.

    `title` is what people call it. `granularity` rounds every block, `segment_bytes` is the least to ask for at once, both in
    bytes. `slack` is how much more than was ever allocated may be reserved, as a fraction, so that blocks keep their addresses.
    """

    device: Device
    title: str
    granularity: int
    segment_bytes: int
    slack: float

    def reserve(self, nbytes: int) -> Memory:
        """`nbytes` of memory. Raises MemoryError where there is none."""
        ...

    def release(self, memory: Any) -> None: ...

    def available(self) -> int | None:
        """Bytes that could still be had, by anyone; None where nobody can tell."""
        ...


# The keys of free blocks that are alike, sorted: the last one is that of the lowest address.
Siblings = list[int]


class Segment:
    """A piece of memory got from the source, cut into blocks."""

    __slots__ = ("first", "memory", "nbytes")

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self.memory = memory
        self.nbytes = nbytes
        self.first: Block | None = None

    def blocks(self) -> Iterator[Block]:
        """All its blocks, by address."""
        block = self.first
        while block is not None:
            yield block
            block = block.next


class Block:
    """A part of a segment: in use, or free. `label` says in which module and operation it was asked for.

    `siblings` is the list it goes back to: that of the free small blocks of its size, or that of the large blocks
    kept for the next request like the one it served last. `is_small` says which. `free` says of a large one that it is
    ready to be cut and joined with its neighbours, which one that is kept is not. `overlay` is what it shares its memory
    with, None for most. `key` is how that list and the allocator's books call it.
    """

    __slots__ = (
        "free", "in_use", "is_small", "key", "label", "nbytes", "next", "offset", "overlay", "previous", "ptr", "segment",
        "siblings",
    )  # fmt: skip

    def __init__(self, segment: Segment, offset: int, nbytes: int, siblings: Siblings | None = None) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.ptr = segment.memory.ptr + offset
        self.key = -self.ptr
        self.is_small = siblings is not None
        self.siblings: Siblings = [] if siblings is None else siblings
        self.free = not self.is_small
        self.in_use = False
        self.overlay: Overlay | None = None
        self.label: scope.Frame | None = None
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_unused(self) -> bool:
        """Whether its memory could go back to the source."""
        return not self.in_use if self.is_small else self.free


def link(first: Block | None, second: Block | None) -> None:
    """Makes two blocks neighbours; None stands for an end of the segment."""
    if first is not None:
        first.next = second
    if second is not None:
        second.previous = first
