"""The virtual machine: issues every instruction, and is the one place that knows of streams, waits and observers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from framework.device import Device, cpu
from framework.kernels.table import Kernel
from framework.vm import dependence, scope
from framework.vm.array import Array
from framework.vm.instruction import Instruction
from framework.vm.stream import Mark, Stream

Observer = Callable[[Instruction, Callable[[], None]], None]


class Machine:
    """Issues instructions to streams.

    The first stream of a device takes what names no other. As long as nothing of another stream is outstanding there is
    nothing to wait for and nothing is noted: what was issued to another stream is kept per storage, until the first one
    has waited for it.
    """

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._firsts: dict[Device, Stream] = {}
        self._observers: list[Observer] = []
        # Whether what names another stream goes to the first one all the same.
        self.keeps_to_first = False
        # Where a kernel's working memory is used, while its instruction is issued to another than the first stream.
        self._launching: Mark | None = None
        # Whether other streams have something that some first one has not waited for.
        self._outstanding = False
        # Whether devices ever read memory of the host by themselves. What they do is nothing that the host's stream, which
        # runs at once, could be behind: it looks at what it writes even where nothing else is outstanding.
        self._lends = False
        # How many threads, or nested blocks of one, have chosen where their instructions go.
        self._redirections = 0
        # One test on the way of every instruction: is there more to do than to run it?
        self._plain = True

    @property
    def is_plain(self) -> bool:
        """Whether instructions of first streams are run without a further look at them."""
        return self._plain

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of all devices."""
        return tuple(self._streams)

    def add_stream(self, stream: Stream) -> Stream:
        """Makes a stream known; a device's first one is where its instructions go. Its work comes after all issued before."""
        first = self._firsts.setdefault(stream.device, stream)
        stream.wait(first.mark())
        self._streams.append(stream)
        return stream

    def remove_stream(self, stream: Stream) -> None:
        """Ends a stream behind what was issued to it. Raises what failed there unseen, having forgotten the stream."""
        try:
            stream.end()
        finally:
            self._streams.remove(stream)
            if self._firsts.get(stream.device) is stream:
                del self._firsts[stream.device]
            stream.joined = stream.sequence
            self._update()

    def issue(self, instruction: Instruction, stream: Stream | None = None) -> None:
        """Runs an instruction on `stream` (its device's first one where none is named)."""
        kernel = instruction.kernel
        _count_writes(instruction.operands[: kernel.outputs])
        if stream is None and self._redirections:
            stream = _thread.streams.get((instruction.writes or instruction.reads)[0].storage.device)
        if stream is None and self._plain and not self._lends:
            kernel(*instruction.operands, **instruction.attributes)
        else:
            self._issue(instruction, stream)

    def issuing(self, kernel: Kernel, device: Device) -> Callable[..., None]:
        """A function that issues `kernel` with the operands and attributes it is given, on the first stream of `device`.

        As `issue`, at less cost: where there is only to run the kernel, no instruction is made.
        """
        outputs, is_host = kernel.outputs, device is cpu

        def issue_kernel(*operands: Any, **attributes: Any) -> None:
            if (not self._plain or (is_host and self._lends)) and (
                self._observers or self._redirections or _must_wait(operands, outputs)
            ):
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

    def issuing_prepared(
        self, kernel: Kernel, device: Device, attributes: dict[str, Any], run: Callable[..., None]
    ) -> Callable[..., None]:
        """As `issuing`, for calls with these attributes, where `run` does with the operands what the kernel does."""
        outputs, is_host = kernel.outputs, device is cpu

        def issue_kernel(*operands: Array | None) -> None:
            if not self._plain or (is_host and self._lends):
                # Where there is more to do than to run it; mostly no operand was used by another stream.
                is_more = self._observers or self._redirections
                for operand in operands:
                    if operand is not None and operand.storage.uses is not None:
                        is_more = is_more or _must_wait(operands, outputs)
                        break
                if is_more:
                    self.issue(Instruction(kernel, operands, attributes))
                    return
            for operand in operands[:outputs]:
                if operand is not None:
                    operand.storage.version += 1
            run(*operands)

        return issue_kernel

    def repeating(
        self, instruction: Instruction, stream: Stream, run: Callable[[], None] | None = None
    ) -> Callable[[], Mark]:
        """A function that issues `instruction`, all of whose arrays it writes, to `stream`; it gives the point behind it.

        As `issue`, at less cost: what never changes about it is settled once. `run` does what the instruction does.
        """
        first, run = self._firsts[stream.device], run or instruction.run
        arrays, behind = instruction.writes, Mark(first, _NEWEST)

        def issue_again() -> Mark:
            # Some times in every step, when other things are in the caches: each function called here counts.
            instruction.scope = scope.current
            if stream is first or self._observers or self.keeps_to_first:
                self.issue(instruction, stream)
                return self.newest(stream)
            stream.wait(behind)
            for array in arrays:
                array.storage.version += 1
                uses = array.storage.uses
                if uses is not None and not uses.is_joined():
                    dependence.wait((), (array,), stream)
            stream.sequence += 1
            self._launching = mark = stream.mark()
            try:
                stream.run(run, instruction)
            except BaseException:
                if stream.runs_at_once:
                    self._note([], arrays, mark)
                raise
            finally:
                self._launching = None
            self._note([], arrays, mark)
            return mark

        return issue_again

    def settle(self, array: Array) -> None:
        """Lets the first stream of the array's device wait for all other use of it: before the host takes it in hand."""
        uses = array.storage.uses
        if uses is not None:
            for mark in uses.marks():
                if mark.stream.device is array.storage.device:
                    self.join(mark)
                else:
                    # Of a copy to another device: only memory of the host has such uses, and the host waits.
                    self._firsts[array.storage.device].wait(mark)

    def join(self, mark: Mark) -> None:
        """Lets the first stream of the mark's device wait for `mark`. Raises what failed there, where that is known."""
        first = self._firsts[mark.stream.device]
        if mark.stream is first:
            return
        first.wait(mark)
        stream, sequence = mark
        if stream.joined < sequence:
            stream.joined = first.has_waited(stream)
            self._update()

    def hold(self, array: Array, stream: Stream) -> None:
        """Notes that what was just issued to `stream`, which may be a first one, reads an array of the host.

        Whoever writes the array on the host, or is given its memory, comes after that.
        """
        dependence.hold(array, stream)
        self._lends = True

    def newest(self, stream: Stream) -> Mark:
        """The point behind what was issued last for a stream, also on a first one, which does not count its instructions."""
        first = self._firsts.get(stream.device)
        if self.keeps_to_first and first is not None:
            stream = first
        if stream is first:
            stream.sequence += 1
        return stream.mark()

    def lend(self, array: Array) -> Array:
        """Notes that working memory is used by the instruction that is just being issued; returns it."""
        if self._launching is not None:
            dependence.note_write(array, self._launching)
        return array

    def current_stream(self, device: Device) -> Stream:
        """Where this thread's instructions for `device` go: to its first stream, or to the one that `using` names."""
        first = self._firsts[device]
        return first if self.keeps_to_first else _thread.streams.get(device, first)

    def goes_to_first(self, device: Device) -> bool:
        """Whether this thread's instructions for `device` go to its first stream, but could go elsewhere, unobserved."""
        return not (self._observers or self.keeps_to_first or device in _thread.streams)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        """Within it, this thread's instructions for the stream's device go to that stream where they name no other."""
        outer = _thread.streams.get(stream.device)
        _thread.streams[stream.device] = stream
        self._redirections += 1
        self._update()
        try:
            yield
        finally:
            self._redirections -= 1
            self._update()
            if outer is None:
                del _thread.streams[stream.device]
            else:
                _thread.streams[stream.device] = outer

    def synchronize(self, device: Device | None = None) -> None:
        """Returns when everything issued to any stream, or any of `device`, has run."""
        for stream in tuple(self._streams):
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

    def _issue(self, instruction: Instruction, stream: Stream | None) -> None:
        run = instruction.run
        for observer in self._observers:
            run = _bind(observer, instruction, run)
        writes, reads = instruction.writes, instruction.reads
        arrays = writes or reads
        first = self._firsts[stream.device if stream is not None and not arrays else arrays[0].storage.device]
        if stream is None or stream is first or self.keeps_to_first:
            if self._outstanding or self._lends:
                dependence.wait(reads, writes, first)
                for array in writes:
                    # From now on whoever follows the first stream follows all others that used it.
                    array.storage.uses = None
                self._note_joined(first)
            first.run(run, instruction)
            return
        stream.wait(Mark(first, _NEWEST))
        dependence.wait(reads, writes, stream)
        stream.sequence += 1
        self._launching = mark = stream.mark()
        try:
            stream.run(run, instruction)
        except BaseException:
            if stream.runs_at_once:
                self._note(reads, writes, mark)  # some of it may have been launched
            raise
        finally:
            self._launching = None
        self._note(reads, writes, mark)

    def _note(self, reads: list[Array], writes: list[Array], mark: Mark) -> None:
        dependence.note(reads, writes, mark)
        self._outstanding = True
        self._plain = False

    def _note_joined(self, first: Stream) -> None:
        """Keeps what `first` has waited for. Where nothing is outstanding the machine is back to what one stream costs."""
        for stream in tuple(self._streams):
            if stream.device is first.device:
                stream.joined = max(stream.joined, first.has_waited(stream))
        self._update()

    def _update(self) -> None:
        self._outstanding = False
        for stream in tuple(self._streams):
            if stream.joined < stream.sequence and self._firsts.get(stream.device) is not stream:
                self._outstanding = True
        self._plain = not (self._outstanding or self._observers or self._redirections)


class _Thread(threading.local):
    """The streams that a thread has chosen, by device."""

    def __init__(self) -> None:
        self.streams: dict[Device, Stream] = {}


_thread = _Thread()

# Behind whatever was issued so far: the first streams do not count their instructions.
_NEWEST = 1 << 62


def _must_wait(operands: tuple, outputs: int) -> bool:
    """Whether another stream than the first wrote an operand, or used one that is to be written; for tuples, perhaps."""
    for place, operand in enumerate(operands):
        if type(operand) is Array:
            uses = operand.storage.uses
            if uses is not None:
                if uses.is_joined():
                    # Looked at once, not with every instruction to come.
                    operand.storage.uses = None
                elif (uses.write is not None or place < outputs) and uses.touch(operand):
                    return True
        elif type(operand) is tuple:
            return True
    return False


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
