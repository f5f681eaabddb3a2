"""What a library's plan launches, found by recording it, and launched again at other addresses for less of the host's time.

At every call the library works out anew which kernels to launch with which parameters, and cuDNN wants a pack of
addresses made for it. For one plan it always comes to the same, but for the addresses in it. So a plan is recorded into
CUDA graphs, none of which is ever run: at the addresses given, and twice with each operand moved by a distance of its
own. Where the first two recordings differ tells where the addresses stand; the third has to be as these foretell, to
the last byte, or the plan is left to its library. Only where the library left an address of the host's memory, another
at each call, it does not matter which: no kernel reads it.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from framework.kernels.cuda import driver, recording
from framework.kernels.cuda.driver import LaunchConfig
from framework.kernels.cuda.recording import Node
from framework.vm import cuda, launch_groups

# The addresses of x, weight, y and scratch memory, 0 where there is none, and of a bias where there is one.
Addresses = tuple[int, ...]
# Moved operands keep this alignment, which parameters may depend on, and it is asked of those that come later. It is that of
# all but small blocks of memory.
ALIGNMENT = 512
_MOVES = (
    (3 << 20, 7 << 20, 13 << 20, 29 << 20, 61 << 20),
    tuple([factor * ALIGNMENT for factor in (5, 17, 41, 97, 211)]),
)
_FARTHEST = 1 << 40
# Sets of addresses whose calls are kept, for each plan; a set takes a few KiB on the host.
_MOST_KNOWN = 32


class Place(NamedTuple):
    """Where an address stands: in which parameter of which node, at which byte, and how far behind which operand."""

    node: int
    parameter: int
    start: int
    operand: int
    distance: int


def places(first: Sequence[Node], at: Addresses, moved: Sequence[Node], moved_at: Addresses) -> list[Place] | None:
    """Where addresses stand in what was recorded at `at`, by what was recorded at others; None where that is not plain."""
    differences = _differences(first, moved)
    if differences is None:
        return None
    shifts = [there - here for here, there in zip(at, moved_at, strict=True)]
    found = []
    for node, parameter, start, old, new in differences:
        value = int.from_bytes(old, sys.byteorder)
        shift = int.from_bytes(new, sys.byteorder) - value
        operands = [k for k, distance in enumerate(shifts) if distance == shift and at[k]]
        if len(old) == 8 and len(operands) == 1 and abs(value - at[operands[0]]) <= _FARTHEST:
            found.append(Place(node, parameter, start, operands[0], value - at[operands[0]]))
        elif not _are_of_the_host(old, new):
            return None
    return found


def _differences(one: Sequence[Node], other: Sequence[Node]) -> list[tuple[int, int, int, bytes, bytes]] | None:
    """The words in which parameters differ: the node, the parameter, at which byte, and both. None for other kernels."""
    heads, other_heads = ([(*node[:3], *map(len, node.parameters)) for node in nodes] for nodes in (one, other))
    if heads != other_heads:
        return None
    return [
        (i, j, start, here[start : start + 8], there[start : start + 8])
        for i, (node, moved) in enumerate(zip(one, other, strict=True))
        for j, (here, there) in enumerate(zip(node.parameters, moved.parameters, strict=True))
        for start in range(0, len(here), 8)
        if here[start : start + 8] != there[start : start + 8]
    ]


def _are_of_the_host(*words: bytes) -> bool:
    """Whether these are addresses of the host's memory that the device cannot read, and what lies there is gone by then."""
    return all(len(word) == 8 and recording.is_of_the_host(int.from_bytes(word, sys.byteorder)) for word in words)


def foretold(first: Sequence[Node], found: Sequence[Place], at: Addresses) -> list[Node]:
    """What would be recorded with operands at other addresses."""
    made = [[bytearray(parameter) for parameter in node.parameters] for node in first]
    for node, parameter, start, operand, distance in found:
        struct.pack_into("@Q", made[node][parameter], start, at[operand] + distance)
    return [
        node._replace(parameters=tuple([bytes(one) for one in all_])) for node, all_ in zip(first, made, strict=True)
    ]


def record(execute: Callable[[Addresses], None], stream: int, at: Addresses) -> Launches | None:
    """What `execute` launches on `stream`, for operands at any address; None where it is not plain.

    `execute` has run before, so that all is loaded, and nothing is being recorded on the stream.
    """
    if not recording.is_readable():
        return None
    first = _recorded(execute, stream, at)
    if first is None:
        return None
    found: list[Place] | None = None
    for moves in _MOVES:
        moved_at = tuple([address and address + move for address, move in zip(at, moves, strict=False)])
        moved = _recorded(execute, stream, moved_at)
        if moved is None:
            return None
        if found is None:
            found = places(first, at, moved, moved_at)
            if found is None or _holds_other_memory(first, found):
                return None
        else:
            unforeseen = _differences(foretold(first, found, moved_at), moved)
            if unforeseen is None or not all(_are_of_the_host(old, new) for *_, old, new in unforeseen):
                return None
    return Launches(first, found or [])


