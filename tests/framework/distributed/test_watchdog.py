"""The watchdog of collectives on a device, with doubles in place of NCCL and CUDA: what it finds, and what it then does."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from framework.distributed import watchdog as module
from framework.distributed.board import Board
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError
from framework.distributed.watchdog import Flight, Watchdog


class Values:
    """A store within this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float = 0.0) -> bytes | None:
        return self.values.get(key)


class Link:
    """A communicator that notes that it was aborted."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.aborted = threading.Event()

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.aborted.set()


class Point:
    """An event that passes when it is told to."""

    def __init__(self, *, passed: bool = False) -> None:
        self.passed = passed

    def has_passed(self) -> bool:
        return self.passed


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A watchdog of rank 0 of three, in a hurry; the third is a process that ends by Enter."""
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for name, value in {"_LOOK_S": 0.005, "_COMPARE_S": 0.02, "_SETTLE_S": 0.3, "_GONE_S": 0.05}.items():
        monkeypatch.setattr(module, name, value)
    store, link = Values(), Link()
    world = SimpleNamespace(timeout_s=0.3, store=store)
    group = SimpleNamespace(world=world, rank=0, ranks=(0, 4, 7), neighbours=lambda: {2: other.pid})
    prepared: list[int] = []
    watchdog = Watchdog(group, "g", link, lambda: prepared.append(1))  # type: ignore[arg-type]
    yield SimpleNamespace(store=store, link=link, watchdog=watchdog, prepared=prepared, other=other)
    watchdog.stop()
    other.communicate(b"\n")


def post(bench: Any, rank: int, *calls: tuple[int, str]) -> None:
    """What another rank has called."""
    board = Board(bench.store, "g", rank, (0, 4, 7))
    for sequence, what in calls:
        board.note(sequence, what)
    board.post()


def failure(bench: Any) -> CollectiveError:
    assert bench.link.aborted.wait(20)
    assert bench.prepared == [1]
    return bench.watchdog.failure


def test_collectives_that_end_are_let_go(bench: Any) -> None:
    for number in range(5):
        bench.watchdog.watch(Flight(number, "barrier()", Point(passed=True)))
    slow = Point()
    bench.watchdog.watch(Flight(5, "barrier()", slow))
    slow.passed = True
    assert not bench.link.aborted.wait(0.5)
    assert bench.watchdog.failure is None


@pytest.mark.parametrize("passed", range(0, 71, 7))
def test_of_many_collectives_few_events_are_asked(bench: Any, passed: int) -> None:
    asked = []

    class Counted(Point):
        def has_passed(self) -> bool:
            asked.append(self)
            return self.passed

    bench.watchdog.stop()
    for number in range(70):
        bench.watchdog.watch(Flight(number, "barrier()", Counted(passed=number < passed)))
    bench.watchdog._look_once()
    assert [flight.sequence for flight in bench.watchdog._under_way] == list(range(passed, 70))
    assert len(asked) <= (1 if passed == 70 else 8)


def test_who_does_not_come_is_named(bench: Any) -> None:
    post(bench, 1, (1, "barrier()"), (2, "all_reduce(float32[2], sum)"))
    post(bench, 2, (1, "barrier()"))
    bench.watchdog.watch(Flight(1, "barrier()", Point(passed=True)))
    bench.watchdog.watch(Flight(2, "all_reduce(float32[2], sum)", Point()))
    found = failure(bench)
    assert isinstance(found, CollectiveTimeoutError)
    words = "all_reduce(float32[2], sum), number 2 of group g: ranks 0, 4 came, rank 7 did not within 0.3 s"
    assert str(found) == words


@pytest.mark.parametrize("passed", [False, True])
def test_different_calls_are_told_whether_they_end_or_not(bench: Any, passed: bool) -> None:
    bench.watchdog.watch(Flight(1, "all_reduce(float32[2], sum)", Point(passed=passed)))
    post(bench, 1, (1, "all_reduce(float32[9], sum)"), (2, "barrier()"))
    words = str(failure(bench))
    assert "rank 0 calls all_reduce(float32[2], sum); rank 4 calls all_reduce(float32[9], sum)" in words
    assert "number 1:" in words


def test_a_difference_long_ago_shows(bench: Any) -> None:
    post(bench, 1, (1, "broadcast(float32[2], from rank 4)"), *[(number, "barrier()") for number in range(2, 100)])
    for number in range(1, 100):
        what = "broadcast(float32[2], from rank 0)" if number == 1 else "barrier()"
        bench.watchdog.watch(Flight(number, what, Point(passed=True)))
    assert "some time before number 68" in str(failure(bench))


def test_what_nccl_finds_is_passed_on(bench: Any) -> None:
    bench.link.error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    bench.watchdog.watch(Flight(1, "barrier()", Point()))
    assert str(failure(bench)) == "barrier() of group g: NCCL_ERROR_REMOTE_ERROR"


def test_between_two_ranks_there_is_nothing_to_compare(bench: Any) -> None:
    post(bench, 1, (3, "barrier()"))
    bench.watchdog.watch(Flight(None, "recv(float32[2]) from rank 4", Point()))
    assert str(failure(bench)) == "recv(float32[2]) from rank 4 of group g: it did not come within 0.3 s"
    assert "g/board/0" not in bench.store.values


def test_a_rank_that_ended_is_named(bench: Any) -> None:
    bench.other.kill()
    bench.watchdog.watch(Flight(1, "barrier()", Point()))
    assert str(failure(bench)) == "barrier() of group g: rank 7 ended"
