"""Primitives: oneDNN's compiled operations, made once for each problem and then only given addresses."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from framework.device import cpu
from framework.kernels.onednn.descriptors import Descriptor
from framework.kernels.onednn.library import UNIMPLEMENTED, OneDnnError, library
from framework.vm import scratch

# What oneDNN calls the operands of a primitive.
SRC, SRC_1, DST, WEIGHTS, BIAS = 1, 2, 17, 33, 41
MEAN, VARIANCE, SCALE, SHIFT = 49, 50, 51, 52
WORKSPACE, SCRATCHPAD = 64, 80
DIFF_SRC, DIFF_DST, DIFF_WEIGHTS, DIFF_BIAS = 129, 145, 161, 169
DIFF_SCALE, DIFF_SHIFT = 255, 256
POST_OPERATION = 32768  # times the place of the post-operation, counted from 1, or-ed with SRC_1

_QUERY_IMPLEMENTATION = 8
_QUERY_SCRATCHPAD = 136
_QUERY = {
    SRC: 129,
    DIFF_SRC: 130,
    WEIGHTS: 131,
    DIFF_WEIGHTS: 132,
    DST: 133,
    DIFF_DST: 134,
    WORKSPACE: 135,
}
_SCRATCHPAD_BY_USER = 1


class _Argument(ctypes.Structure):
    _fields_ = [("name", ctypes.c_int), ("memory", ctypes.c_void_p)]


class Attributes:
    """What is asked of a primitive beyond its operation: that we bring the scratchpad, and post-operations."""

    def __init__(self) -> None:
        self.handle = library().make("primitive_attr_create")
        library().destroy_with(self, "primitive_attr_destroy", self.handle)
        library().call("primitive_attr_set_scratchpad_mode", self.handle, _SCRATCHPAD_BY_USER)
        self._chain: ctypes.c_void_p | None = None

    def then_binary(self, operation: int, other: Descriptor) -> Attributes:
        """Adds: result = result operation other."""
        return self._then("binary", operation, other.handle)

    def then_eltwise(self, function: int, alpha: float, beta: float) -> Attributes:
        """Adds: result = function(result), with its two parameters."""
        return self._then("eltwise", function, ctypes.c_float(alpha), ctypes.c_float(beta))

    def then_sum(self, scale: float) -> Attributes:
        """Adds: result = result + scale · what the target held before."""
        return self._then("sum", ctypes.c_float(scale), 0, 0)

    def _then(self, operation: str, *arguments: Any) -> Attributes:
        if self._chain is None:
            self._chain = library().make("post_ops_create")
            library().destroy_with(self, "post_ops_destroy", self._chain)
        library().call(f"post_ops_append_{operation}", self._chain, *arguments)
        library().call("primitive_attr_set_post_ops", self.handle, self._chain)
        return self


class Description:
    """What a primitive will do, and with which implementation."""

    def __init__(self, handle: ctypes.c_void_p) -> None:
        self.handle = handle
        library().destroy_with(self, "primitive_desc_destroy", handle)

    @property
    def implementation(self) -> str:
        """oneDNN's name of the implementation, such as `brgconv:avx2`."""
        text = ctypes.c_char_p()
        library().call("primitive_desc_query", self.handle, _QUERY_IMPLEMENTATION, 0, ctypes.byref(text))
        return (text.value or b"").decode()

    @property
    def is_reference(self) -> bool:
        """Whether oneDNN has nothing for this problem but its own plain loops, which are slower than NumPy."""
        return self.implementation.startswith(("ref", "simple:any"))

    def layout(self, operand: int) -> Descriptor:
        """The layout that the primitive wants of an operand. Its size is 0 for what the primitive does not take."""
        return self._query(_QUERY[operand])

    @property
    def scratchpad_bytes(self) -> int:
        return self._query(_QUERY_SCRATCHPAD).nbytes

    def _query(self, what: int) -> Descriptor:
        found = library().functions.dnnl_primitive_desc_query_md(self.handle, what, 0)
        return Descriptor(ctypes.c_void_p(found), owned=False)


def describe(operation: str, *arguments: Any, attributes: Attributes | None = None) -> Description | None:
    """Asks for an operation (`convolution_forward`, `reorder`, …). None where oneDNN does not have it."""
    attributes = attributes or Attributes()
    plain = [argument.handle if isinstance(argument, Descriptor) else argument for argument in arguments]
    try:
        handle = library().make(operation + "_primitive_desc_create", *plain, attributes.handle)
    except OneDnnError as refused:
        if refused.status == UNIMPLEMENTED:
            return None
        raise
    return Description(handle)


