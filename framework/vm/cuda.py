"""CUDA devices as the vm sees them: choosing one, its streams and events, and the memory its allocator draws from.

Everything here goes through CuPy's bindings of the CUDA runtime, loaded when a device is first asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from framework.device import Device
from framework.vm import launch_groups
from framework.vm.launch_groups import LaunchGroups
from framework.vm.stream import Mark, Stream

NO_MEMORY = 2  # cudaErrorMemoryAllocation
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
_NOT_READY = 600  # cudaErrorNotReady
# The driver backs device memory with pages of this size, so less is never saved by asking for less.
_PAGE_BYTES = 2 * 1024 * 1024
# More than any device has levels.
_MOST_URGENT = 100


class CudaUnavailableError(RuntimeError):
    """There is no CUDA device to use; the message says what is missing and where to get it."""


class CudaError(RuntimeError):
    """The device refused a call, or an instruction issued earlier failed there."""


@lru_cache(maxsize=1)
def api() -> Any:
    """CuPy's bindings of the CUDA runtime. Raises CudaUnavailableError where CuPy is missing."""
    try:
        from cupy.cuda import runtime
    except ImportError as missing:
        raise CudaUnavailableError(
            f"CUDA devices need CuPy, which cannot be imported ({missing}); install it with"
            " `pip install 'flowbench[cuda13]'` for drivers from 580 on, `pip install 'flowbench[cuda12]'` for older ones"
        ) from missing
    return runtime


@lru_cache(maxsize=1)
def why() -> str | None:
    """Why no CUDA device can be used, with the way out; None where one can. Creates no context on any device."""
    try:
        count = api().getDeviceCount()
    except CudaUnavailableError as unavailable:
        return str(unavailable)
    except api().CUDARuntimeError as refused:
        return _refusal(str(refused))
    return None if count else _refusal("no device answered")


def device_count() -> int:
    """How many CUDA devices there are; 0 where none can be used."""
    return 0 if why() is not None else int(api().getDeviceCount())


def check(device: Device) -> None:
    """Raises CudaUnavailableError unless `device` can be used."""
    reason = why()
    if reason is None and device.index >= device_count():
        reason = f"there is no {device}: this machine has {device_count()} CUDA device(s), counted from 0"
    if reason is not None:
        raise CudaUnavailableError(reason)


class _Thread(threading.local):
    """The device that CUDA's calls from this thread go to; it starts on none, so that each thread chooses first."""

    index = -1


_thread = _Thread()
_current: dict[int, int] = {}
# What is called with the address of a stream that has ended: another one may get that address.
at_end_of_stream: list[Callable[[int], None]] = []


def choose(device: Device) -> None:
    """Lets this thread's CUDA calls go to `device`. Comes before anything that may create a context."""
    if _thread.index != device.index:
        api().setDevice(device.index)
        _thread.index = device.index


def launching_on(device: Device) -> int:
    """The address of the CUDA stream that kernels of `device` are launched on now, `device` being chosen.

    For launches that `launch_groups` knows: those before them may still wait. All else takes `stream_pointer`.
    """
    if _thread.index != device.index:
        choose(device)
    return _current[device.index]


def stream_pointer(device: Device) -> int:
    """The address of the CUDA stream that instructions of `device` are issued to now, `device` being chosen.

    Whatever is put on the stream at once comes behind all that was launched.
    """
    stream = launching_on(device)
    if launch_groups.of_stream:
        launch_groups.flush(stream)
    return stream


def is_capturing(device: Device) -> bool:
    """Whether what is issued to `device` now is recorded into a graph instead of run."""
    return bool(api().streamIsCapturing(stream_pointer(device)))


def translated(error: Exception | str, doing: str) -> CudaError:
    """What to raise for an error of the CUDA runtime."""
    return CudaError(
        f"{doing} failed: {error}. CUDA reports a faulty instruction only later: run again under"
        " `with flow.cuda.launch_blocking():`, which waits for each one, to see which it was. After a fault of memory access"
        " the process cannot use the device any more"
    )


