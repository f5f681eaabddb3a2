"""What ranks do together, on tensors: each function is called by every rank of the group, in the same order.

A collective is an instruction like any other: it runs on the communication stream of the tensor's device, after what wrote the
tensor, and what reads it later waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.device import Device, cpu
from framework.distributed.alone import AloneGroup
from framework.distributed.groups import Group
from framework.distributed.process_group import ProcessGroup
from framework.distributed.reduction import check_operation
from framework.distributed.work import Work
from framework.distributed.world import chosen_group
from framework.dtype import uint8
from framework.kernels.table import Kernel, kernel
from framework.ops.checks import check_tensor
from framework.tensor import Tensor
from framework.vm.array import Array, contiguous_stride
from framework.vm.host_stream import HostStream
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.runtime import runtime
from framework.vm.stream import Mark, Stream
from framework.words import kind_of


def all_reduce(tensor: Tensor, op: str = "sum", group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replaces `tensor` on every rank by the sum, avg, min or max over all ranks; every rank gets the same bits.

    `op` is one of `"sum"`, `"avg"`, `"min"` and `"max"`, or of `ReduceOp`. With `async_op` it returns at once, with a handle to
    wait for.
    """
    check_tensor("all_reduce", tensor)
    group = chosen_group(group)
    check_operation(op, tensor.dtype)
    call = _Call(group, tensor.device)
    array = call.inout(tensor.array)
    return call.issue(_all_reduce, (array,), async_op, op=op)


