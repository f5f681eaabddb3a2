"""The reducer: averages the gradients of all ranks while backward is still at work on the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from framework import distributed
from framework.autograd.engine import after_backward
from framework.distributed.collectives import Repeated
from framework.nn.parallel.bucket import Bucket, Slot, make_buckets
from framework.nn.parallel.join import GRADIENTS, Join
from framework.nn.parameter import Parameter
from framework.tensor import Tensor
from framework.vm.runtime import runtime


class Reducer:
    """Averages the gradients of parameters over a group of ranks, once in each backward.

    They lie in buckets. A bucket is sent when backward has made all gradients in it, and always behind those before it, so
    that every rank sends the same ones in the same order whatever it computes. What backward did not reach is sent at its end.
    """

    def __init__(
        self, named: Sequence[tuple[str, Parameter]], group: distributed.Group, cap_bytes: int, *, as_views: bool
    ) -> None:
        self.buckets: list[Bucket] = []
        self._removers: list[Callable[[], None]] = []
        self.buckets = make_buckets(named, cap_bytes)
        # What is told before the first bucket of each backward is sent.
        self.joining: Join | None = None
        self._averages = {bucket: Repeated.all_reduce(bucket.flat, "avg", group) for bucket in self.buckets}
        self._as_views = as_views
        self._progress = progress = _Progress(self, [len(bucket.slots) for bucket in self.buckets])
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(progress.hook(place, slot.number))
            for place, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]
        if as_views:
            for bucket in self.buckets:
                bucket.give_homes()
                bucket.gather()
        self._reset()

    def close(self) -> None:
        """Lets the parameters be as they were; gradients that exist stay where they are."""
        removers, self._removers = self._removers, []
        for remove in removers:
            remove()
        for bucket in self.buckets:
            bucket.take_homes()

    def __del__(self) -> None:
        self.close()

    def prepare(self, outputs: Any, *, averages: bool) -> None:
        """Gets ready for the backward of `outputs`; whether it `averages` what it finds is settled here."""
        self._recover()
        self._progress.set(averages=averages)
        if averages:
            for output in tensors_in(outputs):
                if output.node is not None:
                    # A backward that reaches no parameter has to send its zeros all the same.
                    output.register_hook(self.reached)

    def send_zeros(self) -> None:
        """Takes part in the average with nothing to give; this rank's gradients are dropped."""
        for bucket in self.buckets:
            bucket.clear()
            self._send(bucket)
        self._wait()
        for slot in self._slots():
            slot.parameter.grad = None
        self._reset()

    def _reset(self) -> None:
        self._progress.reset()
        self._sent = 0
        self._unused: list[Slot] = []
        self._works: list[Any] = []
        self._has_failed = False

    def reached(self, gradient: Tensor) -> None:
        """A backward has come to an output of the module."""
        if self._progress.averages and not self._progress.is_running:
            self.begin()

    def begin(self) -> None:
        """A backward has come to something of the module."""
        self._recover()
        after_backward(self._finish, self._fail)
        self._progress.set(is_running=True)

    def go_on(self) -> None:
        """A bucket has all its gradients: sends it, unless one before it lacks some, and those behind it that waited."""
        missing = self._progress.missing
        while self._sent < len(self.buckets) and not missing[self._sent]:
            self._send_next()

    def refuse(self, parameter: Tensor) -> None:
        """Raises RuntimeError for a second gradient of a parameter."""
        (name,) = [slot.name for slot in self._slots() if slot.parameter is parameter]
        raise RuntimeError(
            f"parameter {name} got a gradient twice in one backward, the second time after the first was sent to the other"
            " ranks: run a backward that is nested in another under no_sync()"
        )

    def _send_next(self) -> None:
        if not self._sent:
            if self.joining is not None:
                self.joining.announce(GRADIENTS)
        bucket = self.buckets[self._sent]
        self._unused += bucket.fill(keep_views=self._as_views)
        if bucket is self.buckets[-1]:
            bucket.flag(self._unused)
        self._send(bucket)
        self._sent += 1

    def _send(self, bucket: Bucket) -> None:
        self._works.append(self._averages[bucket].issue())

    def _finish(self) -> None:
        """At the end of backward: sends the rest, and takes what the others found for parameters not used here."""
        while self._sent < len(self.buckets):
            self._send_next()
        self._wait()
        if not self._as_views:
            for bucket in self.buckets:
                bucket.copy_back()
        for slot in self._unused:
            if self.buckets[-1].is_used(slot):
                slot.parameter.grad = self._gradient(slot)
        self._reset()

    def _fail(self) -> None:
        """Backward ended half-way. What it sent may be under way as long as other ranks like: it is not waited for here."""
        self._progress.reset()
        self._has_failed = True
        for bucket in self.buckets:
            bucket.take_homes()

    def _recover(self) -> None:
        """After a backward that failed half-way: what it sent has to end before its memory is used again."""
        if not self._has_failed:
            return
        self._wait()
        self._reset()
        if self._as_views:
            for bucket in self.buckets:
                bucket.give_homes()

    def _gradient(self, slot: Slot) -> Tensor:
        if self._as_views:
            return Tensor(slot.gradient)
        kernels = runtime(slot.gradient.storage.device)
        own = kernels.empty_like(slot.gradient)
        kernels.copy(own, slot.gradient)
        return Tensor(own)

    def _wait(self) -> None:
        works, self._works = self._works, []
        # The last first: the others were issued before it, to the same stream.
        for work in reversed(works):
            work.wait()

    def _slots(self) -> Iterator[Slot]:
        for bucket in self.buckets:
            yield from bucket.slots