class CudaStream(Stream):
    """A CUDA stream of its own, which waits for no other unless told so (not for the null stream either).

    The device prefers the work of an `urgent` one where it has to choose.
    """

    def __init__(self, device: Device, name: str, *, urgent: bool = False) -> None:
        super().__init__(device, name)
        choose(device)
        runtime = api()
        # The device takes the nearest priority it has; lower numbers come first.
        self._address: int = (
            runtime.streamCreateWithPriority(runtime.streamNonBlocking, -_MOST_URGENT)
            if urgent
            else runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        )
        self._idle_events: list[int] = []
        # (sequence, event): the event is past when everything up to that instruction has run.
        self._checkpoints: deque[tuple[int, int]] = deque()
        self._finished = 0
        self._is_lent = False
        # The first stream of a device is where its instructions go.
        _current.setdefault(device.index, self._address)
        self.group_launches(launch_groups.is_on)

    @property
    def pointer(self) -> int:
        """The stream's address, 0 once it has ended; whatever is put on it at once comes behind all that was launched."""
        if launch_groups.of_stream:
            launch_groups.flush(self._address)
        return self._address

    def lend(self) -> int:
        """The stream's address, for somebody who keeps it and puts work on the stream unseen: no launch waits from now on."""
        self._is_lent = True
        self.group_launches(False)
        return self._address

    def group_launches(self, on: bool) -> None:
        """Lets launches that come again as they came before be one launch, or not: see `launch_groups`."""
        groups = launch_groups.of_stream.get(self._address)
        if on and groups is None and not self._is_lent:
            groups = LaunchGroups(api(), self._address, partial(choose, self.device))
            launch_groups.of_stream[self._address] = groups
        elif not on and groups is not None:
            # Until all is launched that waits, who launches in another thread must find them, to come behind that.
            try:
                groups.close()
            finally:
                launch_groups.of_stream.pop(self._address, None)

    def run(self, work: Any, name: object = None) -> None:
        """Calls `work`; what it launches goes to this stream."""
        index = self.device.index
        outer, _current[index] = _current[index], self._address
        try:
            work()
        finally:
            _current[index] = outer

    def wait_for(self, mark: Mark) -> int:
        """Lets the device hold this stream until `mark` of another one has passed; the host goes on.

        For a stream of the host, whose end the device cannot see, the caller is held.
        """
        other = mark.stream
        if not isinstance(other, CudaStream):
            return super().wait_for(mark)
        if not other.pointer:
            return other.sequence  # ended, and so done
        event = other.record()
        if _thread.index != self.device.index:
            choose(self.device)
        api().streamWaitEvent(self.pointer, event)
        other.recycle(event)
        # The event stands behind all that was issued there by now, so earlier and equal marks need no second one.
        return other.sequence

    def fence(self) -> Callable[[], None] | None:
        """A function that returns, in any thread, when what has been issued by now has run; None for a stream that ended."""
        if not self.pointer:
            return None
        event = self.record()

        def pass_event() -> None:
            choose(self.device)
            try:
                api().eventSynchronize(event)
            except api().CUDARuntimeError as error:
                raise translated(error, f"waiting for {self.device}") from error
            self.recycle(event)

        return pass_event

    def block(self, mark: Mark) -> None:
        """Returns when everything up to `mark`, and whatever was issued since, has run."""
        if self.pointer:
            self.synchronize()

    def is_done(self, mark: Mark) -> bool:
        """Whether everything up to `mark` has run; asks the device, without waiting."""
        if mark.sequence > self._finished:
            if not self._checkpoints or self._checkpoints[-1][0] < mark.sequence:
                self._checkpoints.append((self.sequence, self.record()))
            while self._checkpoints and has_passed(self._checkpoints[0][1]):
                self._finished, event = self._checkpoints.popleft()
                self.recycle(event)
        return mark.sequence <= self._finished

    def is_idle(self) -> bool:
        """Whether everything issued has run; asks the device, without waiting. Raises CudaError where some of it failed."""
        choose(self.device)
        try:
            return bool(api().streamQuery(self.pointer) != _NOT_READY)
        except api().CUDARuntimeError as error:
            raise translated(error, f"asking {self.device}") from error

    def synchronize(self) -> None:
        """Returns when everything issued has run. Raises CudaError where some of it failed."""
        choose(self.device)
        try:
            api().streamSynchronize(self.pointer)
        except api().CUDARuntimeError as error:
            raise translated(error, f"waiting for {self.device}") from error

    def end(self) -> None:
        """Gives up the stream behind what was issued. Raises CudaError where some of it failed."""
        self.synchronize()
        for event in (*self._idle_events, *[event for _, event in self._checkpoints]):
            api().eventDestroy(event)
        self._checkpoints.clear()
        self._idle_events.clear()
        self._finished = self.sequence
        self.group_launches(False)
        for forget in at_end_of_stream:
            forget(self._address)
        api().streamDestroy(self._address)
        self._address = 0

    def record(self) -> int:
        """An event behind everything issued so far; hand it to `recycle` when it is needed no more."""
        if _thread.index != self.device.index:
            choose(self.device)
        runtime, idle = api(), self._idle_events
        try:
            event = idle.pop() if idle else runtime.eventCreateWithFlags(runtime.eventDisableTiming)
            runtime.eventRecord(event, self.pointer)
        except runtime.CUDARuntimeError as error:
            raise translated(error, f"recording an event on {self.device}") from error
        return event

    def recycle(self, event: int) -> None:
        """Takes back an event that nobody asks about any more; waits already issued keep what they captured."""
        self._idle_events.append(event)


