"""Launches in groups: all run in their order, once, before anybody can look; what comes again goes out as one graph."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.vm import launch_groups, launch_past
from framework.vm.launch_groups import LaunchGroups

STREAM = 7


class FakeApi:
    """Streams that note what they were given; a graph is what was launched while its stream was recorded."""

    streamNonBlocking, streamCaptureModeRelaxed = 1, 2

    def __init__(self) -> None:
        self.ran: list[Any] = []
        self.recorded: dict[int, list[Any]] = {}
        self.graphs: dict[int, list[Any]] = {}
        self.executables: dict[int, list[Any]] = {}
        self.graph_launches = self.single_launches = 0
        self.streams: set[int] = set()
        self.before_launch: Callable[[], object] = lambda: None
        self._numbers = 100

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def launch(self, stream: int, key: Any) -> None:
        self.before_launch()
        if stream in self.recorded:
            self.recorded[stream].append(key)
        else:
            assert stream == STREAM
            self.single_launches += 1
            self.ran.append(key)

    def streamCreateWithFlags(self, flags: int) -> int:
        self.streams.add(stream := self._number())
        return stream

    def streamDestroy(self, stream: int) -> None:
        self.streams.remove(stream)

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.recorded

    def streamBeginCapture(self, stream: int, mode: int) -> None:
        if stream in self.recorded:
            raise RuntimeError("cudaErrorIllegalState")
        self.recorded[stream] = []

    def streamEndCapture(self, stream: int) -> int:
        if stream not in self.recorded:
            raise RuntimeError("cudaErrorIllegalState")
        self.graphs[graph := self._number()] = self.recorded.pop(stream)
        return graph

    def graphInstantiate(self, graph: int) -> int:
        self.executables[executable := self._number()] = self.graphs[graph]
        return executable

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    def graphExecDestroy(self, executable: int) -> None:
        del self.executables[executable]

    def graphLaunch(self, executable: int, stream: int) -> None:
        assert stream == STREAM
        self.graph_launches += 1
        self.ran += self.executables[executable]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(launch_groups, "perf_counter", clock)
    return clock


class Box:
    """A stream whose launches are grouped, and what was issued to it."""

    def __init__(self) -> None:
        self.api = FakeApi()
        self.groups = LaunchGroups(self.api, STREAM, self._choose)
        self.chosen = True
        self.issued: list[Any] = []
        self.run: Callable[[int, Any], None] = self.api.launch

    def issue(self, *keys: Any) -> None:
        for key in keys:
            self.issued.append(key)
            if not self.groups.takes(self.run, key):
                self.run(STREAM, key)

    def _choose(self) -> None:
        self.chosen = True

    def look(self) -> None:
        """As anybody who asks for the stream: all that was issued has run, in its order."""
        self.groups.flush()
        assert self.api.ran == self.issued


@pytest.fixture
def box(clock: Clock) -> Box:
    return Box()


def launches_of(box: Box, *keys: Any) -> tuple[int, int]:
    """How many graphs and how many single launches these launches come to."""
    before = box.api.graph_launches, box.api.single_launches
    box.issue(*keys)
    box.look()
    return box.api.graph_launches - before[0], box.api.single_launches - before[1]


def test_a_loop_that_is_looked_at_comes_to_a_graph_from_its_third_round_on(box: Box) -> None:
    step = range(20)
    assert [launches_of(box, *step) for _ in range(4)] == [(0, 20), (0, 20), (1, 0), (1, 0)]


def test_a_loop_that_nobody_looks_at_comes_to_few_graphs(box: Box) -> None:
    step = range(100)
    for _ in range(12):
        box.issue(*step)
    graphs, singles = launches_of(box, *step)
    assert (graphs <= 8, singles) == (True, 0)
    # The device need not wait long for its first one.
    assert max(map(len, box.api.executables.values())) <= 24
    box.groups.close()
    assert box.api.executables == {}


def test_groups_that_follow_each_other_become_one(box: Box) -> None:
    first, second = range(8), range(100, 108)
    for _ in range(4):
        for part in (first, second):
            box.issue(*part)
            box.look()
    for round_ in range(6):
        box.issue(("varies", round_), *first, *second)
    assert launches_of(box, *first, *second) == (1, 0)
    box.groups.close()
    assert box.api.executables == {}


def test_a_launch_that_differs_each_time_leaves_the_others_grouped(box: Box) -> None:
    for round_ in range(10):
        box.issue(*range(20), ("varies", round_), *range(50, 70))
    graphs, singles = launches_of(box, *range(20), ("varies", 10), *range(50, 70))
    assert (graphs, singles) == (2, 1)


def test_inputs_that_take_turns_are_all_grouped(box: Box) -> None:
    for round_ in range(18):
        box.issue(("input", round_ % 3), *range(40))
    for round_ in range(3):
        graphs, singles = launches_of(box, ("input", round_ % 3), *range(40))
        assert graphs >= 2
        assert singles <= 3


def test_what_waits_runs_when_another_launch_comes_than_foretold(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    box.issue(*range(9), "another")
    assert box.api.ran[-2:] == [8, "another"]
    box.look()


def test_a_group_is_not_launched_before_its_last_launch_came(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    ran = len(box.api.ran)
    box.issue(*range(19))
    assert len(box.api.ran) == ran
    box.issue(19)
    assert len(box.api.ran) == ran + 20


@pytest.mark.parametrize("waits", [True, False])
def test_the_device_is_chosen_before_anything_is_launched_or_recorded_for_who_looks(box: Box, waits: bool) -> None:
    for _ in range(1 if waits else 3):
        box.issue(*range(20))
        box.look()
    box.issue(*range(12))
    box.chosen = False
    was_chosen: list[bool] = []
    box.api.before_launch = lambda: was_chosen.append(box.chosen)
    box.look()
    assert was_chosen == [True] * 12


def test_launches_of_another_function_are_other_launches(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    box.issue(0, 1, 2)
    other: list[Any] = []
    assert not box.groups.takes(lambda stream, key: other.append(key), 3)
    box.look()


def test_no_group_goes_on_across_a_pause_of_the_host(box: Box, clock: Clock) -> None:
    for _ in range(6):
        box.issue(*range(10))
        clock.now_s += 0.01
        box.issue(*range(10, 20))
    box.issue(*range(10))
    # The host may be busy now.
    assert box.api.ran == box.issued


def test_nothing_of_a_group_is_left_out_of_a_graph_that_somebody_records(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    box.groups.flush()
    box.api.streamBeginCapture(STREAM, 0)
    made = len(box.api.executables)
    for _ in range(5):
        for key in range(20):
            assert not box.groups.takes(box.run, key)
            box.run(STREAM, key)
    graph = box.api.streamEndCapture(STREAM)
    assert box.api.graphs[graph] == list(range(20)) * 5
    assert len(box.api.executables) == made
    box.look()


def test_a_group_that_is_broken_off_again_and_again_is_given_up_for_a_shorter_one(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    for _ in range(8):
        box.issue(*range(12))
        box.look()
    assert launches_of(box, *range(12)) == (1, 0)


def test_a_group_that_begins_where_a_longer_one_is_found_gives_way_to_it(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(10))
        box.look()
    for _ in range(2):
        box.issue(*range(5), *"abcdefghij")
    # With the next one the fifteen are known to repeat, and become a group in place of the ten.
    box.issue(*range(10))
    box.look()
    assert launches_of(box, *range(5), *"abcdefghij") == (1, 0)


def test_where_nothing_comes_a_third_time_no_more_graphs_are_made(box: Box) -> None:
    for number in range(400):
        for _ in range(2):
            box.issue(*[(number, key) for key in range(5)])
            box.look()
    assert len(box.api.executables) == launch_groups._CREDIT
    # What does come again earns the right to more.
    for _ in range(3):
        box.issue(*[(0, key) for key in range(5)])
        box.look()
    made = len(box.api.executables)
    for _ in range(2):
        box.issue(*[("new", key) for key in range(5)])
        box.look()
    assert len(box.api.executables) == made + 1


def test_what_is_remembered_and_held_is_bounded(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_groups, "_MOST_GROUPS", 8)
    monkeypatch.setattr(launch_past, "_MOST_NOTED", 64)
    for number in range(200):
        for _ in range(3):
            box.issue(*[(number, key) for key in range(5)])
            box.look()
        assert len(box.api.executables) <= 8
        assert len(box.groups._past._noted) <= 64 + 6
        assert len(box.groups._past._last) <= 64 + 6


def test_what_is_remembered_is_bounded_where_nobody_looks(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_past, "_MOST_NOTED", 64)
    for number in range(500):
        box.issue(number)
        assert len(box.groups._past._noted) <= 64 + 2
    for _ in range(3):
        box.issue(*range(1000, 1020))
        box.look()
    assert box.api.graph_launches == 1


@pytest.mark.parametrize("refused", ["streamCreateWithFlags", "streamBeginCapture", "graphInstantiate", "graphLaunch"])
def test_what_the_driver_takes_for_no_graph_is_launched_one_by_one(box: Box, refused: str) -> None:
    def refuse(*_: Any) -> int:
        raise RuntimeError("cudaErrorMemoryAllocation: out of memory")

    driver_does = getattr(box.api, refused)
    setattr(box.api, refused, refuse)
    for _ in range(6):
        assert launches_of(box, *range(20)) == (0, 20)
    assert (box.api.graphs, box.api.executables, box.api.recorded) == ({}, {}, {})
    setattr(box.api, refused, driver_does)
    # No more is asked of it before there is reason to think that it would be used.
    assert box.groups._credit == 0
    assert launches_of(box, *range(20)) == (0, 20)


@pytest.mark.parametrize("asked", ["graphLaunch", "streamIsCapturing"])
def test_an_error_of_the_device_is_told_by_the_launches_themselves(box: Box, asked: str) -> None:
    has_failed = False

    def refuse(*_: Any) -> int:
        raise RuntimeError("cudaErrorIllegalAddress")

    def launch(stream: int, key: Any) -> None:
        if has_failed:
            raise ValueError("in the words of who launches")
        box.api.launch(stream, key)

    box.run = launch
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    has_failed = True
    setattr(box.api, asked, refuse)
    with pytest.raises(ValueError, match="in the words of who launches"):
        box.issue(*range(20))


def test_closing_runs_what_waits_and_gives_everything_back(box: Box) -> None:
    for _ in range(6):
        box.issue(*range(30))
    box.issue(*range(3))
    box.groups.close()
    assert box.api.ran == box.issued
    assert (box.api.executables, box.api.graphs, box.api.streams) == ({}, {}, set())


def test_an_error_of_a_launch_that_waited_is_raised_by_whoever_looks_and_those_behind_it_run(box: Box) -> None:
    refused: set[Any] = set()

    def launch(stream: int, key: Any) -> None:
        if key in refused:
            raise RuntimeError(f"{key} was refused")
        box.api.launch(stream, key)

    box.run = launch
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    box.issue(0, 1, 2)
    refused.add(1)
    with pytest.raises(RuntimeError, match="1 was refused"):
        box.groups.flush()
    refused.clear()
    ran = len(box.api.ran)
    box.issue(*range(20))
    box.groups.flush()
    assert box.api.ran[ran:] == [2, *range(20)]


def test_threads_that_launch_at_once_lose_nothing(box: Box) -> None:
    def work(name: int) -> None:
        for _ in range(200):
            for key in range(10):
                if not box.groups.takes(box.run, (name, key)):
                    box.run(STREAM, (name, key))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    box.groups.flush()
    for name in range(3):
        assert sorted(key for key in box.api.ran if key[0] == name) == sorted([(name, key) for key in range(10)] * 200)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_leaves_what_waits_to_its_parent(box: Box) -> None:
    for _ in range(4):
        box.issue(*range(20))
        box.look()
    box.issue(0, 1, 2)
    launch_groups.of_stream[STREAM] = box.groups
    try:
        child = os.fork()
        if not child:
            before = len(box.api.ran)
            launch_groups.flush_all()
            os._exit(len(box.api.ran) - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        del launch_groups.of_stream[STREAM]
    box.look()


@st.composite
def programs(draw: st.DrawFn) -> list[Any]:
    """Rounds of a loop over a few launches, with launches that vary, looks, pauses and other loops in between."""
    body = draw(st.lists(st.one_of(st.integers(0, 12), st.just("vary"), st.just("look")), min_size=1, max_size=40))
    other = draw(st.lists(st.integers(0, 12), max_size=12))
    program: list[Any] = []
    for round_ in range(draw(st.integers(2, 12))):
        program += [("vary", round_) if one == "vary" else one for one in body]
        program += draw(st.sampled_from([[], [], [], other, ["look"], ["pause"], body[: len(body) // 2]]))
    return program


@settings(max_examples=300, deadline=None)
@given(programs())
def test_all_run_once_and_in_their_order_whatever_comes(program: list[Any]) -> None:
    clock = Clock()
    launch_groups.perf_counter, before = clock, launch_groups.perf_counter
    try:
        box = Box()
        for one in program:
            if one == "look":
                box.look()
            elif one == "pause":
                clock.now_s += 1
            else:
                box.issue(one)
        box.look()
        box.groups.close()
        assert (box.api.executables, box.api.graphs, box.api.streams) == ({}, {}, set())
    finally:
        launch_groups.perf_counter = before


@pytest.mark.parametrize("most_groups", [1024, 4])
def test_sequences_that_are_broken_off_anywhere_run_once_and_in_their_order(
    box: Box, clock: Clock, monkeypatch: pytest.MonkeyPatch, most_groups: int
) -> None:
    monkeypatch.setattr(launch_groups, "_MOST_GROUPS", most_groups)
    for seed in range(300):
        chance = random.Random(seed)
        sequences = [
            [chance.randrange(60) for _ in range(chance.randrange(1, 30))] for _ in range(chance.randrange(1, 5))
        ]
        for _ in range(20):
            for sequence in sequences:
                end = len(sequence) if chance.random() < 0.8 else chance.randrange(len(sequence))
                box.issue(*sequence[:end])
                if chance.random() < 0.2:
                    box.look()
                if chance.random() < 0.05:
                    clock.now_s += 1
        box.look()
        box.groups.close()
        box.api.ran.clear()
        box.issued.clear()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = dict(launch_groups.of_stream)
    yield
    assert launch_groups.of_stream == before
