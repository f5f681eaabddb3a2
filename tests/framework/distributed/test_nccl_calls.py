"""What the nccl backend asks of NCCL, and what it tells its watchdog, by a communicator that is none. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import framework as flow
from framework.distributed import nccl
from framework.distributed.errors import CollectiveError
from framework.distributed.watchdog import Flight
from framework.vm import Array, cuda

STREAM = 77
# Any numbers, each of its own.
DOUBLE, BYTE, MEAN, MOST, TOTAL = 21, 22, 23, 24, 25


class FakeCommunicator:
    """Notes every call: its name and its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> None:
            if self.refuses:
                raise RuntimeError("no")
            self.calls.append((name, *arguments))

        return call


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 1 of ranks 4 and 6 of the world."""
    constants = {"NCCL_FLOAT64": DOUBLE, "NCCL_UINT8": BYTE, "NCCL_AVG": MEAN, "NCCL_MAX": MOST, "NCCL_SUM": TOTAL}
    monkeypatch.setattr(nccl, "_nccl", lambda: SimpleNamespace(**constants))
    for cached in (nccl._type, nccl._operation, nccl._all_reduce):
        cached.cache_clear()
    monkeypatch.setattr(cuda, "stream_pointer", lambda device: STREAM)
    monkeypatch.setattr(cuda, "is_capturing", lambda device: False)
    made: Any = object.__new__(nccl.NcclGroup)
    made.rank, made.size, made.name, made._global_ranks = 1, 2, "all", (4, 6)
    made._device, made._sequence, made._told, made._communicator = None, 0, False, FakeCommunicator()
    made.flights = []
    made._watchdog = SimpleNamespace(failure=None, watch=made.flights.append)
    monkeypatch.setattr(nccl.NcclGroup, "_event", lambda self, stream: f"event on {stream}")
    yield made
    for cached in (nccl._type, nccl._operation, nccl._all_reduce):
        cached.cache_clear()


def _array(*shape: int) -> Array:
    return flow.zeros(*shape, dtype=flow.float64).array


def test_every_collective_is_enqueued_on_the_current_stream(group: Any) -> None:
    a, b = _array(2, 3), _array(2, 2, 3)
    group.all_reduce(a, "avg")
    group.broadcast(a, 0)
    group.all_gather(b, a)
    group.reduce_scatter(a, b, "max")
    group.barrier(flow.zeros(1, dtype=flow.uint8).array)
    group.send(a, 0)
    group.recv(a, 0)
    *calls, barrier, send, recv = group._communicator.calls
    assert calls == [
        ("allReduce", a.ptr, a.ptr, 6, DOUBLE, MEAN, STREAM),
        ("broadcast", a.ptr, a.ptr, 6, DOUBLE, 0, STREAM),
        ("allGather", a.ptr, b.ptr, 6, DOUBLE, STREAM),
        ("reduceScatter", b.ptr, a.ptr, 6, DOUBLE, MOST, STREAM),
    ]
    group.size = 1  # whose mean is its sum
    group.all_reduce(a, "avg")
    assert group._communicator.calls[-1] == ("allReduce", a.ptr, a.ptr, 6, DOUBLE, TOTAL, STREAM)
    assert barrier[0] == "allReduce"
    assert barrier[3:] == (1, BYTE, MOST, STREAM)
    assert send == ("send", a.ptr, 6, DOUBLE, 0, STREAM)
    assert recv == ("recv", a.ptr, 6, DOUBLE, 0, STREAM)


def test_what_is_prepared_is_enqueued_like_what_is_called_anew(group: Any) -> None:
    a = _array(2, 3)
    calls = group.prepared("all_reduce", a, op="max"), group.prepared("broadcast", a, src=1)
    assert not group._communicator.calls
    for _ in range(2):
        for call in calls:
            call()
    assert group._communicator.calls == 2 * [
        ("allReduce", a.ptr, a.ptr, 6, DOUBLE, MOST, STREAM),
        ("broadcast", a.ptr, a.ptr, 6, DOUBLE, 1, STREAM),
    ]
    assert [(flight.sequence, flight.what) for flight in group.flights] == [
        (1, "all_reduce(float64[2, 3], max)"),
        (2, "broadcast(float64[2, 3], from rank 6)"),
        (3, "all_reduce(float64[2, 3], max)"),
        (4, "broadcast(float64[2, 3], from rank 6)"),
    ]
    group._watchdog.failure = CollectiveError("rank 4 ended")
    with pytest.raises(CollectiveError, match="group all cannot be used any more: rank 4 ended"):
        calls[0]()


def test_the_watchdog_gets_the_words_the_number_and_an_event(group: Any) -> None:
    a = _array(2, 3)
    group.all_reduce(a, "avg")
    group.send(a, 0)
    group.broadcast(a, 1)
    told: list[Flight] = group.flights
    # What only two ranks do has no number.
    assert [(flight.sequence, flight.what) for flight in told] == [
        (1, "all_reduce(float64[2, 3], avg)"),
        (None, "send(float64[2, 3]) to rank 4"),
        (2, "broadcast(float64[2, 3], from rank 6)"),
    ]
    assert {flight.event for flight in told} == {f"event on {STREAM}"}


def test_nothing_is_told_of_what_is_recorded_into_a_graph(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "is_capturing", lambda device: True)
    group.all_reduce(_array(2), "avg")
    assert len(group._communicator.calls) == 1
    assert not group.flights


def test_what_nccl_refuses_is_named(group: Any) -> None:
    group._communicator.refuses = True
    with pytest.raises(CollectiveError, match=r"all_reduce\(float64\[2\], avg\) of group all was refused by NCCL: no"):
        group.all_reduce(_array(2), "avg")
    assert not group.flights


def test_a_group_that_failed_is_asked_for_nothing_more(group: Any) -> None:
    group._watchdog.failure = CollectiveError("rank 4 ended")
    with pytest.raises(CollectiveError, match="group all cannot be used any more: rank 4 ended"):
        group.all_reduce(_array(2), "avg")
    assert not group._communicator.calls
