"""Streams of the host: a thread beside the compute stream. What it reads is waited for, also before memory is used again."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.device import cpu
from framework.dtype import float32
from framework.kernels import kernel
from framework.vm import Array, CachingAllocator, HostStream, Instruction, Storage, Stream
from framework.vm.host import HostSource
from framework.vm.machine import Machine
from framework.vm.runtime import runtime

PATIENCE_S = 60


class Bench:
    """A machine with a compute stream, a communication stream in a thread, and memory of its own."""

    def __init__(self) -> None:
        self.memory = CachingAllocator(HostSource())
        self.machine = Machine()
        self.machine.add_stream(Stream(cpu, "compute"))
        self.stream = HostStream(cpu, "communication")
        self.machine.add_stream(self.stream)
        self.gate = threading.Event()

    def array(self, size: int = 4, value: float | None = None) -> Array:
        array = Array(Storage(self.memory, 4 * size), (size,), (1,), float32)
        if value is not None:
            self.machine.issue(Instruction(fill, (array,), {"value": value}))
        return array

    def slow_copy(self, out: Array, source: Array) -> None:
        """Copies on the communication stream, not before `gate` is set."""

        @kernel(outputs=1)
        def slow(out: Array, source: Array) -> None:
            assert self.gate.wait(PATIENCE_S)
            out.ndarray[...] = source.ndarray

        self.machine.issue(Instruction(slow, (out, source), {}), self.stream)


@kernel(outputs=1)
def fill(out: Array, *, value: float) -> None:
    """out = value."""
    out.ndarray[...] = value


@kernel(outputs=1)
def copy(out: Array, source: Array) -> None:
    """out = source."""
    out.ndarray[...] = source.ndarray


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.gate.set()
    if made.stream in made.machine.streams:
        with contextlib.suppress(ArithmeticError):  # what a test lets fail
            made.machine.remove_stream(made.stream)


def test_the_caller_goes_on_while_it_works(bench: Bench) -> None:
    source, target = bench.array(value=3), bench.array(value=0)
    bench.slow_copy(target, source)
    assert not bench.stream.is_done(bench.stream.mark())
    bench.gate.set()
    bench.stream.synchronize()
    assert bench.stream.is_done(bench.stream.mark())
    assert target.ndarray.tolist() == [3] * 4


def test_a_reader_waits_for_what_is_written_there(bench: Bench) -> None:
    source, target, seen = bench.array(value=3), bench.array(value=0), bench.array()
    bench.slow_copy(target, source)
    threading.Timer(0.05, bench.gate.set).start()
    bench.machine.issue(Instruction(copy, (seen, target), {}))
    assert seen.ndarray.tolist() == [3] * 4


def test_a_writer_waits_for_what_is_read_there(bench: Bench) -> None:
    source, target = bench.array(value=3), bench.array(value=0)
    bench.slow_copy(target, source)
    threading.Timer(0.05, bench.gate.set).start()
    bench.machine.issue(Instruction(fill, (source,), {"value": 9}))
    bench.stream.synchronize()
    assert target.ndarray.tolist() == [3] * 4


def test_one_host_stream_waits_for_another(bench: Bench) -> None:
    second = HostStream(cpu, "second")
    bench.machine.add_stream(second)
    source, target, seen = bench.array(value=3), bench.array(value=0), bench.array(value=0)
    bench.slow_copy(target, source)
    bench.machine.issue(Instruction(copy, (seen, target), {}), second)
    assert not second.is_done(second.mark())
    bench.gate.set()
    second.synchronize()
    assert seen.ndarray.tolist() == [3] * 4
    bench.machine.remove_stream(second)


@kernel(outputs=1)
def breaks(out: Any) -> None:
    """Fails."""
    raise ArithmeticError("as it may happen")


def test_what_fails_is_raised_to_everyone_who_waits_and_names_its_instruction(bench: Bench) -> None:
    x, y = bench.array(value=0), bench.array(value=0)
    bench.machine.issue(Instruction(breaks, (x,), {}), bench.stream)
    for wait in (
        bench.stream.synchronize,
        lambda: bench.machine.issue(Instruction(copy, (y, x), {})),
        lambda: bench.machine.settle(x),
        lambda: bench.machine.issue(Instruction(copy, (y, y), {}), bench.stream),
    ):
        with pytest.raises(ArithmeticError, match="as it may happen") as raised:
            wait()
        assert any("breaks(float32[4])" in note and "communication" in note for note in raised.value.__notes__)


def test_what_stands_behind_a_failure_is_not_run_and_its_memory_is_free(bench: Bench) -> None:
    source, target, x = bench.array(value=3), bench.array(value=0), bench.array(value=0)
    other = bench.array(value=0)
    bench.slow_copy(target, source)
    bench.machine.issue(Instruction(breaks, (x,), {}), bench.stream)
    bench.machine.issue(Instruction(copy, (other, source), {}), bench.stream)
    bench.gate.set()
    with pytest.raises(ArithmeticError):
        bench.stream.synchronize()
    assert target.ndarray.tolist() == [3] * 4
    assert other.ndarray.tolist() == [0] * 4
    held = bench.memory.allocated()
    del other
    assert bench.memory.allocated() < held


def test_a_failure_nobody_waited_for_is_printed_at_the_end() -> None:
    program = (
        "import framework as flow\n"
        "from framework.vm import Instruction, machine, runtime\n"
        "from framework.kernels import kernel\n"
        "@kernel(outputs=1)\n"
        "def breaks(out): raise ArithmeticError('as it may happen')\n"
        "stream = runtime(flow.device('cpu')).open_stream('side')\n"
        "machine.issue(Instruction(breaks, (flow.ones(3).array,), {}), stream)\n"
        "import time\n"
        "while stream.unseen_failure is None: time.sleep(0.001)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "ArithmeticError: as it may happen" in ended.stderr
    assert "breaks(float32[3])" in ended.stderr


def test_removing_a_stream_finishes_it_and_raises_what_failed(bench: Bench) -> None:
    bench.machine.issue(Instruction(breaks, (bench.array(),), {}), bench.stream)
    with pytest.raises(ArithmeticError):
        bench.machine.remove_stream(bench.stream)
    assert bench.machine.is_plain
    assert bench.stream not in bench.machine.streams


def test_a_failure_is_raised_on_removal_only_to_who_has_not_seen_it(bench: Bench) -> None:
    bench.machine.issue(Instruction(breaks, (bench.array(),), {}), bench.stream)
    with pytest.raises(ArithmeticError):
        bench.stream.synchronize()
    bench.machine.remove_stream(bench.stream)


def test_a_closed_stream_takes_nothing_more(bench: Bench) -> None:
    bench.machine.remove_stream(bench.stream)
    with pytest.raises(RuntimeError, match="closed"):
        bench.stream.run(lambda: None, "late")


# ---- memory: a device that, as a GPU does, knows addresses alone and holds nothing


class Device:
    """A queue in a thread that copies between addresses: what a kernel launches lives on after the launch."""

    def __init__(self, gate: threading.Event) -> None:
        self.stream = HostStream(cpu, "device")
        self.stream.run = self._launch  # type: ignore[method-assign]
        self._gate = gate

    def _launch(self, work: Any, name: object = None) -> None:
        work()

    def copy_kernel(self) -> Any:
        @kernel(outputs=1)
        def slow_copy(out: Array, source: Array) -> None:
            target, address, nbytes = out.ptr, source.ptr, source.nbytes

            def work() -> None:
                assert self._gate.wait(PATIENCE_S)
                ctypes.memmove(target, address, nbytes)

            HostStream.run(self.stream, work, "slow_copy")

        return slow_copy


@pytest.mark.parametrize("waits", [True, False])
def test_a_gradient_dropped_while_it_is_read_elsewhere(bench: Bench, monkeypatch: Any, waits: bool) -> None:
    """Its memory is asked for again at once, and written. With the wait switched off the slow reader sees that."""
    if not waits:
        monkeypatch.setattr("framework.vm.uses.Uses.is_over", lambda self: True)
    device = Device(bench.gate)
    bench.machine.add_stream(device.stream)
    size = 1024 * 1024
    reduced = bench.array(size, value=0)
    gradient = bench.array(size, value=3)
    bench.machine.issue(Instruction(device.copy_kernel(), (reduced, gradient), {}), device.stream)
    address = gradient.ptr
    del gradient
    later = bench.array(size, value=-1)
    assert (later.ptr == address) is not waits
    bench.gate.set()
    device.stream.synchronize()
    assert np.unique(reduced.ndarray).tolist() == [3.0 if waits else -1.0]
    if waits:
        assert bench.array(size).ptr == address  # now it is free
    bench.machine.remove_stream(device.stream)


def test_an_allocator_near_its_limit_waits_for_the_reader(bench: Bench) -> None:
    device = Device(bench.gate)
    bench.machine.add_stream(device.stream)
    size = 16 * 1024 * 1024
    reduced, gradient = bench.array(size, value=0), bench.array(size, value=3)
    bench.memory.set_limit(bench.memory.reserved())
    bench.machine.issue(Instruction(device.copy_kernel(), (reduced, gradient), {}), device.stream)
    del gradient
    threading.Timer(0.05, bench.gate.set).start()
    later = bench.array(size, value=-1)
    assert np.unique(reduced.ndarray).tolist() == [3.0]
    assert np.unique(later.ndarray).tolist() == [-1.0]
    bench.machine.remove_stream(device.stream)


def test_a_tensor_is_looked_at_when_its_stream_has_written_it() -> None:
    kernels = runtime(cpu)
    gate = threading.Event()

    @kernel(outputs=1)
    def slow(out: Array) -> None:
        assert gate.wait(PATIENCE_S)
        out.ndarray[...] = 7

    from framework.vm import machine

    stream = kernels.open_stream("side")
    try:
        for look in (flow.Tensor.numpy, flow.Tensor.tolist, flow.Tensor.clone):
            gate.clear()
            x = flow.zeros(3)
            machine.issue(Instruction(slow, (x.array,), {}), stream)
            threading.Timer(0.02, gate.set).start()
            assert list(map(float, look(x))) == [7, 7, 7]
    finally:
        gate.set()
        kernels.close_stream(stream)
    assert machine.is_plain
