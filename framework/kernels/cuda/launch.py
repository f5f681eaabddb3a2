"""Launches kernels cheaply: what does not change from call to call is prepared once, the rest written in place."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

from framework.device import Device
from framework.kernels.cuda import driver
from framework.kernels.cuda.compiler import Function
from framework.kernels.cuda.driver import LaunchConfig
from framework.vm import cuda, launch_groups, scratch
from framework.vm.array import Array

THREADS = 256
# Room for one counter per tile of channels; kernels leave each at 0.
COUNTER_BYTES = 16 * 1024
_MULTIPROCESSORS = 16  # cudaDevAttrMultiProcessorCount
_LEAST_WORKSPACE_BYTES = 1024 * 1024
# Marks in the list that tells the driver where the argument block is: its address, its size, the end.
_ADDRESS, _SIZE, _END = 1, 2, 0
# What a kernel is launched with: where the arguments go that vary, its configuration, what the driver is given, and the size
# of the arguments, which the driver reads, too.
_Room = tuple[memoryview, LaunchConfig, tuple, ctypes.c_size_t]

stream = cuda.launching_on


def prepare(
    function: Function,
    grid: tuple[int, int],
    varying: str,
    constants: str = "",
    values: tuple[Any, ...] = (),
    threads: int = THREADS,
) -> Callable[..., None]:
    """A callable `launch(stream, *arguments)` for one kernel and grid.

    `varying` names the kernel's first parameters, which every call gives, as codes of the struct module, each eight
    bytes wide: Q for an address, d and q for numbers. `constants` and `values` are those behind them.
    """
    if any(code not in "0123456789Qqd" for code in varying):
        raise ValueError(f"what varies from call to call is eight bytes wide: Q, q or d; got {varying!r}")
    head, tail = struct.Struct("@" + varying), struct.Struct("@" + constants)
    # It hides most of the time from one kernel's end to the next one's begin.
    attributes = [(driver.STARTS_EARLY, (1,))] if function.starts_early else []

    def new_room() -> _Room:
        arguments = ctypes.create_string_buffer(head.size + tail.size)
        tail.pack_into(arguments, head.size, *values)
        size = ctypes.c_size_t(len(arguments))
        block = (ctypes.c_void_p * 5)(_ADDRESS, ctypes.addressof(arguments), _SIZE, ctypes.addressof(size), _END)
        config = LaunchConfig.of((*grid, 1), (threads, 1, 1), attributes=attributes)
        given_to_driver = (ctypes.byref(config), ctypes.c_void_p(function.address), None, block)
        return memoryview(arguments).cast("B")[: head.size], config, given_to_driver, size

    # Whoever launches takes one, until the driver has read it. Another thread meanwhile, or a finalizer or a signal handler in
    # the middle, finds none and makes one, where with a lock it would wait; so does the next one where a signal ends a launch.
    idle = [new_room()]
    launch_kernel, pack, take, give_back = driver.api().cuLaunchKernelEx, head.pack, idle.pop, idle.append
    groups_of = launch_groups.of_stream.get

    def launch_packed(stream: int, given: bytes) -> None:
        try:
            room = take()
        except IndexError:
            room = new_room()
        varying_part, config, given_to_driver, _ = room
        varying_part[:] = given
        config.stream = stream
        status = launch_kernel(*given_to_driver)
        give_back(room)
        if status:
            raise cuda.translated(driver.error_words(status), "launching a kernel")

    def launch(stream: int, *given: Any) -> None:
        packed, groups = pack(*given), groups_of(stream)
        if groups is None or not groups.takes(launch_packed, packed):
            launch_packed(stream, packed)

    return launch


@cache
def multiprocessors(device: Device) -> int:
    """How many multiprocessors a device has."""
    return int(cuda.api().deviceGetAttribute(_MULTIPROCESSORS, device.index))


def blocks(device: Device, threads: int, *, per_multiprocessor: int = 8) -> int:
    """The blocks for a kernel whose threads walk on in steps of the grid: enough for `threads`, no more than useful."""
    return max(1, min(-(-threads // THREADS), per_multiprocessor * multiprocessors(device)))


def address(array: Array | None) -> int:
    """Where an array's first element lies; 0 for one that is left out."""
    return 0 if array is None else array.ptr


_workspaces: dict[tuple[Device, int], Array] = {}
# Workspaces that were too small, by stream: others must not get their memory while this one may still use it.
_outgrown: dict[int, list[Array]] = {}


def workspace(device: Device, on: int, nbytes: int = 0) -> int:
    """The address of at least COUNTER_BYTES of counters, all 0 between kernels, followed by `nbytes` of working memory.

    Each stream has its own, so that kernels of two streams do not meet in it; kernels of one come after each other.
    """
    held = _workspaces.get((device, on))
    if held is None or held.storage.nbytes < COUNTER_BYTES + nbytes:
        if held is not None:
            _outgrown.setdefault(on, []).append(held)
        size = max(_LEAST_WORKSPACE_BYTES, 1 << (COUNTER_BYTES + nbytes - 1).bit_length())
        held = _workspaces[device, on] = scratch(device, size)
        launch_groups.flush(on)
        cuda.api().memsetAsync(held.ptr, 0, COUNTER_BYTES, on)
    return held.storage.ptr


def _forget(stream: int) -> None:
    for key in [key for key in _workspaces if key[1] == stream]:
        del _workspaces[key]
    _outgrown.pop(stream, None)


cuda.at_end_of_stream.append(_forget)


def workspaces(device: Device) -> list[tuple[int, int]]:
    """The streams of a device that have a workspace, and the address of each."""
    return [(on, room.storage.ptr) for (where, on), room in _workspaces.items() if where is device]