class _Progress:
    """How far the backward under way has come. Parameters hold it, so it holds neither them nor buckets.

    `missing` has for each bucket the number of gradients that it still lacks.
    """

    def __init__(self, reducer: Reducer, sizes: list[int]) -> None:
        self._reducer = weakref.ref(reducer)
        self._sizes = sizes
        self.averages = True
        self.is_running = False
        # Filled anew for each backward, not made anew: each hook knows them.
        self.missing = list(sizes)
        self._is_there = bytearray(sum(sizes))
        self._none_is_there = bytes(sum(sizes))
        self.reset()

    def reset(self) -> None:
        """Gets ready for the next backward."""
        self.set(is_running=False)
        self.missing[:] = self._sizes
        self._is_there[:] = self._none_is_there

    def set(self, *, averages: bool | None = None, is_running: bool | None = None) -> None:
        """Notes whether gradients are averaged, whether a backward is under way, or both."""
        self.averages = self.averages if averages is None else averages
        self.is_running = self.is_running if is_running is None else is_running
        # Whether gradients that are found now count.
        self._counts = self.averages and self.is_running

    def hook(self, bucket: int, number: int) -> Callable[[Tensor], None]:
        """What to call when backward has made a gradient that lies in a bucket; `number` is its own among those of all."""
        missing, is_there = self.missing, self._is_there

        def ready(parameter: Tensor) -> None:
            # For each parameter in every step: nothing is called here that need not be.
            if not self._counts and not self._begin():
                return
            if is_there[number]:
                self._living().refuse(parameter)
            is_there[number] = True
            missing[bucket] = left = missing[bucket] - 1
            if not left:
                self._living().go_on()

        return ready

    def _begin(self) -> bool:
        """Whether what this backward finds is averaged, and there is anyone to tell that it has begun."""
        if not self.averages:
            return False
        reducer = self._reducer()
        if reducer is not None:
            reducer.begin()
        return reducer is not None

    def _living(self) -> Reducer:
        reducer = self._reducer()
        assert reducer is not None, "the reducer is held by the backward that it is told of"
        return reducer


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_in(inner)
