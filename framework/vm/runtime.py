"""The runtime of a device: its allocator, its kernel table and its streams, behind one object per device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from framework.device import Device
from framework.dtype import DType, uint8
from framework.kernels.table import Table
from framework.vm.allocator import CachingAllocator
from framework.vm.array import Array, Layout, contiguous_stride, dense_stride_like
from framework.vm.host_stream import HostStream
from framework.vm.machine import machine
from framework.vm.storage import Storage
from framework.vm.stream import Stream


class Runtime:
    """What operations use of a device: new arrays, and its kernels, each an attribute that issues an instruction.

    `runtime.relu(y, x)` issues the kernel `relu` that writes `y` and reads `x`.
    """

    def __init__(
        self, device: Device, allocator: CachingAllocator, table: Table, compute: Stream | None = None
    ) -> None:
        self.device = device
        self.allocator = allocator
        self.table = table
        self.compute = machine.add_stream(compute or Stream(device, "compute"))
        for name, kernel in table.kernels.items():
            issue_kernel = machine.issuing(kernel, device)
            issue_kernel.__name__, issue_kernel.__doc__ = name, kernel.__doc__
            setattr(self, name, issue_kernel)

    def __getattr__(self, name: str) -> Any:
        # Only reached for what __init__ did not set.
        raise AttributeError(f"{self.device} has no kernel called {name!r}")

    def prepared(self, name: str, *layouts: Layout | None, **attributes: Any) -> Callable[..., None]:
        """The kernel of that name for operands of these layouts (None for one that is left out) and these attributes.

        It takes the operands alone. What depends on layouts is done now, so that a call costs less than by `name`.
        """
        kernel = self.table.kernels[name]
        run = partial(kernel, **attributes)
        prepare = getattr(kernel, "prepare", None)
        if prepare is not None:
            run = prepare(self.device, *layouts, **attributes)
        return machine.issuing_prepared(kernel, self.device, attributes, run)

    def open_stream(self, name: str) -> Stream:
        """A stream beside the compute stream, urgent where the device knows urgency: on the CPU a thread of its own."""
        return machine.add_stream(HostStream(self.device, name))

    def close_stream(self, stream: Stream) -> None:
        """Ends a stream behind what was issued to it. Raises what failed there."""
        machine.remove_stream(stream)

    def beside(self, multiplications: int) -> Any:
        """Where to issue an instruction of so much work whose result nothing waits for soon: here, where all else goes.

        What it gives has the kernels as attributes, as this runtime has.
        """
        return self

    def join(self) -> None:
        """Lets whatever is issued from now on come after all that was issued beside it."""

    def empty(self, shape: tuple[int, ...], dtype: DType, stride: tuple[int, ...] | None = None) -> Array:
        """A new array with undefined values; `stride` must be dense, row-major where it is not given."""
        return self.new(Layout.of(shape, contiguous_stride(shape) if stride is None else stride, dtype))

    def empty_like(self, array: Array, dtype: DType | None = None) -> Array:
        """A new dense array of the same shape and the same order of dimensions in memory."""
        layout = array.layout
        if dtype is None or dtype is layout.dtype:
            return self.new(Layout.like(layout))
        return self.empty(layout.shape, dtype, dense_stride_like(layout.shape, layout.stride))

    def new(self, layout: Layout) -> Array:
        """A new array with undefined values, of a layout that is dense."""
        return Array(Storage(self.allocator, layout.nbytes), layout.shape, layout.stride, layout.dtype, 0, layout)

    def storage(self, nbytes: int) -> Storage:
        """New memory, for several arrays to share."""
        return Storage(self.allocator, nbytes)

    def full(self, shape: tuple[int, ...], value: float, dtype: DType) -> Array:
        """A new array filled with `value`."""
        array = self.empty(shape, dtype)
        self.fill(array, value=value)
        return array

    def from_host(self, values: np.ndarray, dtype: DType) -> Array:
        """A new array with a copy of `values`, converted to `dtype`."""
        array = self.empty(values.shape, dtype)
        np.copyto(array.host_view(), values if dtype.numpy else dtype.encode(values), casting="unsafe")
        return array

    def to_host(self, array: Array) -> np.ndarray:
        """The values of `array`, to read at once: on the CPU a view that does not keep the memory alive.

        Types that NumPy does not know come as float32.
        """
        machine.settle(array)
        return array.dtype.decode(array.host_view()) if array.dtype.numpy is None else array.ndarray


_runtimes: dict[Device, Runtime] = {}


def existing_runtime(device: Device) -> Runtime | None:
    """The runtime of `device` if it was ever asked for. Asking for a CUDA device's makes a context there; this does not."""
    return _runtimes.get(device)


def runtime(device: Device) -> Runtime:
    """The runtime of `device`, made when it is first asked for."""
    made = _runtimes.get(device)
    if made is None:
        made = _runtimes[device] = _make(device)
    return made


def scratch(device: Device, nbytes: int) -> Array:
    """Working memory for one kernel call, counted like any other; it is free again when the array is dropped."""
    return machine.lend(runtime(device).empty((nbytes,), uint8))


def borrowed(device: Device, nbytes: int) -> AbstractContextManager[int]:
    """The address of working memory that is given back to the device's driver at the end, see `CachingAllocator.borrowed`."""
    return runtime(device).allocator.borrowed(nbytes)


def _make(device: Device) -> Runtime:
    from framework.kernels import table_for

    if device.type == "cuda":
        from framework.vm.transfer import CudaRuntime

        return CudaRuntime(device)
    from framework.vm.host import HostSource

    return Runtime(device, CachingAllocator(HostSource()), table_for(device))
