"""Launches in groups where a signal handler or a finalizer comes in the middle: each still runs once and in its order.

Python calls signal handlers, and from 3.12 on finalizers of cycles, where a function begins, where one of C ends, and where a
loop goes back. Each of these places in `launch_groups` is tried.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from framework.vm import launch_groups, launch_past
from tests.framework.vm import test_launch_groups as doubles
from tests.framework.vm.test_launch_groups import Box, Clock, clock, nothing_left

__all__ = ["clock", "nothing_left"]

# Groups are made, go as graphs and one by one, are broken off and given up, are joined, give way to longer ones, and are
# forgotten when they become too many.
LONG, SHORT, OTHER = list(range(6)), [20, 21], [30, 31, 32, 33]
PROGRAM: list[Any] = [
    *3 * [*LONG, "look"],
    *3 * [*SHORT, "look", 50, "look"],
    *2 * [*SHORT, *OTHER],
    "look",
    *3 * [*LONG[:4], "look"],
    *2 * [*LONG[:4], *"abcde", "look"],
    *4 * [*OTHER, *LONG[:4]],
    "look",
]


FILES = (launch_groups.__file__, launch_past.__file__)
# Where loops go back, by the code of the function.
LOOPS = {
    function.__code__: places
    for function in vars(launch_groups.LaunchGroups).values()
    if hasattr(function, "__code__")
    and (places := {one.offset for one in dis.get_instructions(function) if "JUMP_BACKWARD" in one.opname})
}


class _DoneError(Exception):
    """There is no such place any more."""


class _InterruptError(BaseException):
    """As KeyboardInterrupt."""


def in_the_middle(place: int, act: Callable[[], None], work: Callable[[], None]) -> None:
    """Calls `work`, and `act` at the place of that number. Raises _DoneError where there is none."""
    passed, is_due = 0, True
    tracer, profiler = sys.gettrace(), sys.getprofile()

    def pass_by() -> None:
        nonlocal passed, is_due
        if is_due:
            passed += 1
            if passed > place:
                is_due = False
                stop()
                act()

    def stop() -> None:
        sys.settrace(tracer)
        sys.setprofile(profiler)

    def note(frame: FrameType, event: str, _: Any) -> None:
        # What the fake device does is C's on a real one.
        caller = frame.f_back if event == "return" else None
        is_of_c = caller is not None and frame.f_globals is vars(doubles) and caller.f_code.co_filename in FILES
        if is_of_c or (event in ("call", "c_return") and frame.f_code.co_filename in FILES):
            pass_by()

    def follow(frame: FrameType, event: str, _: Any) -> Any:
        places = LOOPS.get(frame.f_code)
        if places is None:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in places:
            pass_by()
        return follow

    sys.setprofile(note)
    sys.settrace(follow)
    try:
        work()
    finally:
        stop()
    if is_due:
        raise _DoneError


def every_place(try_at: Callable[[int], None]) -> int:
    """How many places there are; `try_at` is called for each."""
    place = 0
    while True:
        try:
            try_at(place)
        except _DoneError:
            return place
        place += 1


@pytest.fixture(autouse=True)
def few_groups(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_groups, "_MOST_GROUPS", 3)


def test_nothing_is_lost_or_launched_twice_where_a_handler_raises() -> None:
    def try_at(place: int) -> None:
        box, interrupted = Box(), []

        def work() -> None:
            for one in PROGRAM:
                try:
                    box.groups.flush() if one == "look" else box.issue(one)
                except _InterruptError:
                    interrupted.append(len(box.issued) - 1 if one != "look" else None)

        def interrupt() -> None:
            raise _InterruptError

        in_the_middle(place, interrupt, work)
        # Another thread would wait for ever.
        assert not box.groups._lock._is_owned()  # type: ignore[attr-defined]
        assert not box.api.recorded
        box.groups.flush()
        (statement,) = interrupted
        # The statement itself may have come to nothing.
        without = [key for number, key in enumerate(box.issued) if number != statement]
        assert box.api.ran in (box.issued, without)
        box.groups.close()

    assert every_place(try_at) > 1000


def test_a_handler_that_launches_and_looks_comes_behind_all_that_was_issued() -> None:
    def try_at(place: int) -> None:
        box = Box()
        before: list[Any] = []

        def handle() -> None:
            before[:] = box.api.ran
            box.issue("handler's")
            box.groups.flush()
            assert box.api.ran[-1] == "handler's"
            issued = box.issued[:-1]
            # The launch that is just being issued may come behind it.
            assert box.api.ran[:-1] in (issued, issued[:-1])

        def work() -> None:
            for one in PROGRAM:
                box.groups.flush() if one == "look" else box.issue(one)
            box.groups.flush()

        in_the_middle(place, handle, work)
        assert sorted(map(str, box.api.ran)) == sorted(map(str, box.issued))
        assert [key for key in box.api.ran if key != "handler's"] == [key for key in box.issued if key != "handler's"]
        box.groups.close()
        assert (box.api.executables, box.api.graphs, box.api.streams) == ({}, {}, set())

    assert every_place(try_at) > 1000


def test_graphs_are_given_back_once_where_a_handler_ends_the_stream() -> None:
    def try_at(place: int) -> None:
        box = Box()

        def work() -> None:
            for one in PROGRAM:
                box.groups.flush() if one == "look" else box.issue(one)

        in_the_middle(place, box.groups.close, work)
        assert box.api.ran == box.issued
        assert (box.api.executables, box.api.graphs, box.api.streams) == ({}, {}, set())

    assert every_place(try_at) > 1000
