"""Streams and events of CUDA devices.

Work that is issued within `with stream(s):` goes to s, and the vm keeps the order: it comes after everything issued to the
device's default stream before, whoever uses a result waits for it, and no memory is handed out again while a stream still uses
it. So nobody has to wait by hand or to call `record_stream`; `wait_stream` and `wait_event` are there all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from framework.device import Device, DeviceLike, cuda_device
from framework.vm import cuda as vm_cuda
from framework.vm.machine import machine
from framework.vm.runtime import runtime


class Stream:
    """A queue of work on a device, beside the default one. It ends, behind its work, with this object."""

    def __init__(self, device: DeviceLike = None) -> None:
        made = runtime(cuda_device(device))
        self._stream = vm_cuda.CudaStream(made.device, "user's")
        self._is_own = True
        _own[self._stream] = self
        machine.add_stream(self._stream)

    @classmethod
    def _of(cls, stream: vm_cuda.CudaStream) -> Stream:
        """A view of a stream that someone else ends."""
        shown = cls.__new__(cls)
        shown._stream, shown._is_own = stream, False
        return shown

    @property
    def device(self) -> Device:
        return self._stream.device

    @property
    def cuda_stream(self) -> int:
        """The address of the CUDA stream, for other libraries.

        They may keep it, and what they put on the stream comes behind all that was issued before: from now on launches go
        there one by one (see `group_launches`).
        """
        return self._stream.lend()

    def query(self) -> bool:
        """Whether everything issued so far has run."""
        return self._stream.is_idle()

    def synchronize(self) -> None:
        """Returns when everything issued so far has run. Raises CudaError where some of it failed."""
        self._stream.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """Lets what is issued here from now on run after everything issued to `stream` so far; the host goes on."""
        if self != stream:
            self._stream.wait_for(stream._stream.mark())

    def wait_event(self, event: Event) -> None:
        """Lets what is issued here from now on run after `event`; the host goes on."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """`event`, or a new one, moved behind everything issued here so far."""
        event = Event(device=self.device) if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other._stream is self._stream

    def __hash__(self) -> int:
        return hash(self._stream)

    def __repr__(self) -> str:
        return f"flow.cuda.Stream({str(self.device)!r}, {self._stream.pointer:#x})"

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent where __init__ found no device.
        if getattr(self, "_is_own", False) and not _is_finalizing():
            machine.remove_stream(self._stream)


def default_stream(device: DeviceLike = None) -> Stream:
    """The stream that takes whatever is issued outside of `with stream(…)`."""
    return _shown(runtime(cuda_device(device)).compute)


def current_stream(device: DeviceLike = None) -> Stream:
    """The stream that this thread's work for a device goes to."""
    return _shown(machine.current_stream(runtime(cuda_device(device)).device))


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Within it, this thread's work for the stream's device goes to it. With None nothing changes."""
    if chosen is None:
        yield
        return
    with machine.using(chosen._stream):
        yield


class Event:
    """A point in a device's work, to wait for and to measure times between.

    `enable_timing` as in PyTorch; without it an event costs less.
    """

    def __init__(self, enable_timing: bool = False, *, device: DeviceLike = None) -> None:
        self._device = runtime(cuda_device(device)).device
        cuda = vm_cuda.api()
        vm_cuda.choose(self._device)
        self._event = cuda.eventCreateWithFlags(cuda.eventDefault if enable_timing else cuda.eventDisableTiming)
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Moves the event behind everything issued to a stream, the current one, so far."""
        stream = current_stream(self._device) if stream is None else stream
        vm_cuda.choose(stream.device)
        vm_cuda.api().eventRecord(self._event, stream._stream.pointer)

    def wait(self, stream: Stream | None = None) -> None:
        """Lets what is issued to a stream, the current one, from now on run after the event; the host goes on."""
        stream = current_stream(self._device) if stream is None else stream
        vm_cuda.choose(stream.device)
        vm_cuda.api().streamWaitEvent(stream._stream.pointer, self._event)

    def query(self) -> bool:
        """Whether everything before it has run."""
        return vm_cuda.has_passed(self._event)

    def synchronize(self) -> None:
        """Returns when everything before it has run."""
        try:
            vm_cuda.api().eventSynchronize(self._event)
        except vm_cuda.api().CUDARuntimeError as error:
            raise vm_cuda.translated(error, "waiting for an event") from error

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`, both recorded with timing and passed."""
        if not (self._timed and end._timed):
            raise RuntimeError("elapsed_time needs two events made with enable_timing=True")
        return float(vm_cuda.api().eventElapsedTime(self._event, end._event))

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent where __init__ found no device.
        event = getattr(self, "_event", None)
        if event is not None and not _is_finalizing():
            vm_cuda.api().eventDestroy(event)


def _shown(stream: object) -> Stream:
    assert isinstance(stream, vm_cuda.CudaStream)
    # A user's is shown by the object that it ends with: whoever holds another could use it when it has ended.
    return _own.get(stream) or Stream._of(stream)


# The objects that end the users' streams.
_own: WeakValueDictionary[vm_cuda.CudaStream, Stream] = WeakValueDictionary()