def _recorded(execute: Callable[[Addresses], None], stream: int, at: Addresses) -> list[Node] | None:
    """What `execute` launches, of the second of two calls.

    Between the fields of a structure a library leaves what other calls left on its stack: here always those of the first.
    """
    recording.recorded(partial(execute, at), stream)
    return recording.recorded(partial(execute, at), stream)


def _holds_other_memory(nodes: Sequence[Node], found: Sequence[Place]) -> bool:
    """Whether a parameter holds an address of memory besides the operands': of the library's own, which it may give back."""
    known = {place[:3] for place in found}
    for i, node in enumerate(nodes):
        for j, parameter in enumerate(node.parameters):
            for start in range(0, len(parameter) - 7, 8):
                word = int.from_bytes(parameter[start : start + 8], sys.byteorder)
                if (i, j, start) in known or word < 1 << 32 or word >> 48:
                    continue
                if recording.is_memory(word):
                    return True
    return False


class Launches:
    """Kernels and fills to launch one after the other, once it is said where the operands lie.

    Several layers share a plan, and a loop's steps repeat their addresses: for each set of these the calls are kept.
    """

    def __init__(self, nodes: Sequence[Node], found: Sequence[Place]) -> None:
        self._nodes = nodes
        self._found = found
        # Whoever launches takes calls out, until the driver has read them. Another thread meanwhile, or a finalizer or a signal
        # handler in the middle, makes its own, where with a lock it would wait.
        self._known: dict[tuple[int, ...], _Calls] = {}
        # The same one each time it is looked at, as a method is not.
        self._launch_later = self._launch

    def run(self, stream: int, operands: Addresses) -> None:
        """Launches all on `stream`, with the operands at these addresses."""
        groups = launch_groups.of_stream.get(stream)
        if groups is None or not groups.takes(self._launch_later, operands):
            self._launch(stream, operands)

    def _launch(self, stream: int, operands: Addresses) -> None:
        at = (*operands, stream)
        calls = self._known.pop(at, None) or self._new(at)
        for function, arguments in calls.calls:
            status = function(*arguments)
            if status:
                raise cuda.translated(RuntimeError(f"the driver's error {status}"), "launching a library's kernel")
        self._known[at] = calls

    def _new(self, at: tuple[int, ...]) -> _Calls:
        """The calls for operands and a stream that are not known: new ones, or those used longest ago, moved there."""
        known = list(self._known)
        calls = self._known.pop(known[0], None) if len(known) >= _MOST_KNOWN else None
        if calls is None:
            calls = _Calls(self._nodes, self._found)
        calls.move(at)
        return calls


class _Calls:
    """What to call, as pairs of function and arguments, with parameters that can be moved to other addresses."""

    def __init__(self, nodes: Sequence[Node], found: Sequence[Place]) -> None:
        api = driver.api()
        self.calls: list[tuple[Any, tuple]] = []
        self._streams: list[Any] = []
        held: dict[tuple[int, int], Any] = {}
        for i, node in enumerate(nodes):
            buffers = [ctypes.create_string_buffer(parameter, len(parameter)) for parameter in node.parameters]
            held.update({(i, j): buffer for j, buffer in enumerate(buffers)})
            if node.kind == recording.FILL:
                stream = ctypes.c_void_p()
                width, value, count = node.fixed
                target = ctypes.c_uint64.from_buffer(buffers[0])
                fill = {1: api.cuMemsetD8Async, 2: api.cuMemsetD16Async, 4: api.cuMemsetD32Async}[width]
                self.calls.append((fill, (target, ctypes.c_uint(value), ctypes.c_size_t(count), stream)))
                self._streams.append(stream)
            else:
                config = _config(node.fixed)
                pointers = (ctypes.c_void_p * len(buffers))(*[ctypes.addressof(buffer) for buffer in buffers])
                arguments = (ctypes.byref(config), ctypes.c_void_p(node.function), pointers, None)
                self.calls.append((api.cuLaunchKernelEx, arguments))
                self._streams.append(config)
        # The buffers, whose addresses the calls hold, and what is written to them.
        self._writes = [
            (ctypes.c_uint64.from_buffer(held[node, parameter], start), operand, distance)
            for node, parameter, start, operand, distance in found
        ]
        self._held = held

    def move(self, at: tuple[int, ...]) -> None:
        """Lets them be for operands and a stream at these addresses."""
        for word, operand, distance in self._writes:
            word.value = at[operand] + distance
        for held in self._streams:
            if isinstance(held, LaunchConfig):
                held.stream = at[-1]
            else:
                held.value = at[-1]


def _config(fixed: tuple) -> LaunchConfig:
    """The configuration of a kernel node."""
    *numbers, cluster, policy, starts_early = fixed
    attributes: list[tuple[int, tuple[int, ...]]] = []
    if any(cluster):
        attributes += [(driver.CLUSTER, cluster), (driver.CLUSTER_POLICY, (policy,))]
    if starts_early:
        attributes.append((driver.STARTS_EARLY, (1,)))
    return LaunchConfig.of(numbers[:3], numbers[3:6], numbers[6], attributes)
