"""Shared memory of the ranks of one machine, and counters in it that one rank can wait for another to raise.

The memory has no name: a rank makes it with `memfd_create` and the others open it through that process's entry in /proc. So
nothing is left behind, however the ranks end, and the size limit of /dev/shm does not apply.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform

import numpy as np

from framework.distributed.errors import DistributedError

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 2**31 - 1
# About ten microseconds: longer spinning would keep this process's other threads from Python's lock.
_SPINS = 60

_libc = ctypes.CDLL(None, use_errno=True)
_futex_number = _FUTEX_NUMBERS.get(platform.machine())
# x86 shows another processor stores in the order they were made; elsewhere a system call stands between data and counter.
_ORDERS_STORES = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def why_not() -> str | None:
    """Why ranks cannot share memory here; None where they can."""
    if not hasattr(os, "memfd_create") or _futex_number is None:
        return f"the shm backend needs Linux on x86-64 or aarch64, not {platform.system()} on {platform.machine()}"
    return None


class Segment:
    """`nbytes` of zeroed memory that several processes see; `bytes` views them."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new one. Raises DistributedError where the system refuses."""
        reason = why_not()
        if reason is not None:
            raise DistributedError(reason)
        try:
            descriptor = os.memfd_create("flow-ranks", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, nbytes)
        except OSError as refused:
            raise DistributedError(
                f"the system refused {nbytes} bytes of shared memory: {refused.strerror}"
            ) from refused
        return cls(descriptor, nbytes)

    @classmethod
    def attach(cls, place: str, nbytes: int) -> Segment:
        """The one that another rank made, by its `place`."""
        try:
            descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except OSError as refused:
            raise DistributedError(
                f"the shared memory of the ranks at {place} cannot be opened ({refused.strerror}): the shm backend needs"
                ' ranks of one user that see each other\'s processes; backend="mpi" or "nccl" do not'
            ) from refused
        return cls(descriptor, nbytes)

    @property
    def place(self) -> str:
        """Where other processes open it, while this one lives and has not called `hide`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def hide(self) -> None:
        """Closes the way to it, once all that shall have it do. The memory goes when the last process drops it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Counters:
    """Numbers in a segment, each raised by one rank only, from 0 on, 64 bytes apart so that no two share a cache line."""

    STEP_BYTES = 64

    def __init__(self, segment: Segment, offset: int, count: int) -> None:
        words = segment.bytes[offset : offset + count * self.STEP_BYTES]
        self._values = words.data.cast("Q")[:: self.STEP_BYTES // 8]
        self._address = int(words.ctypes.data)
        self._fence = ctypes.c_uint32(0)
        self._owner = words  # keeps the mapping

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def set(self, index: int, value: int, *, wake: bool = True) -> None:
        """Raises a counter, after all that this thread wrote before, and wakes whoever waits for it."""
        if not _ORDERS_STORES:
            _futex(ctypes.addressof(self._fence), _FUTEX_WAKE, 1)
        self._values[index] = value
        if wake:
            _futex(self._address + index * self.STEP_BYTES, _FUTEX_WAKE, _EVERYONE)

    def reaches(self, index: int, value: int, patience_s: float) -> bool:
        """Whether the counter is at least `value`, now or within `patience_s`; sleeps while it waits."""
        values = self._values
        for _ in range(_SPINS):
            if values[index] >= value:
                break
        else:
            seen = values[index]
            if seen < value:
                # Sleeps only if the counter is still what was seen; returns early for any change.
                _futex(self._address + index * self.STEP_BYTES, _FUTEX_WAIT, seen & 0xFFFFFFFF, patience_s)
        if not _ORDERS_STORES:
            _futex(ctypes.addressof(self._fence), _FUTEX_WAKE, 1)
        return values[index] >= value


def _futex(address: int, operation: int, value: int, patience_s: float | None = None) -> None:
    patience = None
    if patience_s is not None:
        patience = ctypes.byref(_Timespec(int(patience_s), int(patience_s % 1 * 1e9)))
    # ctypes lets other threads run meanwhile.
    done = _libc.syscall(
        ctypes.c_long(_futex_number or 0),
        ctypes.c_void_p(address),
        operation,
        ctypes.c_uint32(value),
        patience,
        None,
        0,
    )
    if done < 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
