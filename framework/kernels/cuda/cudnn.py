"""cuDNN's backend interface through ctypes: descriptors, a handle for each device, and execution plans.

A plan is an algorithm for one convolution; it takes its operands through a variant pack, a list of addresses.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from framework.device import Device
from framework.kernels.cuda import launches, library, plan
from framework.vm import cuda

# Kinds of descriptors, by the numbers of cudnnBackendDescriptorType_t.
CONVOLUTION, ENGINE, ENGINE_CONFIG, HEURISTICS, PLAN, OPERATION_GRAPH, VARIANT_PACK, TENSOR = 1, 2, 3, 4, 5, 15, 16, 17

# Types of attributes: cudnnBackendAttributeType_t, and what C holds them in.
HANDLE, DATA_TYPE, BOOLEAN, INT64, FLOAT, DOUBLE, POINTER, MODE, HEURISTIC_MODE = 0, 1, 2, 3, 4, 5, 6, 7, 8
NUMERICAL_NOTE, DESCRIPTOR, BEHAVIOR_NOTE, CHARACTER = 11, 15, 19, 24
_C_TYPES: dict[int, Any] = {
    HANDLE: ctypes.c_void_p,
    BOOLEAN: ctypes.c_bool,
    INT64: ctypes.c_int64,
    FLOAT: ctypes.c_float,
    DOUBLE: ctypes.c_double,
    POINTER: ctypes.c_void_p,
    DESCRIPTOR: ctypes.c_void_p,
    CHARACTER: ctypes.c_char,
}

DATA_TYPES = {"float32": 0, "float64": 1, "bfloat16": 9}

_MOST_PACKS = 512
_X, _WEIGHT, _Y = 1, 2, 3


class CudnnError(library.LibraryError):
    """A cuDNN function refused. `status` is the number it returned."""

    def __init__(self, function: str, status: int, reason: str) -> None:
        super().__init__(f"cuDNN's {function} failed: {reason} ({status}); CUDNN_LOGLEVEL_DBG=3 makes cuDNN say more")
        self.status = status


class Descriptor:
    """A backend descriptor: attributes are set, then it is finalized and can be used by others."""

    __slots__ = ("kept", "pointer")

    def __init__(self, kind: int) -> None:
        self.pointer = ctypes.c_void_p()
        self.kept: list[Descriptor] = []
        call("cudnnBackendCreateDescriptor", kind, ctypes.byref(self.pointer))

    def set(self, attribute: int, kind: int, *values: Any) -> Descriptor:
        """Sets an attribute of type `kind`; descriptors given as values are kept alive."""
        if kind == DESCRIPTOR:
            self.kept += values
            values = tuple([value.pointer.value for value in values])
        array = (_C_TYPES.get(kind, ctypes.c_int) * len(values))(*values)
        call("cudnnBackendSetAttribute", self.pointer, attribute, kind, ctypes.c_int64(len(values)), array)
        return self

    def set_text(self, attribute: int, text: bytes) -> Descriptor:
        """Sets an attribute that is a text."""
        call("cudnnBackendSetAttribute", self.pointer, attribute, CHARACTER, ctypes.c_int64(len(text)), text)
        return self

    def finalize(self) -> Descriptor:
        """Makes it usable. Raises CudnnError where its attributes do not fit."""
        call("cudnnBackendFinalize", self.pointer)
        return self

    def get(self, attribute: int, kind: int, most: int = 1) -> list[Any]:
        """Up to `most` values of an attribute."""
        count, array = ctypes.c_int64(), (_C_TYPES.get(kind, ctypes.c_int) * most)()
        call(
            "cudnnBackendGetAttribute", self.pointer, attribute, kind, ctypes.c_int64(most), ctypes.byref(count), array
        )
        return list(array[: min(count.value, most)])

    def get_text(self, attribute: int) -> bytes:
        """An attribute that is a text."""
        count = ctypes.c_int64()
        query = ("cudnnBackendGetAttribute", self.pointer, attribute, CHARACTER)
        call(*query, ctypes.c_int64(0), ctypes.byref(count), None)
        text = ctypes.create_string_buffer(count.value + 1)
        call(*query, ctypes.c_int64(count.value), ctypes.byref(count), text)
        return text.raw[: count.value]

    def get_descriptors(self, attribute: int, kind: int, most: int) -> list[Descriptor]:
        """Up to `most` descriptors of `kind` that an attribute holds."""
        found = [Descriptor(kind) for _ in range(most)]
        array = (ctypes.c_void_p * most)(*[descriptor.pointer.value for descriptor in found])
        count = ctypes.c_int64()
        call(
            "cudnnBackendGetAttribute",
            self.pointer,
            attribute,
            DESCRIPTOR,
            ctypes.c_int64(most),
            ctypes.byref(count),
            array,
        )
        return found[: count.value]

    # Bound here: at the end of the process a module's names may be gone before its last objects.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.pointer and not _is_finalizing():
            functions().cudnnBackendDestroyDescriptor(self.pointer)


class Handle:
    """cuDNN's state for one device. Making it takes memory on the device, outside of the allocator."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = cuda.stream_pointer(device)
        self.pointer = ctypes.c_void_p()
        call("cudnnCreate", ctypes.byref(self.pointer))
        call("cudnnSetStream", self.pointer, ctypes.c_void_p(self.stream))

    def follow(self, stream: int) -> None:
        """Lets everything from now on run on `stream`."""
        call("cudnnSetStream", self.pointer, ctypes.c_void_p(stream))
        self.stream = stream