class Primitive:
    """A compiled operation. Calling it with an address for each of its operands runs it."""

    def __init__(self, description: Description, operands: Sequence[tuple[int, Descriptor]]) -> None:
        self._library = loaded = library()
        self.handle = loaded.make("primitive_create", description.handle)
        loaded.destroy_with(self, "primitive_destroy", self.handle)
        # The library keeps what the layouts of `operands` point to only as long as the description lives.
        self.description = description
        self.scratchpad_bytes = description.scratchpad_bytes
        layouts = list(operands)
        if self.scratchpad_bytes:
            layouts.append((SCRATCHPAD, description._query(_QUERY_SCRATCHPAD)))
        memories = [
            loaded.make("memory_create", layout.handle, loaded.engine, ctypes.c_void_p()) for _, layout in layouts
        ]
        for memory in memories:
            loaded.destroy_with(self, "memory_destroy", memory)
        self._memories = [memory.value for memory in memories]
        self._arguments = (_Argument * len(layouts))(
            *[_Argument(name, memory) for (name, _), memory in zip(layouts, memories, strict=True)]
        )
        self._call = (self.handle, loaded.stream, len(layouts), self._arguments)
        self._execute = loaded.functions.dnnl_primitive_execute
        self._set_address = loaded.functions.dnnl_memory_set_data_handle
        # The addresses are set in objects that belong to the primitive: one thread at a time.
        self._lock = threading.Lock()

    def __call__(self, *addresses: int) -> None:
        if self._library.is_forked:
            raise RuntimeError(
                "oneDNN cannot run in a forked process once it was loaded in the parent, since its threads stayed there; "
                'start processes with multiprocessing.get_context("spawn")'
            )
        if self.scratchpad_bytes:
            work = scratch(cpu, self.scratchpad_bytes)
            addresses = (*addresses, work.ptr)
        set_address = self._set_address
        with self._lock:
            for memory, address in zip(self._memories, addresses, strict=True):
                set_address(memory, address)
            status = self._execute(*self._call)
        if status:
            raise OneDnnError("dnnl_primitive_execute", status)


def reorder(source: Descriptor, target: Descriptor) -> Primitive | None:
    """The copy from one layout to another, or None where they are the same."""
    if source == target:
        return None
    engine = library().engine
    description = describe("reorder", source, engine, target, engine)
    if description is None:
        raise OneDnnError("dnnl_reorder_primitive_desc_create", UNIMPLEMENTED)
    return Primitive(description, [(SRC, source), (DST, target)])


class Operand:
    """One operand of a computation: the layout it has with us, and the one that the primitive wants."""

    __slots__ = ("is_output", "layout", "name")

    def __init__(self, name: int, layout: Descriptor, is_output: bool = False) -> None:
        self.name = name
        self.layout = layout
        self.is_output = is_output


class Computation:
    """A primitive between the layouts we have and the ones it wants, which are reached through scratch memory.

    Calling it with an address for each operand, in order, runs it.
    """

    def __init__(self, description: Description, operands: Sequence[Operand]) -> None:
        wanted = [
            description.layout(operand.name) if operand.name in _QUERY else operand.layout for operand in operands
        ]
        self._primitive = Primitive(
            description, [(operand.name, layout) for operand, layout in zip(operands, wanted, strict=True)]
        )
        self._before = list(_copies(operands, wanted, outputs=False))
        self._after = list(_copies(operands, wanted, outputs=True))
        self._direct = not (self._before or self._after)

    def __call__(self, *addresses: int) -> None:
        if self._direct:
            self._primitive(*addresses)
            return
        places = list(addresses)
        held = []
        for index, copy, nbytes in self._before:
            held.append(scratch(cpu, nbytes))
            places[index] = held[-1].ptr
            copy(addresses[index], places[index])
        for index, _, nbytes in self._after:
            held.append(scratch(cpu, nbytes))
            places[index] = held[-1].ptr
        self._primitive(*places)
        for index, copy, _ in self._after:
            copy(places[index], addresses[index])


def _copies(
    operands: Sequence[Operand], wanted: Sequence[Descriptor], outputs: bool
) -> Iterator[tuple[int, Primitive, int]]:
    for index, (operand, layout) in enumerate(zip(operands, wanted, strict=True)):
        if operand.is_output is outputs:
            copy = reorder(layout, operand.layout) if outputs else reorder(operand.layout, layout)
            if copy is not None:
                yield index, copy, layout.nbytes
