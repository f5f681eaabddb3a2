"""The shm backend: collectives among the ranks of one machine, through shared memory.

Every rank has slots that the others read, used in turn. A collective is a sequence of steps, the same for all ranks, and a step
is always this: wait until the others have done with the slot to be used, write it, raise one's counter, wait for theirs, read
their slots. Only raising and waiting are ever needed to keep ranks from each other's way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError, rank_list
from framework.distributed.peers import Peers
from framework.distributed.reduction import reduction
from framework.distributed.segment import Counters, Segment
from framework.distributed.shm_layout import (
    PIPE_BYTES,
    READ_WITHIN,
    SLOT_BYTES,
    TEXT_BYTES,
    Layout,
    chunks,
    places,
    read_text,
    write_text,
)
from framework.distributed.words import describe
from framework.vm.array import Array

if TYPE_CHECKING:
    from framework.distributed.groups import Group

# Up to here every rank reduces the whole by itself: one step in place of two.
SMALL_BYTES = 16 * 1024
_LOOK_S = 0.1


class ShmGroup:
    """The ranks of a group, over a segment that its first rank makes; all of them construct it at once.

    `name` tells a job's process groups apart.
    """

    backend = "shm"

    def __init__(self, group: Group, name: str) -> None:
        self.rank, self.size, self.name = group.rank, group.size, name
        self._timeout_s = group.world.timeout_s
        self._global_ranks = group.ranks
        self._failure: str | None = None
        self._sequence = 0
        self._step = 0
        self._what = ""
        self._layout = Layout(self.size)
        self._segment = _share(group, name, self._layout.nbytes)
        self._counters = Counters(self._segment, 0, self._layout.counters)
        self._peers = Peers(group.neighbours())
        self._others = [other for other in range(self.size) if other != self.rank]

    # ---- collectives

    def all_reduce(self, array: Array, op: str) -> None:
        self._enter(f"all_reduce({describe(array)}, {op})")
        values = array.host_view().reshape(-1)
        reduce = reduction(op, array.dtype)
        if values.nbytes <= SMALL_BYTES:
            self._all_reduce_small(values, reduce)
        else:
            self._all_reduce_chunks(list(chunks(values, SLOT_BYTES)), reduce)

    def broadcast(self, array: Array, src: int) -> None:
        self._enter(f"broadcast({describe(array)}, from {self._number(src)})")
        for chunk in chunks(array.host_view().reshape(-1), SLOT_BYTES):
            if self.rank == src:
                self._meet([], self._show(chunk))
            else:
                step = self._raise()
                self._meet([src], step)
                np.copyto(chunk, self._slot(src, step, chunk))

    def all_gather(self, out: Array, array: Array) -> None:
        self._enter(f"all_gather({describe(array)})")
        values = array.host_view().reshape(-1)
        gathered = out.host_view().reshape(self.size, -1)
        np.copyto(gathered[self.rank], values)
        for start, chunk in places(values, SLOT_BYTES):
            step = self._show(chunk)
            self._meet(self._others, step)
            for other in self._others:
                np.copyto(gathered[other, start : start + chunk.size], self._slot(other, step, chunk))

    def reduce_scatter(self, out: Array, array: Array, op: str) -> None:
        self._enter(f"reduce_scatter({describe(array)}, {op})")
        pieces = array.host_view().reshape(self.size, -1)
        result = out.host_view().reshape(-1)
        reduce = reduction(op, array.dtype)
        for start, chunk in places(result, SLOT_BYTES // self.size):
            mine = pieces[:, start : start + chunk.size]
            slot = self._free_slot(mine)
            np.copyto(slot.reshape(mine.shape), mine)
            step = self._raise()
            self._meet(self._others, step)
            shown = [
                mine if rank == self.rank else self._slot(rank, step, slot).reshape(mine.shape)
                for rank in range(self.size)
            ]
            reduce([terms[self.rank] for terms in shown], chunk)

    def barrier(self, array: Array) -> None:
        self._enter("barrier()")
        self._meet(self._others, self._raise())

    # ---- from one rank to another

    def send(self, array: Array, dst: int) -> None:
        self._check_alive()
        values = array.host_view().reshape(-1)
        pipe = self._layout.pipe(self.rank, dst)
        what = f"send({describe(array)}) to {self._number(dst)}"
        written = self._counters[pipe.written]
        for chunk in chunks(values, PIPE_BYTES - TEXT_BYTES):
            # Two pieces may be under way.
            self._until(pipe.read, written - 1, dst, lambda: f"{what}: it did not receive")
            room = self._segment.bytes[pipe.slot(written) :]
            write_text(room, describe(array))
            np.copyto(room[TEXT_BYTES : TEXT_BYTES + chunk.nbytes].view(chunk.dtype), chunk)
            written += 1
            self._counters.set(pipe.written, written)

    def recv(self, array: Array, src: int) -> None:
        self._check_alive()
        values = array.host_view().reshape(-1)
        pipe = self._layout.pipe(src, self.rank)
        what = f"recv({describe(array)}) from {self._number(src)}"
        read = self._counters[pipe.read]
        for chunk in chunks(values, PIPE_BYTES - TEXT_BYTES):
            self._until(pipe.written, read + 1, src, lambda: f"{what}: it did not send")
            room = self._segment.bytes[pipe.slot(read) :]
            sent = read_text(room)
            if sent != describe(array):
                self._fail(f"{what}: it sends {sent}")
            np.copyto(chunk, room[TEXT_BYTES : TEXT_BYTES + chunk.nbytes].view(chunk.dtype))
            read += 1
            self._counters.set(pipe.read, read)

    def check(self) -> None:
        self._check_alive()

    def close(self) -> None:
        self._segment.hide()
        self._peers.close()
        self._failure = self._failure or f"group {self.name} was destroyed"

    # ---- the steps that collectives are made of

    def _all_reduce_small(self, values: np.ndarray, reduce: Callable[..., None]) -> None:
        step = self._show(values)
        self._meet(self._others, step)
        reduce([values if rank == self.rank else self._slot(rank, step, values) for rank in range(self.size)], values)

    def _all_reduce_chunks(self, chunks: list[np.ndarray], reduce: Callable[..., None]) -> None:
        """Each chunk goes through three stages, one behind the other, so that a rank seldom waits for what it reads next."""
        scattered = [self._scatter(chunks[0])]
        reduced: list[int] = []
        for number, chunk in enumerate(chunks):
            if number + 1 < len(chunks):
                scattered.append(self._scatter(chunks[number + 1]))
            reduced.append(self._reduce_part(chunk, scattered[number], reduce))
            if number:
                self._collect(chunks[number - 1], reduced[number - 1])
        self._collect(chunks[-1], reduced[-1])

    def _scatter(self, chunk: np.ndarray) -> int:
        """Shows the others the parts of a chunk that they reduce; returns the step."""
        slot = self._free_slot(chunk)
        for other in self._others:
            part = self._part(chunk, other)
            np.copyto(slot[part], chunk[part])
        return self._raise()

    def _reduce_part(self, chunk: np.ndarray, step: int, reduce: Callable[..., None]) -> int:
        """Reduces this rank's part of a chunk that was scattered at `step`, and shows the result; returns the new step."""
        self._meet(self._others, step)
        mine = self._part(chunk, self.rank)
        terms = [(chunk if rank == self.rank else self._slot(rank, step, chunk))[mine] for rank in range(self.size)]
        result = self._free_slot(chunk[mine])
        reduce(terms, result)
        shown = self._raise()
        np.copyto(chunk[mine], result)
        return shown

    def _collect(self, chunk: np.ndarray, step: int) -> None:
        """Takes the parts that the others reduced at `step`."""
        for other in self._others:
            self._meet([other], step)
            part = chunk[self._part(chunk, other)]
            np.copyto(part, self._slot(other, step, part))

    def _part(self, chunk: np.ndarray, rank: int) -> slice:
        """What rank `rank` reduces of a chunk."""
        return slice(chunk.size * rank // self.size, chunk.size * (rank + 1) // self.size)

    def _enter(self, what: str) -> None:
        """Begins a collective: says which it is, so that the others can compare."""
        self._check_alive()
        self._sequence += 1
        self._what = what
        self._matched = self.size == 1
        write_text(self._segment.bytes[self._layout.text(self.rank, self._sequence) :], f"{self._sequence} {what}")
        # Nobody sleeps until this one is raised: it is looked at to name who came.
        self._counters.set(self._layout.entered(self.rank), self._sequence, wake=False)

    def _raise(self) -> int:
        """This rank's slot of the next step is ready to be read, which begins that step; returns its number."""
        self._step += 1
        self._counters.set(self._layout.step(self.rank), self._step)
        return self._step

    def _meet(self, ranks: list[int], step: int) -> None:
        """Waits until the slots of `ranks` for `step` are ready; the first time in a collective, compares what all came to."""
        for other in ranks if self._matched else self._others:
            self._until(self._layout.step(other), step, other, self._missing)
        if not self._matched:
            self._compare()

    def _free_slot(self, like: np.ndarray) -> np.ndarray:
        """This rank's slot for the step to come, once nobody reads what was there."""
        step = self._step + 1
        for other in self._others:
            self._until(self._layout.step(other), step - READ_WITHIN, other, self._missing)
        return self._slot(self.rank, step, like)

    def _slot(self, rank: int, step: int, like: np.ndarray) -> np.ndarray:
        """What a rank shows, or will show, at `step`: an array like another."""
        start = self._layout.slot(rank, step)
        return self._segment.bytes[start : start + like.nbytes].view(like.dtype)

    def _show(self, values: np.ndarray) -> int:
        """Shows values to the others; returns the step."""
        np.copyto(self._free_slot(values), values)
        return self._raise()

    def _compare(self) -> None:
        self._matched = True
        mine = f"{self._sequence} {self._what}"
        said = {
            rank: read_text(self._segment.bytes[self._layout.text(rank, self._sequence) :]) for rank in range(self.size)
        }
        if any(text != mine for text in said.values()):
            calls = "; ".join(
                f"{self._number(rank)} calls {text.partition(' ')[2]}, its number {text.partition(' ')[0]}"
                for rank, text in said.items()
            )
            self._fail(f"the ranks of group {self.name} do not call the same collective: {calls}")

    # ---- waiting, and what can go wrong meanwhile

    def _until(self, counter: int, value: int, other: int, missing: Callable[[], str]) -> None:
        counters = self._counters
        if counters[counter] >= value:
            return
        deadline = time.monotonic() + self._timeout_s
        while not counters.reaches(counter, value, _LOOK_S):
            if self._peers.is_gone(other) and counters[counter] < value:
                self._fail(f"{missing()}: {self._number(other)} has ended")
            for rank in self._others:
                if counters[self._layout.gave_up(rank)] and counters[counter] < value:
                    self._fail(f"{missing()}: {self._number(rank)} gave up")
            if time.monotonic() > deadline:
                self._fail(f"{missing()} within {self._timeout_s:g} s", CollectiveTimeoutError)

    def _missing(self) -> str:
        """Who came to the present collective, and who did not."""
        here = [rank for rank in range(self.size) if self._counters[self._layout.entered(rank)] >= self._sequence]
        absent = [rank for rank in range(self.size) if rank not in here]
        stopped = [rank for rank in here if self._counters[self._layout.step(rank)] < self._step]
        call = f"{self._what}, number {self._sequence} of group {self.name}"
        if absent:
            came = rank_list([self._global_ranks[rank] for rank in here])
            return f"{call}: {came} came, {rank_list([self._global_ranks[rank] for rank in absent])} did not"
        return f"{call}: all came, {rank_list([self._global_ranks[rank] for rank in stopped])} did not go on"

    def _fail(self, what: str, kind: type[CollectiveError] = CollectiveError) -> None:
        self._failure = what
        self._counters.set(self._layout.gave_up(self.rank), 1)
        raise kind(what)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise CollectiveError(f"group {self.name} cannot be used any more: {self._failure}")

    def _number(self, rank: int) -> str:
        return f"rank {self._global_ranks[rank]}"


def _share(group: Group, name: str, nbytes: int) -> Segment:
    """The segment, made by rank 0 and opened by the others; nobody else can open it afterwards."""
    store, timeout_s = group.world.store, group.world.timeout_s
    if group.rank == 0:
        segment = Segment.create(nbytes)
        store.set(f"{name}/segment", segment.place.encode())
        attached = store.wait_for_count(f"{name}/attached", group.size - 1, timeout_s)
        segment.hide()
        if not attached:
            raise DistributedError(f"not all ranks of group {name} opened its memory within {timeout_s:g} s")
        return segment
    place = store.get(f"{name}/segment", timeout_s)
    if place is None:
        raise DistributedError(
            f"rank {group.ranks[0]} did not share its memory with group {name} within {timeout_s:g} s"
        )
    segment = Segment.attach(place.decode(), nbytes)
    segment.hide()
    store.add(f"{name}/attached", 1)
    return segment
