"""The virtual machine: issues every instruction, and is the one place that knows of streams, waits and observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from framework.vm import dependence
from framework.vm.array import Array
from framework.vm.instruction import Instruction
from framework.vm.stream import Stream

Observer = Callable[[Instruction, Callable[[], None]], None]


class Machine:
    """Issues instructions to streams.

    With one stream there is nothing to wait for and nothing is noted. When a second one comes, it first waits
    for everything issued so far; from then on each storage keeps its last users.
    """

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._observers: list[Observer] = []
        # One test on the way of every instruction: is there more to do than to run it?
        self._plain = True

    def add_stream(self, stream: Stream) -> Stream:
        """Makes a stream known. Work issued to it comes after everything issued before."""
        for other in self._streams:
            stream.wait(other.mark())
        self._streams.append(stream)
        self._update()
        return stream

    def remove_stream(self, stream: Stream) -> None:
        """Forgets a stream, once everything issued to it has run."""
        stream.synchronize()
        self._streams.remove(stream)
        self._update()

    def issue(self, instruction: Instruction, stream: Stream | None = None) -> None:
        """Runs an instruction on `stream` (the first one made known where none is named)."""
        kernel = instruction.kernel
        for operand in instruction.operands[: kernel.outputs]:
            if type(operand) is Array:
                operand.storage.version += 1
            elif operand is not None:
                for array in operand:
                    array.storage.version += 1
        if self._plain:
            kernel(*instruction.operands, **instruction.attributes)
        else:
            self._issue(instruction, stream or self._streams[0])

    def synchronize(self) -> None:
        """Returns when everything issued to any stream has run."""
        for stream in self._streams:
            stream.synchronize()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Calls `observer(instruction, run)` in place of each instruction; the observer calls `run`."""
        self._observers.append(observer)
        self._update()
        try:
            yield
        finally:
            self._observers.remove(observer)
            self._update()

    def _issue(self, instruction: Instruction, stream: Stream) -> None:
        run = instruction.run
        for observer in self._observers:
            run = _bind(observer, instruction, run)
        if len(self._streams) < 2:
            run()
            return
        dependence.wait(instruction, stream)
        stream.sequence += 1
        run()
        dependence.note(instruction, stream.mark())

    def _update(self) -> None:
        self._plain = len(self._streams) < 2 and not self._observers


def _bind(observer: Observer, instruction: Instruction, run: Callable[[], None]) -> Callable[[], None]:
    return lambda: observer(instruction, run)


machine = Machine()
