"""A model of devices that tells for any two instructions whether one is certain to end before the other begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from framework.device import Device, cpu
from framework.dtype import float32
from framework.kernels import kernel
from framework.vm import Array, CachingAllocator, Instruction, Mark, Storage, Stream, side_stream
from framework.vm.machine import Machine
from framework.vm.side_stream import SideStream
from tests.framework.vm.fakes import FakeSource

DEVICE = Device("cuda:0")  # by its name alone
STREAMS = 3


class OrderError(AssertionError):
    """An instruction may run while another still uses the same elements."""


@dataclass
class Use:
    """What one instruction reads and writes, by the addresses of elements, and what is certain to have ended before it."""

    stream: ModelStream
    number: int
    after: dict[Stream, int]
    reads: set[int]
    writes: set[int]
    name: str


class World:
    """What every stream was given. `known` is how much of each the host knows to have run, `ran` how much has."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.known: dict[Stream, int] = {}
        self.ran: dict[Stream, int] = {}
        self.current: dict[Device, ModelStream] = {}

    def use(self, writes: list[Array], reads: list[Array], name: str) -> None:
        """An instruction comes to the stream that is current for what it writes. Raises OrderError."""
        stream = self.current[writes[0].storage.device]
        after = _latest(stream.after, self.known)
        use = Use(stream, len(stream.entries), after, _elements(reads), _elements(writes), name)
        for earlier in self.uses:
            shared = (use.writes & (earlier.writes | earlier.reads)) | (use.reads & earlier.writes)
            if shared and earlier.stream is not stream and after.get(earlier.stream, 0) <= earlier.number:
                raise OrderError(f"{name} on {stream!r} may run before {earlier.name} on {earlier.stream!r} has ended")
        self.uses.append(use)
        stream.entries.append(after)
        stream.after = _latest(after, {stream: len(stream.entries)})
        if stream.device is cpu:
            self.run(stream, len(stream.entries))
            self.know(stream)

    def run(self, stream: ModelStream, count: int) -> None:
        """Lets a stream run so far, and others as far as that needs."""
        if self.ran.get(stream, 0) < count:
            self.ran = _latest(self.ran, {stream: count}, stream.entries[count - 1])

    def know(self, stream: ModelStream) -> None:
        """The host sees how far a stream has come."""
        count = self.ran.get(stream, 0)
        if count:
            self.known = _latest(self.known, {stream: count}, stream.entries[count - 1])


class ModelStream(Stream):
    """A stream of a device that runs whenever it likes, or, on the host, at once. `after` must have run before what comes."""

    def __init__(self, world: World, device: Device, name: str) -> None:
        super().__init__(device, name)
        self.world = world
        self.entries: list[dict[Stream, int]] = []
        self.after: dict[Stream, int] = {}
        self._checkpoints: list[tuple[int, int]] = []
        world.current.setdefault(device, self)

    def run(self, work: Callable[[], None], name: object = None) -> None:
        outer, self.world.current[self.device] = self.world.current[self.device], self
        try:
            work()
        finally:
            self.world.current[self.device] = outer

    def wait_for(self, mark: Mark) -> int:
        if self.device is cpu:
            return super().wait_for(mark)
        other: Any = mark.stream
        self.after = _latest(self.after, other.after)
        return other.sequence

    def is_done(self, mark: Mark) -> bool:
        if not self._checkpoints or self._checkpoints[-1][0] < mark.sequence:
            self._checkpoints.append((self.sequence, len(self.entries)))
        count = next(count for sequence, count in self._checkpoints if sequence >= mark.sequence)
        if self.world.ran.get(self, 0) < count:
            return False
        self.world.know(self)
        return True

    def block(self, mark: Mark) -> None:
        self.world.run(self, len(self.entries))
        self.world.know(self)