def broadcast(tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Replaces `tensor` on every rank by that of rank `src` (its number in the world)."""
    check_tensor("broadcast", tensor)
    group = chosen_group(group)
    call = _Call(group, tensor.device)
    array = call.inout(tensor.array)
    return call.issue(_broadcast, (array,), async_op, src=group.index(src))


def all_gather(
    out: Tensor | Sequence[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Puts the tensors of all ranks into `out`: a list with one for each, or a tensor that has them one behind the other.

    All have the shape and the type of `tensor`.
    """
    check_tensor("all_gather", tensor)
    group = chosen_group(group)
    call = _Call(group, tensor.device)
    joined = call.pieces("all_gather", out, tensor, written=True)
    return call.issue(_all_gather, (joined, call.input(tensor.array)), async_op)


def reduce_scatter(
    out: Tensor, tensor: Tensor | Sequence[Tensor], op: str = "sum", group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Reduces over the ranks and gives each its piece: rank r the r-th of a list, or of a tensor cut into equal pieces."""
    check_tensor("reduce_scatter", out)
    group = chosen_group(group)
    check_operation(op, out.dtype)
    call = _Call(group, out.device)
    joined = call.pieces("reduce_scatter", tensor, out, written=False)
    return call.issue(_reduce_scatter, (call.output(out.array), joined), async_op, op=op)


def barrier(group: Group | None = None, async_op: bool = False, device: Device | str = cpu) -> Work | None:
    """Returns when every rank of the group has come to it, and has done what it issued to `device` before."""
    call = _Call(chosen_group(group), Device(device))
    work = call.issue(_barrier, (call.token(),), async_op)
    if not async_op:
        machine.synchronize(call.device)
        call.check()
    return work


def send(tensor: Tensor, dst: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Sends `tensor` to rank `dst` (its number in the world), which calls `recv` with one of that shape and type.

    It may return before the tensor was received, but need not: let one of two ranks that exchange tensors receive first.
    """
    check_tensor("send", tensor)
    group = chosen_group(group)
    call = _Call(group, tensor.device)
    array = call.input(tensor.array)
    return call.issue(_send, (call.token(), array), async_op, dst=call.peer(dst))


def recv(tensor: Tensor, src: int, group: Group | None = None, async_op: bool = False) -> Work | None:
    """Receives what rank `src` sends into `tensor`."""
    check_tensor("recv", tensor)
    group = chosen_group(group)
    call = _Call(group, tensor.device)
    array = call.output(tensor.array)
    return call.issue(_recv, (array,), async_op, src=call.peer(src))


class Repeated:
    """A collective that is called again and again on the same dense array: what never changes about it is settled once."""

    def __init__(self, kernel_: Kernel, array: Array, group: Group, **attributes: Any) -> None:
        self._kernel, self._operands, self._attributes = kernel_, (array,), attributes
        self._group, self._device = group, array.storage.device
        self._words = _words(Instruction(kernel_, self._operands, attributes), group.name)
        self._backend: ProcessGroup | None = None
        self._again: Callable[[], Mark]

    @staticmethod
    def all_reduce(array: Array, op: str, group: Group) -> Repeated:
        """To be replaced on every rank by the sum, avg, min or max over all ranks."""
        check_operation(op, array.dtype)
        return Repeated(_all_reduce, array, group, op=op)

    @staticmethod
    def broadcast(array: Array, src: int, group: Group) -> Repeated:
        """To be replaced on every rank by that of rank `src` (its number in the world)."""
        return Repeated(_broadcast, array, group, src=group.index(src))

    def issue(self) -> Work:
        """Calls it once more; returns at once, as with `async_op`."""
        # Of now: a group that was destroyed has none.
        backend = self._group.on(self._device)
        if backend is not self._backend:
            self._again, self._backend = self._prepare(backend), backend
        backend.check()
        return Work(self._words, self._again(), backend.check)

    def _prepare(self, backend: ProcessGroup) -> Callable[[], Mark]:
        stream = self._group.stream(self._device)
        if _is_nothing(self._kernel, backend):
            return lambda: machine.newest(stream)
        instruction = Instruction(self._kernel, self._operands, {"group": backend, **self._attributes})
        prepare = getattr(backend, "prepared", None)
        run = prepare and prepare(self._kernel.__name__.removeprefix("_"), *self._operands, **self._attributes)
        return machine.repeating(instruction, stream, run)


class _Call:
    """One collective in the making: its operands laid out densely, then issued with what copies them there and back."""

    def __init__(self, group: Group, device: Device) -> None:
        self.group = group
        self.device = device
        self._runtime = runtime(device)
        self._backend = group.on(device)
        self._stream = group.stream(device)
        self._before: list[tuple[Array, Array]] = []
        self._after: list[tuple[Array, Array]] = []

    def input(self, array: Array) -> Array:
        """What to read in place of `array`."""
        return self._dense(array, read=True, written=False)

    def output(self, array: Array) -> Array:
        """What to write in place of `array`."""
        return self._dense(array, read=False, written=True)

    def inout(self, array: Array) -> Array:
        """What to read and write in place of `array`."""
        return self._dense(array, read=True, written=True)

    def token(self) -> Array:
        """One element, for an instruction that writes nothing else."""
        return self._runtime.full((1,), 0, uint8)

    def pieces(self, name: str, given: Tensor | Sequence[Tensor], like: Tensor, *, written: bool) -> Array:
        """A dense array with one piece like `like` for each rank, standing for a tensor or a list of them."""
        size = self.group.size
        if isinstance(given, Tensor):
            _check(given, like, "it", elements=size * like.numel())
            return self.output(given.array) if written else self.input(given.array)
        if not isinstance(given, Sequence):
            raise TypeError(f"{name} takes a tensor, or a list of one for each rank; got {kind_of(given)}")
        if len(given) != size:
            raise ValueError(f"{len(given)} tensors for the {size} ranks of group {self.group.name}; each has one")
        joined = self._runtime.empty((size, *like.shape), like.dtype)
        steps = contiguous_stride(joined.shape)
        for rank, tensor in enumerate(given):
            check_tensor(name, tensor)
            _check(tensor, like, f"tensor {rank}", shape=like.shape)
            piece = joined.view(like.shape, steps[1:], rank * like.numel())
            if written:
                self._after.append((tensor.array, piece))
            else:
                self._before.append((piece, tensor.array))
        return joined

    def peer(self, rank: int) -> int:
        """The number within the group of the rank to send to or receive from."""
        number = self.group.index(rank)
        if number == self.group.rank:
            raise ValueError(f"rank {rank} cannot send to itself, nor receive from itself")
        return number

    def check(self) -> None:
        """Raises CollectiveError where the group has failed since."""
        self._backend.check()

    def issue(self, kernel_: Kernel, operands: tuple[Array, ...], async_op: bool, **attributes: Any) -> Work | None:
        """Issues it; returns its handle, or None when it is done (on a CUDA device: when it is under way)."""
        instruction = Instruction(kernel_, operands, {"group": self._backend, **attributes})
        if self.device is cpu and not async_op and self._stream.is_done(self._stream.mark()):
            # Nothing is under way in the stream's thread, and the caller would only wait for it: the way there is saved.
            self._issue(instruction, None)
            return None
        self._issue(instruction, self._stream)
        work = Work(_words(instruction, self.group.name), machine.newest(self._stream), self._backend.check)
        if async_op:
            return work
        work.wait()
        return None

    def _issue(self, instruction: Instruction, stream: Stream | None) -> None:
        self._backend.check()
        if _is_nothing(instruction.kernel, self._backend):
            return
        for target, source in self._before:
            self._copy(target, source, stream)
        machine.issue(instruction, stream)
        for target, source in self._after:
            self._copy(target, source, stream)

    def _dense(self, array: Array, *, read: bool, written: bool) -> Array:
        if array.is_contiguous:
            return array
        dense = self._runtime.empty(array.shape, array.dtype)
        if read:
            self._before.append((dense, array))
        if written:
            self._after.append((array, dense))
        return dense

    def _copy(self, target: Array, source: Array, stream: Stream | None) -> None:
        # The host's own kernel takes no bfloat16; a device's kernels are no work for a stream of the host.
        copy = _copy_bits if self.device is cpu else self._runtime.table.kernels["copy"]
        beside = stream if self.device is cpu or not isinstance(stream, HostStream) else None
        machine.issue(Instruction(copy, (target, source), {}), beside)


def _is_nothing(kernel_: Kernel, backend: ProcessGroup) -> bool:
    """Whether a collective leaves all as it is: of one rank, what replaces an array by that of all ranks."""
    return isinstance(backend, AloneGroup) and kernel_ in (_all_reduce, _broadcast, _barrier)


def _words(instruction: Instruction, name: str) -> Callable[[], str]:
    """What says which collective it is, and holds nothing of its memory."""
    words = instruction.words()
    return lambda: f"{words()} of group {name}"


def _check(
    tensor: Tensor, like: Tensor, which: str, *, shape: tuple[int, ...] | None = None, elements: int | None = None
) -> None:
    """Raises ValueError unless the tensor has the type and device of `like`, and the given shape or number of elements."""
    fits = tensor.shape == shape if shape is not None else tensor.numel() == elements
    if not fits or tensor.dtype is not like.dtype or tensor.device is not like.device:
        wanted = f"shape {list(shape)}" if shape is not None else f"{elements} elements in all"
        raise ValueError(
            f"{which} is of shape {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}; it has to be of {wanted},"
            f" {like.dtype}, on {like.device}"
        )


# ---- the instructions


@kernel(outputs=1)
def _all_reduce(array: Array, *, group: ProcessGroup, op: str) -> None:
    group.all_reduce(array, op)


@kernel(outputs=1)
def _broadcast(array: Array, *, group: ProcessGroup, src: int) -> None:
    group.broadcast(array, src)


@kernel(outputs=1)
def _all_gather(out: Array, array: Array, *, group: ProcessGroup) -> None:
    group.all_gather(out, array)


@kernel(outputs=1)
def _reduce_scatter(out: Array, array: Array, *, group: ProcessGroup, op: str) -> None:
    group.reduce_scatter(out, array, op)


@kernel(outputs=1)
def _barrier(token: Array, *, group: ProcessGroup) -> None:
    group.barrier(token)


@kernel(outputs=1)
def _send(token: Array, array: Array, *, group: ProcessGroup, dst: int) -> None:
    group.send(array, dst)


@kernel(outputs=1)
def _recv(array: Array, *, group: ProcessGroup, src: int) -> None:
    group.recv(array, src)


@kernel(outputs=1)
def _copy_bits(out: Array, array: Array) -> None:
    np.copyto(out.host_view(), array.host_view())
