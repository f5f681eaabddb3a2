"""A device that is none: memory that is only counted, and streams that run when they are told to."""

from __future__ import annotations

from dataclasses import dataclass

from framework.device import Device, cpu
from framework.vm import Mark, Stream


@dataclass(frozen=True)
class FakeMemory:
    """A range of addresses."""

    ptr: int
    nbytes: int
    buffer: None = None


class FakeSource:
    """Gives ranges of addresses that are never given twice, until `capacity` bytes are out."""

    device: Device = cpu
    title = "cpu"
    slack = 0.0

    def __init__(
        self, capacity: int = 1 << 40, granularity: int = 4096, segment_bytes: int = 1 << 20, start: int = 1 << 20
    ) -> None:
        self.capacity = capacity
        self.granularity = granularity
        self.segment_bytes = segment_bytes
        self.out: dict[int, FakeMemory] = {}
        self.asked: list[int] = []
        self._next = start

    @property
    def given(self) -> int:
        """Bytes that are out."""
        return sum(memory.nbytes for memory in self.out.values())

    def reserve(self, nbytes: int) -> FakeMemory:
        """A new range. Raises MemoryError where the capacity is used up."""
        self.asked.append(nbytes)
        if self.given + nbytes > self.capacity:
            raise MemoryError(f"no {nbytes} bytes left")
        memory = FakeMemory(self._next, nbytes)
        self._next += nbytes + 4096
        self.out[memory.ptr] = memory
        return memory

    def release(self, memory: FakeMemory) -> None:
        """Takes a range back."""
        del self.out[memory.ptr]

    def available(self) -> None:
        """Keeps it to itself."""


class FakeStream(Stream):
    """An asynchronous stream: nothing is done before `finish`. It keeps which marks it was made to wait for."""

    def __init__(self, name: str = "fake") -> None:
        super().__init__(cpu, name)
        self.done = 0
        self.waits: list[tuple[str, int]] = []
        self.synchronized = 0

    def wait_for(self, mark: Mark) -> int:
        """Notes the wait, which covers all that was issued there by now."""
        self.waits.append((mark.stream.name, mark.sequence))
        return mark.stream.sequence

    def is_done(self, mark: Mark) -> bool:
        """Whether `finish` was called that far."""
        return mark.sequence <= self.done

    def block(self, mark: Mark) -> None:
        """Runs all."""
        self.synchronize()

    def finish(self, sequence: int | None = None) -> None:
        """Everything up to instruction number `sequence` (all) has run."""
        self.done = self.sequence if sequence is None else sequence

    def synchronize(self) -> None:
        """Runs all."""
        self.synchronized += 1
        self.finish()
