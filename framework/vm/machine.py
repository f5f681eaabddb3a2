"""The virtual machine: issues every instruction, and is the one place that knows of streams, waits and observers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from framework.device import Device
from framework.kernels.table import Kernel
from framework.vm import dependence
from framework.vm.array import Array
from framework.vm.instruction import Instruction
from framework.vm.stream import Stream

Observer = Callable[[Instruction, Callable[[], None]], None]


class Machine:
    """Issues instructions to streams.

    With one stream a device there is nothing to wait for and nothing is noted. When a device gets a second one, it
    first waits for everything issued so far; from then on each storage keeps its last users.
    """

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._observers: list[Observer] = []
        # Whether some device has several streams.
        self._parallel = False
        # One test on the way of every instruction: is there more to do than to run it?
        self._plain = True

    def add_stream(self, stream: Stream) -> Stream:
        """Makes a stream known. Work issued to it comes after everything issued before."""
        for other in self._streams:
            if other.device is stream.device:
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
        """Runs an instruction on `stream` (its device's first one where none is named)."""
        kernel = instruction.kernel
        _count_writes(instruction.operands[: kernel.outputs])
        if self._plain:
            kernel(*instruction.operands, **instruction.attributes)
        else:
            self._issue(instruction, stream or self._first_stream(instruction))

    def issuing(self, kernel: Kernel) -> Callable[..., None]:
        """A function that issues `kernel` with the operands and attributes it is given, on the device's first stream.

        As `issue`, at less cost: where there is only to run the kernel, no instruction is made.
        """
        outputs = kernel.outputs

        def issue_kernel(*operands: Any, **attributes: Any) -> None:
            if not self._plain:
                self.issue(Instruction(kernel, operands, attributes))
                return
            # As `_count_writes`, which costs a call for every instruction.
            for operand in operands[:outputs]:
                if type(operand) is Array:
                    operand.storage.version += 1
                elif operand is not None:
                    for array in operand:
                        array.storage.version += 1
            kernel(*operands, **attributes)

        return issue_kernel

    def synchronize(self, device: Device | None = None) -> None:
        """Returns when everything issued to any stream, or any of `device`, has run."""
        for stream in self._streams:
            if device is None or stream.device is device:
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
        if not self._parallel:
            run()
            return
        dependence.wait(instruction, stream)
        stream.sequence += 1
        stream.run(run)
        dependence.note(instruction, stream.mark())

    def _first_stream(self, instruction: Instruction) -> Stream:
        device = instruction.writes[0].storage.device
        return next(stream for stream in self._streams if stream.device is device)

    def _update(self) -> None:
        self._parallel = len({stream.device for stream in self._streams}) < len(self._streams)
        self._plain = not self._parallel and not self._observers


def _count_writes(operands: tuple) -> None:
    for operand in operands:
        if type(operand) is Array:
            operand.storage.version += 1
        elif operand is not None:
            for array in operand:
                array.storage.version += 1


def _bind(observer: Observer, instruction: Instruction, run: Callable[[], None]) -> Callable[[], None]:
    return lambda: observer(instruction, run)


machine = Machine()