def copy(target: int, source: int, nbytes: int, direction: int, stream: int) -> None:
    """Issues a copy between pinned memory and the chosen device; `direction` is TO_DEVICE or TO_HOST."""
    try:
        api().memcpyAsync(target, source, nbytes, direction, stream)
    except api().CUDARuntimeError as error:
        raise translated(error, "a copy between host and device") from error


def has_passed(event: int) -> bool:
    """Whether everything before `event` has run. Raises CudaError where some of it failed."""
    # CuPy returns cudaErrorNotReady as a number here and raises every other error.
    try:
        return bool(api().eventQuery(event) != _NOT_READY)
    except api().CUDARuntimeError as error:
        raise translated(error, "asking for an event") from error


class CudaMemory:
    """Memory on a device."""

    __slots__ = ("device", "ptr")

    def __init__(self, device: Device, ptr: int) -> None:
        self.device = device
        self.ptr = ptr

    @property
    def buffer(self) -> Any:
        raise RuntimeError(f"a tensor on {self.device} cannot be viewed by NumPy; copy it with .to('cpu') first")


class CudaSource:
    """The driver's memory, for the allocator of one device."""

    granularity = 512
    segment_bytes = 32 * 1024 * 1024
    # What is prepared for operands at known addresses is worth some memory.
    slack = 0.2

    def __init__(self, device: Device) -> None:
        self.device = device
        self.title = str(device)

    def reserve(self, nbytes: int) -> CudaMemory:
        """`nbytes` of memory with undefined values. Raises MemoryError where the device has not enough."""
        choose(self.device)
        try:
            return CudaMemory(self.device, api().malloc(nbytes))
        except api().CUDARuntimeError as refused:
            if refused.status != NO_MEMORY:
                raise translated(refused, f"allocating {nbytes} bytes on {self.device}") from refused
            raise MemoryError(f"{self.device} refused {nbytes} bytes: {refused}") from refused

    def release(self, memory: CudaMemory) -> None:
        """Gives memory back; the driver first waits until nothing running uses it."""
        # What has been issued may use it, and may not have been launched.
        launch_groups.flush_all()
        choose(self.device)
        api().free(memory.ptr)

    def available(self) -> int:
        """Bytes of the device that no process holds."""
        return free_and_total(self.device)[0]


def free_and_total(device: Device) -> tuple[int, int]:
    """Bytes of the device that no process holds, and all it has."""
    choose(device)
    free, total = api().memGetInfo()
    return int(free), int(total)


def _refusal(reason: str) -> str:
    if "InsufficientDriver" in reason:
        return (
            f"the NVIDIA driver is too old for the installed CuPy, or there is none ({reason}); update it to 580 or newer"
            " for CUDA 13, or install `flowbench[cuda12]` in place of `flowbench[cuda13]` for drivers from 525 on"
        )
    return f"no CUDA device can be used ({reason}); `nvidia-smi` should list one, and CUDA_VISIBLE_DEVICES must not hide it"