class Plan(plan.Plan):
    """An algorithm of cuDNN's."""

    __slots__ = ("_descriptor", "_execute", "_handle", "_packs", "_pointer")
    library = "cuDNN"

    def __init__(self, handle: Handle, descriptor: Descriptor) -> None:
        super().__init__(handle.device, int(descriptor.get(402, INT64)[0]))
        self._handle = handle
        self._descriptor = descriptor
        # At hand, since `run` is what a step's host time goes to.
        self._pointer = descriptor.pointer
        self._execute = functions().cudnnBackendExecute
        self._packs: dict[launches.Addresses, ctypes.c_void_p] = {}

    @classmethod
    def of_config(cls, handle: Handle, config: Descriptor) -> Plan:
        """Builds a plan from what the heuristics suggested. Raises CudnnError where the engine cannot serve it."""
        plan = Descriptor(PLAN).set(400, HANDLE, handle.pointer.value).set(401, DESCRIPTOR, config)
        return cls(handle, plan.finalize())

    @classmethod
    def of_text(cls, handle: Handle, text: bytes) -> Plan:
        """Builds the plan that `text` gave on a like device. Raises CudnnError where cuDNN cannot read it."""
        return cls(handle, Descriptor(PLAN).set_text(405, text).set(400, HANDLE, handle.pointer.value).finalize())

    def text(self) -> bytes:
        """For `of_text`."""
        return self._descriptor.get_text(405)

    def learn(self, x: int, weight: int, y: int, bias: int = 0) -> None:
        """As for every plan; the packs of addresses that were made meanwhile are of no use afterwards."""
        super().learn(x, weight, y, bias)
        self._drop_packs()

    def _run_by_library(self, stream: int, at: launches.Addresses) -> None:
        if stream != self._handle.stream:
            self._handle.follow(stream)
        status = self._execute(self._handle.pointer, self._pointer, self._packs.get(at) or self._pack(at))
        if status:
            raise _error("cudnnBackendExecute", status)

    def _pack(self, key: launches.Addresses) -> ctypes.c_void_p:
        """A pack cannot be changed, so each set of addresses has its own; the allocator lets a loop's steps repeat them."""
        if len(self._packs) == _MOST_PACKS:
            self._drop_packs()
        create, set_attribute, finalize, _ = _pack_functions()
        pack = ctypes.c_void_p()
        status = (
            create(VARIANT_PACK, ctypes.byref(pack))
            or set_attribute(pack, 1000, INT64, _THREE, _UIDS)
            or set_attribute(pack, 1001, POINTER, _THREE, _Addresses(*key[:3]))
            or set_attribute(pack, 1003, POINTER, _ONE, ctypes.byref(ctypes.c_void_p(key[3])))
            or finalize(pack)
        )
        if status:
            raise _error("cudnnBackendFinalize", status)
        self._packs[key] = pack
        return pack

    def _drop_packs(self) -> None:
        destroy = _pack_functions()[3]
        for pack in self._packs.values():
            destroy(pack)
        self._packs.clear()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent where __init__ failed; at the end of the process all goes anyway, and the driver may be gone.
        if getattr(self, "_packs", None) and not _is_finalizing():
            self._drop_packs()


_Addresses = ctypes.c_void_p * 3
_UIDS = (ctypes.c_int64 * 3)(_X, _WEIGHT, _Y)
_ONE, _THREE = ctypes.c_int64(1), ctypes.c_int64(3)


def tensor(name: str, dtype: str, shape: Sequence[int], stride: Sequence[int]) -> Descriptor:
    """Describes the operand called x, weight or y; addresses will be multiples of 16."""
    uid = {"x": _X, "weight": _WEIGHT, "y": _Y}[name]
    return (
        Descriptor(TENSOR)
        .set(901, DATA_TYPE, DATA_TYPES[dtype])
        .set(902, INT64, *shape)
        .set(903, INT64, *stride)
        .set(906, INT64, uid)
        .set(900, INT64, 16)
        .finalize()
    )


@cache
def handle(device: Device) -> Handle:
    """The handle of `device`, made at the first call."""
    return Handle(device)


@lru_cache(maxsize=1)
def functions() -> ctypes.CDLL:
    """The loaded library. Raises OSError, saying which package brings it, where there is none."""
    loaded = library.load("cudnn")
    loaded.cudnnGetVersion.restype = ctypes.c_size_t
    loaded.cudnnGetErrorString.restype = ctypes.c_char_p
    return loaded


@cache
def _pack_functions() -> tuple[Any, Any, Any, Any]:
    """What makes a variant pack: create, set, finalize, destroy. These are so short that they may keep Python's lock."""
    keeping_lock = ctypes.PyDLL(functions()._name)
    return (
        keeping_lock.cudnnBackendCreateDescriptor,
        keeping_lock.cudnnBackendSetAttribute,
        keeping_lock.cudnnBackendFinalize,
        keeping_lock.cudnnBackendDestroyDescriptor,
    )


def version() -> int:
    """Such as 91900 for 9.19.0."""
    return int(functions().cudnnGetVersion())


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the library. Raises CudnnError where it does not return success."""
    status = getattr(functions(), name)(*arguments)
    if status:
        raise _error(name, status)


def _error(function: str, status: int) -> CudnnError:
    loaded = functions()
    said = ctypes.create_string_buffer(512)
    loaded.cudnnGetLastErrorString(said, ctypes.c_size_t(len(said)))
    reason = loaded.cudnnGetErrorString(status).decode()
    detail = said.value.decode(errors="replace").strip()
    return CudnnError(function, status, f"{reason}: {detail}" if detail else reason)
