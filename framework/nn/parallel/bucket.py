"""Buckets: gradients of several parameters in one piece of memory, so that one collective averages them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from framework.autograd.gradient import Home
from framework.nn.parameter import Parameter
from framework.tensor import Tensor
from framework.vm.array import Array, dense_stride_like, side_by_side
from framework.vm.runtime import runtime


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket. `number` is its own among those of all buckets."""

    name: str
    parameter: Parameter
    gradient: Array
    number: int


class Bucket:
    """The gradients of some parameters of one element type and device. The first of them has number `first`.

    Behind them lie `flags` elements, which say of the parameters with such numbers whether a rank has a gradient for them.
    The bucket that is sent last has those of all parameters: nobody reads them before, and they are written at once.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], first: int = 0, flags: int = 0) -> None:
        like = named[0][1].array
        kernels = runtime(like.storage.device)
        places, start = side_by_side(parameter.array for _, parameter in named)
        self.flat: Array = kernels.full((start + flags,), 0.0, like.dtype)
        self._flags = self.flat.view((flags,), (1,), start)
        self.slots: list[Slot] = []
        for number, ((name, parameter), offset) in enumerate(zip(named, places, strict=True), first):
            shape = parameter.shape
            gradient = self.flat.view(shape, dense_stride_like(shape, parameter.stride()), offset)
            self.slots.append(Slot(name, parameter, gradient, number))
        self._parameters = [slot.parameter for slot in self.slots]
        self._gradients = [slot.gradient for slot in self.slots]
        self._raise_flags = kernels.prepared("fill", self._flags.layout, value=1)

    def give_homes(self) -> None:
        """Lets the gradients be made here."""
        for slot in self.slots:
            slot.parameter.home = Home(slot.gradient)

    def gather(self) -> None:
        """Moves the gradients that exist here."""
        for slot in self.slots:
            if slot.parameter.grad is not None:
                self._move_in(slot, slot.parameter.grad)
                slot.parameter.grad = Tensor(slot.gradient)

    def take_homes(self) -> None:
        """Gradients are made elsewhere from now on, unless they have another home already."""
        for slot in self.slots:
            home = slot.parameter.home
            if home is not None and home.array is slot.gradient:
                slot.parameter.home = None

    def fill(self, *, keep_views: bool) -> list[Slot]:
        """Brings in what lies elsewhere, and zeros for what is missing; returns the slots of those.

        With `keep_views` gradients from elsewhere are views of the bucket from now on.
        """
        try:
            if [parameter.grad.array for parameter in self._parameters] == self._gradients:  # type: ignore[union-attr]
                return []  # each of them lies here already
        except AttributeError:  # one has none
            pass
        kernels = runtime(self.flat.storage.device)
        missing = []
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is None:
                kernels.fill(slot.gradient, value=0)
                missing.append(slot)
            elif grad.array is not slot.gradient:
                self._move_in(slot, grad)
                if keep_views:
                    slot.parameter.grad = Tensor(slot.gradient)
                    if slot.parameter.home is None:
                        # It was converted there and back.
                        slot.parameter.home = Home(slot.gradient)
        return missing

    def flag(self, unused: Sequence[Slot]) -> None:
        """Says that this rank has a gradient for each parameter of all buckets, apart from those that are `unused`."""
        self._raise_flags(self._flags)
        for slot in unused:
            runtime(self.flat.storage.device).fill(self._flag(slot), value=0)

    def is_used(self, slot: Slot) -> bool:
        """Whether some rank has a gradient for the slot, which may be one of another bucket."""
        return bool(runtime(self.flat.storage.device).to_host(self._flag(slot))[0] > 0)

    def clear(self) -> None:
        """Zeros for all: the part of a rank that has no data left."""
        runtime(self.flat.storage.device).fill(self.flat, value=0)

    def copy_back(self) -> None:
        """Gives the averaged gradients to parameters whose gradients lie elsewhere."""
        kernels = runtime(self.flat.storage.device)
        for slot in self.slots:
            grad = slot.parameter.grad
            if grad is not None and grad.array is not slot.gradient:
                kernels.copy(grad.array, slot.gradient)

    def _move_in(self, slot: Slot, grad: Tensor) -> None:
        if grad.shape != slot.gradient.shape or grad.dtype is not slot.gradient.dtype or grad.device is not self.device:
            raise ValueError(
                f"parameter {slot.name} of shape {list(slot.gradient.shape)}, {slot.gradient.dtype}, on {self.device} has a"
                f" grad of shape {list(grad.shape)}, {grad.dtype}, on {grad.device}; they must be the same"
            )
        runtime(self.flat.storage.device).copy(slot.gradient, grad.array)

    def _flag(self, slot: Slot) -> Array:
        return self._flags.view((1,), (1,), slot.number)

    @property
    def device(self) -> object:
        """Where it lies."""
        return self.flat.storage.device


def make_buckets(named: Sequence[tuple[str, Parameter]], cap_bytes: int) -> list[Bucket]:
    """Buckets of at most `cap_bytes`, or one parameter, from the last to the first: about as backward reaches them."""
    groups: list[list[tuple[str, Parameter]]] = []
    open_groups: dict[object, tuple[list[tuple[str, Parameter]], int]] = {}
    for name, parameter in reversed(named):
        kind = (parameter.device, parameter.dtype)
        group, nbytes = open_groups.get(kind, ([], 0))
        if group and nbytes + parameter.array.nbytes > cap_bytes:
            group, nbytes = [], 0
        if not group:
            groups.append(group)
        group.append((name, parameter))
        open_groups[kind] = (group, nbytes + parameter.array.nbytes)
    buckets, first = [], 0
    for group in groups:
        buckets.append(Bucket(group, first, flags=len(named) if group is groups[-1] else 0))
        first += len(group)
    return buckets
