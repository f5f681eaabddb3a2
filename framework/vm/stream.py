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

    Streams that run asynchronously override `wait_for`, `is_done`, `fence` and `block`. Where `runs_at_once` is not set,
    `run` only queues what it is given, so what it raises was not begun.
    """

    runs_at_once = True

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.sequence = 0
        # Up to where the device's first stream has waited for this one: what comes later on any stream is behind that.
        self.joined = 0
        self._waited: dict[Stream, int] = {}

    def mark(self) -> Mark:
        """The point behind the last instruction issued."""
        # As Mark(self, self.sequence), which costs two calls more.
        return tuple.__new__(Mark, (self, self.sequence))

    def wait(self, mark: Mark) -> None:
        """Whatever is issued here from now on runs after `mark`."""
        stream, sequence = mark
        if stream is not self and self._waited.get(stream, -1) < sequence:
            self._waited[stream] = self.wait_for(mark)

    def has_waited(self, stream: Stream) -> int:
        """Up to which instruction of another stream this one has waited; -1 where it never did."""
        return self._waited.get(stream, -1)

    def run(self, work: Callable[[], None], name: object = None) -> None:
        """Calls `work`, which launches the instruction called `name`; what it launches goes to this stream."""
        work()

    def wait_for(self, mark: Mark) -> int:
        """Lets this stream wait for `mark` of another; returns up to which of that one's instructions it now has waited.

        This one has nothing under way, so its caller is held.
        """
        mark.stream.block(mark)
        return mark.sequence

    def is_done(self, mark: Mark) -> bool:
        """Whether everything up to `mark`, a point of this stream, has run."""
        return True

    def fence(self) -> Callable[[], None] | None:
        """A function that returns, in any thread, when what has been issued by now has run; None where that is so already."""
        return None

    def block(self, mark: Mark) -> None:
        """Holds the caller until everything up to `mark`, a point of this stream, has run."""

    def synchronize(self) -> None:
        """Returns when everything issued has run."""

    def end(self) -> None:
        """Gives up the stream behind what was issued. Raises what failed there and was not raised before."""
        self.synchronize()

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {self.device})"
