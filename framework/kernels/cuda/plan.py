"""An algorithm of a library for one convolution or matrix product on one device: its scratch memory, and how it is run.

Once it has run, what it launches is known (see `launches`), and it runs without its library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from framework.device import Device
from framework.kernels.cuda import launches
from framework.kernels.cuda.library import LibraryError
from framework.vm import Array, cuda, launch_groups, scratch

# Up to this size, memory that is kept is cheaper than asking for it at each call, and what is reserved does not follow from
# which plans were chosen: all of a small convolution's, and those of cuDNN's that take a little more than a power of two.
_SHARED_WORKSPACE_BYTES = 17 * 1024 * 1024
# What all plans with a small workspace use, one after the other on a stream: by stream, the memory and where it lies.
_workspaces: dict[int, Array] = {}
_shared: dict[int, int] = {}


class Plan(ABC):
    """An algorithm, ready to run. Operands are x, weight and y, of a product both factors and the result; and a bias, if any.

    `library` is whose it is, `workspace_bytes` the scratch memory that it needs.
    """

    __slots__ = ("_launches", "_places", "device", "workspace_bytes")
    library: ClassVar[str]

    def __init__(self, device: Device, workspace_bytes: int) -> None:
        self.device = device
        self.workspace_bytes = workspace_bytes
        self._launches: launches.Launches | None = None
        # Where its scratch memory lies, by stream, as far as that is known before it runs.
        self._places = _shared if 0 < workspace_bytes <= _SHARED_WORKSPACE_BYTES else {}

    @abstractmethod
    def text(self) -> bytes:
        """The plan in its library's words, from which a later process makes it again."""

    @abstractmethod
    def _run_by_library(self, stream: int, at: launches.Addresses) -> None:
        """Lets the library launch it. Raises LibraryError where it refuses."""

    def run(self, x: int, weight: int, y: int, bias: int = 0) -> None:
        """Runs it on the operands at these addresses, with scratch memory of its own."""
        stream = cuda.launching_on(self.device)
        address = self._places.get(stream)
        if address is None:
            # Held until it has run.
            address, _room = self._scratch(stream)
        at = (x, weight, y, address, bias) if bias else (x, weight, y, address)
        direct = self._launches
        if direct is not None and not (x | weight | y | bias) % launches.ALIGNMENT:
            direct.run(stream, at)
        else:
            launch_groups.flush(stream)
            self._run_by_library(stream, at)

    @contextmanager
    def working_in(self, address: int) -> Iterator[None]:
        """Lets it use the scratch memory at this address within, on the current stream, in place of its own."""
        own, self._places = self._places, {cuda.stream_pointer(self.device): address}
        try:
            yield
        finally:
            self._places = own

    def learn(self, x: int, weight: int, y: int, bias: int = 0) -> None:
        """Looks at what it launches, if it is plain, so that `run` need not ask the library. It must have run before.

        The operands at these addresses are not touched.
        """
        if cuda.is_capturing(self.device) or (x | weight | y | bias) % launches.ALIGNMENT:
            return
        stream = cuda.stream_pointer(self.device)
        # An address is enough: scratch memory is not touched either.
        workspace = _shared_workspace(self.device, stream) if self.workspace_bytes else 0
        at = (x, weight, y, workspace, bias) if bias else (x, weight, y, workspace)
        try:
            self._launches = launches.record(lambda there: self._run_by_library(stream, there), stream, at)
        except (LibraryError, cuda.api().CUDARuntimeError):
            # It does what cannot be recorded, such as waiting for the device.
            self._launches = None

    def _scratch(self, stream: int) -> tuple[int, Array | None]:
        """The address of scratch memory, and what to hold while it is in use."""
        if self.workspace_bytes > _SHARED_WORKSPACE_BYTES:
            # Few sizes, a quarter of a power of two apart: then what one plan gives back serves the next.
            step = 1 << ((self.workspace_bytes - 1).bit_length() - 3)
            room = scratch(self.device, -(-self.workspace_bytes // step) * step)
            return room.ptr, room
        if self.workspace_bytes:
            return _shared_workspace(self.device, stream), None
        self._places[stream] = 0
        return 0, None


def _shared_workspace(device: Device, stream: int) -> int:
    if stream not in _shared:
        room = _workspaces[stream] = scratch(device, _SHARED_WORKSPACE_BYTES)
        _shared[stream] = room.ptr
    return _shared[stream]


def _forget(stream: int) -> None:
    _shared.pop(stream, None)
    _workspaces.pop(stream, None)


cuda.at_end_of_stream.append(_forget)
