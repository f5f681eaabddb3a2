"""A CUDA runtime that is none: its devices' memory is the host's, and their streams run when they are waited for.

It notes on which device each call that needs a context was made, which is where the driver would have made one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from framework.vm import cuda, machine, pinned


class FakeError(Exception):
    """As CuPy's CUDARuntimeError: a status, and its name in words."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeCudaApi:
    """The calls of CuPy's runtime that the vm makes, for `count` devices."""

    CUDARuntimeError = FakeError
    eventDefault, eventDisableTiming, hostAllocPortable, streamNonBlocking = 0, 2, 1, 1

    def __init__(self, count_: int = 2) -> None:
        self.count = count_
        self.contexts: set[int] = set()
        self.memory: dict[int, Any] = {}
        self.streams: dict[int, list[Any]] = {}
        # What each event was recorded as last, and which of these were reached.
        self.points: dict[int, int] = {}
        self.passed: set[int] = set()
        self.recorded: dict[int, list[Any]] = {}
        self.graphs: dict[int, list[Any]] = {}
        self.failure: FakeError | None = None
        self._chosen = threading.local()
        self._numbers = count(1)

    def getDeviceCount(self) -> int:
        return self.count

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {
            "name": b"Fake H200", "major": 9, "minor": 0, "totalGlobalMem": 1 << 37, "multiProcessorCount": 132,
        }  # fmt: skip

    def driverGetVersion(self) -> int:
        return 13000

    def setDevice(self, index: int) -> None:
        self._chosen.index = index

    def _needs_context(self) -> None:
        # A thread that has chosen none is on the first device.
        self.contexts.add(getattr(self._chosen, "index", 0))

    # ---- memory

    def malloc(self, nbytes: int) -> int:
        return self._give(nbytes)

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        return self._give(nbytes)

    def _give(self, nbytes: int) -> int:
        self._needs_context()
        memory = ctypes.create_string_buffer(nbytes)
        self.memory[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address: int) -> None:
        self._needs_context()
        del self.memory[address]

    freeHost = free

    def memGetInfo(self) -> tuple[int, int]:
        self._needs_context()
        return 3 << 30, 1 << 37

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.streams[stream].append(lambda: ctypes.memmove(target, source, nbytes))

    # ---- streams and events

    def streamCreateWithFlags(self, flags: int) -> int:
        self._needs_context()
        stream = next(self._numbers)
        self.streams[stream] = []
        return stream

    def streamDestroy(self, stream: int) -> None:
        del self.streams[stream]

    def streamSynchronize(self, stream: int) -> None:
        queue = self.streams[stream]
        while queue:
            self._run(queue.pop(0))
        if self.failure:
            raise self.failure

    def streamQuery(self, stream: int) -> int:
        return 600 if self.streams[stream] else 0

    def streamWaitEvent(self, stream: int, event: int) -> None:
        # What the event stands for now: it may be recorded anew before the stream comes to this.
        point = self.points[event]
        self.streams[stream].append(lambda: self._run_to(point))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._needs_context()
        return next(self._numbers)

    # ---- graphs: what was put on a stream while it was recorded

    streamCaptureModeRelaxed = 2

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.recorded

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        self.recorded[stream], self.streams[stream] = self.streams[stream], []

    def streamEndCapture(self, stream: int) -> int:
        graph = next(self._numbers)
        self.graphs[graph], self.streams[stream] = self.streams[stream], self.recorded.pop(stream)
        return graph

    def graphInstantiate(self, graph: int) -> int:
        executable = next(self._numbers)
        self.graphs[executable] = self.graphs[graph]
        return executable

    def graphLaunch(self, executable: int, stream: int) -> None:
        self.streams[stream] += self.graphs[executable]

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    graphExecDestroy = graphDestroy

    # ---- events

    def eventDestroy(self, event: int) -> None:
        self.points.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        self.points[event] = point = next(self._numbers)
        self.streams[stream].append(point)

    def eventQuery(self, event: int) -> int:
        return 0 if self.points[event] in self.passed else 600

    def eventSynchronize(self, event: int) -> None:
        self._run_to(self.points[event])
        if self.failure:
            raise self.failure

    def eventElapsedTime(self, start: int, end: int) -> float:
        return 1.5

    def _run_to(self, point: int) -> None:
        for queue in self.streams.values():
            while point in queue:
                self._run(queue.pop(0))

    def _run(self, entry: int | Callable[[], Any]) -> None:
        if callable(entry):
            entry()
        else:
            self.passed.add(entry)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudaApi]:
    """Two devices that are none, for one test; what the vm keeps of devices is as at the start, and put back."""
    api = FakeCudaApi()
    # Their packages have a class and a function of the same name.
    devices, runtimes = sys.modules["framework.device"], sys.modules["framework.vm.runtime"]
    cuda.why.cache_clear()
    pinned.allocator.cache_clear()
    monkeypatch.setattr(cuda, "api", lambda: api)
    monkeypatch.setattr(cuda, "_current", {})
    monkeypatch.setattr(cuda, "_thread", cuda._Thread())
    monkeypatch.setattr(
        runtimes, "_runtimes", {key: made for key, made in runtimes._runtimes.items() if key.type == "cpu"}
    )
    monkeypatch.setattr(devices, "_current", dict(devices._current))
    # On a machine with GPUs, tests before this one leave real streams of the same devices.
    real = [stream for stream in machine.streams if stream.device.type == "cuda"]
    monkeypatch.setattr(machine, "_streams", [stream for stream in machine.streams if stream not in real])
    monkeypatch.setattr(machine, "_firsts", {key: first for key, first in machine._firsts.items() if key.type == "cpu"})
    before = machine.streams
    yield api
    for stream in reversed(machine.streams):
        if stream not in before:
            machine.remove_stream(stream)
    cuda.why.cache_clear()
    pinned.allocator.cache_clear()
