"""Streams: queues of instructions, each run in order, and how one waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from framework.device import Device


class Mark(NamedTuple):
    """A point in a stream: everything issued to it up to and including instruction number `sequence`."""

    stream: Stream
    sequence: int


class Stream:
    """A queue on a device. This one runs each instruction at once, in the caller's thread.

    Streams that run asynchronously override `wait_for` and `is_done`.
    """

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.sequence = 0
        self._waited: dict[Stream, int] = {}

    def mark(self) -> Mark:
        """The point behind the last instruction issued."""
        return Mark(self, self.sequence)

    def wait(self, mark: Mark) -> None:
        """Whatever is issued here from now on runs after `mark`."""
        if mark.stream is self or self._waited.get(mark.stream, -1) >= mark.sequence:
            return
        self.wait_for(mark)
        # The wait covers all that was issued there by now, so earlier and equal marks need no second one.
        self._waited[mark.stream] = mark.stream.sequence

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work`, which launches an instruction; what it launches goes to this stream."""
        work()

    def wait_for(self, mark: Mark) -> None:
        """Makes the device wait. Nothing to do where every instruction has run when its issue returns."""

    def is_done(self, mark: Mark) -> bool:
        """Whether everything up to `mark`, a point of this stream, has run."""
        return True

    def synchronize(self) -> None:
        """Returns when everything issued has run."""

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {self.device})"