class Program:
    """Random instructions, by all ways there are to issue them, on parts of a few pieces of memory that come and go."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.world = World()
        self.machine = Machine()
        self.host = ModelStream(self.world, cpu, "host")
        self.streams = [ModelStream(self.world, DEVICE, f"stream {number}") for number in range(STREAMS)]
        for stream in (self.host, *self.streams):
            self.machine.add_stream(stream)
        self._combine = combine = self._kernel("combine")
        self._working = self._kernel("one with working memory", works=True)
        self._failing = self._kernel("one that fails", fails=True)
        self.side = SideStream(SimpleNamespace(kernels={"combine": combine}), self.streams[-1])  # type: ignore[arg-type]
        self._memories = {}
        for place, device in enumerate((cpu, DEVICE), 1):
            source = FakeSource(start=place << 40)
            source.device = device
            self._memories[device] = CachingAllocator(source)
        self._held: dict[Device, list[Storage]] = {cpu: [], DEVICE: []}
        self._repeated: list[Callable[[], Mark]] = []

    def run(self, length: int) -> None:
        """Raises OrderError where the order is not certain."""
        steps = [self._issue, self._issue_at_once, self._issue_at_once, self._prepared, self._repeat, self._beside,
                 self._within, self._copy, self._write_pinned, self._drop, self._join, self._settle, self._advance,
                 self._fail, self._observed, self._on_the_first]  # fmt: skip
        for _ in range(length):
            self.draw.choice(steps)()

    # ---- instructions

    def _issue(self) -> None:
        kernel_ = self.draw.choice([self._combine, self._working])
        self.machine.issue(Instruction(kernel_, self._operands(), {}), self.draw.choice([*self.streams, None]))

    def _issue_at_once(self) -> None:
        self.machine.issuing(self._combine, DEVICE)(*self._operands())

    def _prepared(self) -> None:
        self._issuing(DEVICE)(self._part(DEVICE), self._part(DEVICE))

    def _issuing(self, device: Device) -> Callable[..., None]:
        if self.draw.random() < 0.5:
            return self.machine.issuing(self._combine, device)
        return self.machine.issuing_prepared(self._combine, device, {}, self._combine)

    def _repeat(self) -> None:
        if not self._repeated or self.draw.random() < 0.3:
            array = self._part(DEVICE)
            instruction = Instruction(self._combine, (array,), {})
            self._repeated.append(self.machine.repeating(instruction, self.draw.choice(self.streams)))
        self.draw.choice(self._repeated)()
        if len(self._repeated) > 2:
            self._repeated.pop(0)

    def _beside(self) -> None:
        with patch.object(side_stream, "machine", self.machine):
            if self.draw.random() < 0.5:
                self.side.combine(*self._operands())
            else:
                self.side.join()

    def _within(self) -> None:
        with self.machine.using(self.draw.choice(self.streams)):
            self._issue_at_once()

    def _observed(self) -> None:
        with self.machine.observed(lambda instruction, run: run()):
            self.draw.choice([self._issue, self._issue_at_once, self._repeat])()

    def _on_the_first(self) -> None:
        self.machine.keeps_to_first = True
        self.draw.choice([self._issue, self._issue_at_once, self._repeat, self._copy])()
        self.machine.keeps_to_first = False

    def _copy(self) -> None:
        """From memory of the host, which the device reads by itself."""
        out, source = self._part(DEVICE), self._part(cpu)
        with self.machine.using(self.draw.choice(self.streams)):
            stream = self.machine.current_stream(DEVICE)
            self.machine.issue(Instruction(self._combine, (out, source), {}), stream)
            self.machine.hold(source, stream)

    def _write_pinned(self) -> None:
        out = self._part(cpu)
        if self.draw.random() < 0.5:
            self.machine.settle(out)
            self.world.use([out], [], "the host")
        else:
            self._issuing(cpu)(out)

    def _fail(self) -> None:
        with pytest.raises(ArithmeticError):
            self.machine.issue(Instruction(self._failing, self._operands(), {}), self.draw.choice(self.streams))

    # ---- everything else

    def _drop(self) -> None:
        held = self._held[self.draw.choice([cpu, DEVICE])]
        if held:
            held.pop(self.draw.randrange(len(held)))

    def _join(self) -> None:
        self.machine.join(self.machine.newest(self.draw.choice(self.streams)))

    def _settle(self) -> None:
        """As before values are taken to the host: the first stream reads them then."""
        array = self._part(DEVICE)
        self.machine.settle(array)
        self.world.use([self._scratch()], [array], "the host's look")

    def _advance(self) -> None:
        stream = self.draw.choice(self.streams)
        if stream.entries:
            self.world.run(stream, self.draw.randint(0, len(stream.entries)))

    def _kernel(self, name: str, *, works: bool = False, fails: bool = False) -> Any:
        @kernel(outputs=1)
        def combine(*operands: Any) -> None:
            out, *inputs = [given if isinstance(given, tuple) else (given,) for given in operands]
            writes = [*out, self.machine.lend(self._scratch())] if works else [*out]
            self.world.use(writes, [array for given in inputs for array in given], name)
            if fails:
                raise ArithmeticError(name)

        return combine

    def _scratch(self) -> Array:
        return Array(Storage(self._memories[DEVICE], 64), (4,), (1,), float32)

    def _operands(self) -> tuple:
        parts = [self._part(DEVICE) for _ in range(self.draw.randint(1, 3))]
        if self.draw.random() < 0.2:
            return tuple(parts[:1]), *parts[1:]
        return *parts, *parts[: self.draw.randint(0, 1)]

    def _part(self, device: Device) -> Array:
        """Some elements of some memory: in a row, with gaps, repeated, in a table, one or none."""
        held = self._held[device]
        if len(held) < 2 and (not held or self.draw.random() < 0.5):
            held.append(Storage(self._memories[device], 4 * self.draw.choice([12, 12, 24])))
        storage = self.draw.choice(held)
        most = storage.nbytes // 4
        offset = self.draw.randrange(most)
        stride = [self.draw.choice([0, 1, 1, 2, 3]) for _ in range(self.draw.randint(0, 2))]
        shape, left = [], most - 1 - offset
        for step in stride:
            extent = self.draw.randint(0 if self.draw.random() < 0.1 else 1, 1 + min(3, left // step if step else 3))
            left -= step * max(extent - 1, 0)
            shape.append(extent)
        return Array(storage, tuple(shape), tuple(stride), float32, offset)


def _elements(arrays: list[Array]) -> set[int]:
    return {
        array.ptr + 4 * sum(place * step for place, step in zip(places, array.stride, strict=True))
        for array in arrays
        for places in product(*map(range, array.shape))
    }


def _latest(*counts: dict[Stream, int]) -> dict[Stream, int]:
    latest: dict[Stream, int] = {}
    for each in counts:
        for stream, count in each.items():
            latest[stream] = max(count, latest.get(stream, 0))
    return latest
