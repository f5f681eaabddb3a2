"""Reads what a CUDA graph would launch: its kernels with their parameters, and its fills, one after the other."""

from __future__ import annotations

import ctypes
import mmap
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from framework.kernels.cuda import driver
from framework.vm import cuda, launch_groups
from framework.vm.capture import captured

# CUgraphNodeType, CUlaunchAttributeID, CUpointer_attribute.
_KERNEL, FILL = 0, 2
_OTHER_ATTRIBUTES = (2, 7, 11)
# From port, to port and kind of an edge: behind all of a kernel, or behind where it lets the next one start.
_WHOLE, _EARLY = (0, 0, 0), (1, 0, 1)
_MEMORY_TYPE = 2
_MOST_PARAMETERS = 64


class Node(NamedTuple):
    """One thing that a plan launches: `fixed` does not depend on addresses, `parameters` may."""

    kind: int
    function: int
    fixed: tuple
    parameters: tuple[bytes, ...]


def recorded(issue: Callable[[], None], stream: int) -> list[Node] | None:
    """What `issue` launches on a stream, none of which is run; None where it is no chain of kernels and fills."""
    # What another thread put on the stream meanwhile would be recorded, and not run.
    with launch_groups.alone_on(stream), captured(cuda.api(), stream, issue) as graph:
        try:
            nodes = [_node(handle, starts_early) for handle, starts_early in _chain(graph)]
        except _UnreadableError:
            return None
    return None if not nodes or None in nodes else [node for node in nodes if node is not None]


def _chain(graph: int) -> list[tuple[int, bool]]:
    """The nodes of a graph in their order, each with whether it starts before the one in front of it has ended.

    Empty where they are no chain.
    """
    api, count = driver.api(), ctypes.c_size_t()
    _check(api.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)))
    handles = (ctypes.c_void_p * count.value)()
    _check(api.cuGraphGetNodes(ctypes.c_void_p(graph), handles, ctypes.byref(count)))
    after: dict[int | None, tuple[int, bool]] = {}
    for handle in handles:
        before, edges, waits_for = (ctypes.c_void_p * 2)(), (_Edge * 2)(), ctypes.c_size_t(2)
        asked = (ctypes.c_void_p(handle), before, edges, ctypes.byref(waits_for))
        _check(api.cuGraphNodeGetDependencies_v2(*asked))
        edge = (edges[0].from_port, edges[0].to_port, edges[0].kind)
        if waits_for.value > 1 or before[0] in after or edge not in (_WHOLE, _EARLY):
            return []
        after[before[0]] = (handle, edge == _EARLY)
    ordered: list[tuple[int, bool]] = []
    at: int | None = None
    while at in after:
        ordered.append(after.pop(at))
        at = ordered[-1][0]
    return [] if after else ordered


def _node(handle: int, starts_early: bool) -> Node | None:
    """A node of a graph; None for one that cannot be launched from what is known of it."""
    api, kind = driver.api(), ctypes.c_int()
    _check(api.cuGraphNodeGetType(ctypes.c_void_p(handle), ctypes.byref(kind)))
    if kind.value == FILL:
        fill = _Fill()
        _check(api.cuGraphMemsetNodeGetParams(ctypes.c_void_p(handle), ctypes.byref(fill)))
        if fill.height != 1:
            return None
        target = struct.pack("@Q", fill.target)
        return Node(FILL, 0, (fill.element_bytes, fill.value, fill.width), (target,))
    if kind.value != _KERNEL:
        return None
    kernel = _Kernel()
    _check(api.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(handle), ctypes.byref(kernel)))
    if not kernel.function or not kernel.parameters or kernel.extra:
        return None
    if any(_attribute(handle, name)[0] for name in _OTHER_ATTRIBUTES):
        return None
    parameters = []
    pointers = ctypes.cast(kernel.parameters, ctypes.POINTER(ctypes.c_void_p))
    for index in range(_MOST_PARAMETERS):
        start, size = ctypes.c_size_t(), ctypes.c_size_t()
        asked = (ctypes.c_void_p(kernel.function), ctypes.c_size_t(index), ctypes.byref(start), ctypes.byref(size))
        if api.cuFuncGetParamInfo(*asked):
            break
        parameters.append(ctypes.string_at(pointers[index], size.value))
    fixed = (
        *kernel.grid,
        *kernel.block,
        kernel.shared_bytes,
        _attribute(handle, driver.CLUSTER)[:3],
        _attribute(handle, driver.CLUSTER_POLICY)[0],
        starts_early,
    )
    return Node(_KERNEL, kernel.function, fixed, tuple(parameters))


def _attribute(handle: int, name: int) -> tuple[int, ...]:
    """The first numbers of a kernel node's launch attribute."""
    value = (ctypes.c_uint * 16)()
    status = driver.api().cuGraphKernelNodeGetAttribute(ctypes.c_void_p(handle), name, ctypes.byref(value))
    return tuple(value[:4]) if status == 0 else (0, 0, 0, 0)


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("kind", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Fill(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS_v1."""

    _fields_ = [
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


def is_memory(address: int) -> bool:
    """Whether the driver knows memory at an address."""
    kind = ctypes.c_int()
    return bool(driver.api().cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address)) == 0)


def is_of_the_host(address: int) -> bool:
    """Whether an address lies in this process's own memory, which the driver does not know. False where that cannot be told."""
    if not 0 < address < 1 << 63 or not hasattr(_process(), "mincore"):
        return False
    page = ctypes.c_void_p(address - address % mmap.PAGESIZE)
    in_core = ctypes.c_ubyte()
    return _process().mincore(page, ctypes.c_size_t(1), ctypes.byref(in_core)) == 0 and not is_memory(address)


@lru_cache(maxsize=1)
def _process() -> Any:
    """The functions of this process's own libraries."""
    return None if sys.platform == "win32" else ctypes.CDLL(None)


def is_readable() -> bool:
    """Whether the driver can tell a kernel's parameters, as it can from CUDA 12.4 on."""
    needed = ("cuFuncGetParamInfo", "cuGraphNodeGetDependencies_v2", "cuLaunchKernelEx")
    return all(hasattr(driver.api(), name) for name in needed)


class _UnreadableError(RuntimeError):
    """The driver does not tell something of a graph."""


def _check(status: int) -> None:
    if status:
        raise _UnreadableError(f"the driver's error {status}")
