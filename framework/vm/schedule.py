"""What of a backward may leave the compute stream: the policy, and the streams of the one that is there to be measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from framework.device import Device
from framework.vm.host_stream import HostStream
from framework.vm.machine import machine
from framework.vm.runtime import runtime
from framework.vm.stream import Stream

POLICIES = ("accumulate", "backward", "single")
STREAMS = 4


@contextmanager
def scheduled(policy: str) -> Iterator[None]:
    """Within it, `policy` decides what may leave the compute stream. Not for two threads at once.

    `accumulate`, the default: only what ends in a parameter's gradient, that is its accumulation and its all-reduce.
    `backward`: each operation's backward goes to one of several streams. What one stream holds, another cannot use until it is
    done, and more of the backward is under way at once: it takes more memory, which is why it is not the default.
    `single`: nothing, collectives included.
    """
    global _backward
    if policy not in POLICIES:
        raise ValueError(f"a scheduling policy is one of {', '.join(POLICIES)}, not {policy!r}")
    outer, _backward = _backward, _Spread() if policy == "backward" else None
    outer_keeps, machine.keeps_to_first = machine.keeps_to_first, policy == "single"
    try:
        yield
    finally:
        machine.keeps_to_first = outer_keeps
        spread, _backward = _backward, outer
        if spread is not None:
            spread.close()


@contextmanager
def backward() -> Iterator[Callable[[Device], None] | None]:
    """Around one backward: a function to call before each node's work on a device; None where all stays where it is."""
    if _backward is None:
        yield None
        return
    with ExitStack() as stack:
        yield _backward.walk(stack)


class _Spread:
    """Several streams for each device, which nodes take in turns."""

    def __init__(self) -> None:
        self._streams: dict[Device, list[Stream]] = {}
        self._turns = count()

    def walk(self, stack: ExitStack) -> Callable[[Device], None]:
        """The function that moves to the next stream; `stack` leaves the last one."""

        def move(device: Device) -> None:
            stack.close()
            streams = self._of(device)
            stack.enter_context(machine.using(streams[next(self._turns) % len(streams)]))

        return move

    def close(self) -> None:
        """Ends the streams behind what they do. Raises what failed there."""
        with ExitStack() as stack:
            for device, streams in self._streams.items():
                for stream in streams:
                    stack.callback(runtime(device).close_stream, stream)

    def _of(self, device: Device) -> list[Stream]:
        if device not in self._streams:
            names = [f"backward {number}" for number in range(STREAMS)]
            if device.type == "cpu":
                made: list[Stream] = [machine.add_stream(TurnStream(device, name)) for name in names]
            else:
                made = [runtime(device).open_stream(name) for name in names]
            self._streams[device] = made
        return self._streams[device]


class TurnStream(HostStream):
    """A stream of the host whose kernels take turns with those of its kind: they share the cores, and one pool of threads."""

    turn = threading.Lock()

    def run(self, work: Callable[[], None], name: object = None) -> None:
        """Queues `work`, to be called when it is its turn."""

        def in_turn() -> None:
            with self.turn:
                work()

        super().run(in_turn, name)


_backward: _Spread | None = None
