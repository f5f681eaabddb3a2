"""Launches of a loop in groups: a sequence that comes again is launched as one CUDA graph, for the price of one launch.

A training step is some hundred launches, each of which costs the host microseconds in the driver alone, and a loop repeats them
with the same arguments, since blocks of memory keep their addresses. So launches are noted as they come. A sequence that came
before is recorded as a graph. When its first launch comes again it waits, as do those behind it for as long as they are those
foretold; with the last one the graph is launched. Where another comes, or anybody asks for the stream, what waits is launched
one by one. So all runs in the order in which it was issued, and nobody who looks sees that something waited.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from framework.vm.capture import captured
from framework.vm.launch_past import Launch, LaunchPast, Run

# How many launches a group has at most: the device starts with the first one when the last one has come. Those of fewer than
# the least are launched one by one, and may become part of longer ones.
_LEAST, _MOST = 4, 24
# How often two groups have to follow each other before they become one.
_TIMES_IN_A_ROW = 2
# A host that was busy with something else for so long may be so again at this place: what was issued before must not wait.
_PAUSE_S = 0.0005
# Where a group was broken off more often than this, and than in one of so many rounds, it is given up.
_MOST_BREAKS, _ROUNDS_PER_BREAK = 2, 16
# So many more graphs may be made than are launched: where nothing comes a third time, they are time lost.
_CREDIT = 256
# Graphs that are held at most.
_MOST_GROUPS = 1024


class _Group:
    """A sequence of launches and its graph, 0 for a short one; and which group came behind it, how often in a row."""

    __slots__ = ("breaks", "executable", "follower", "in_a_row", "last", "launches", "rounds")

    def __init__(self, launches: tuple[Launch, ...], executable: int) -> None:
        self.launches = launches
        self.last = len(launches) - 1
        self.executable = executable
        self.rounds = self.breaks = self.in_a_row = 0
        self.follower: _Group | None = None


class LaunchGroups:
    """What was launched on one stream, and the groups found in it. `api` has the calls of CuPy's runtime.

    Any thread may launch; they come in some order, one after the other. `choose` lets a thread's calls go to the stream's
    device, as they do where `takes` is called.
    """

    def __init__(self, api: Any, stream: int, choose: Callable[[], None]) -> None:
        self._api, self._stream, self._choose = api, stream, choose
        # A finalizer or a signal handler may launch, look or raise while this thread is in the middle of something here. It
        # comes in too, sees `_is_busy`, launches what waits, and touches nothing else.
        self._lock = threading.RLock()
        self._is_busy = self._is_closed = False
        # The group whose launches are coming, and how many of them have come.
        self._group: _Group | None = None
        self._at = 0
        # Launches that go one by one, how many of them came, and how many went.
        self._due: tuple[Launch, ...] = ()
        self._came = self._went = 0
        # The group that ended with the latest launch.
        self._before: _Group | None = None
        self._past = LaunchPast()
        self._noted_s = 0.0
        self._groups: dict[Launch, _Group] = {}
        self._credit = _CREDIT
        self._recording_stream: int | None = None

    def takes(self, run: Run, key: Hashable) -> bool:
        """Whether a launch that is due is left to this: it waits, or went with its group. If not, the caller launches it."""
        # Most launches end here, so without the lock: nothing is called, and so no other thread and no handler has a turn.
        group, at = self._group, self._at
        if group is not None and at < group.last:
            expected = group.launches[at]
            if expected.run is run and expected.key == key:
                self._at = at + 1
                return True
        # A `with`, since a handler that raises may come between a call of `acquire` and a `try`.
        with self._lock:
            return self._ends_or_begins(Launch(run, key))

    def flush(self) -> None:
        """Launches what waits: whatever is put on the stream from now on comes behind it."""
        with self._lock:
            self._choose()
            if self._is_busy or self._is_closed:
                self._launch_what_waits()
                return
            self._is_busy = True
            try:
                self._break_off()
                self._before = None
                self._end_repetition()
            finally:
                self._is_busy = False
                if self._is_closed:
                    self._give_back()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Launches what waits. Other threads that launch on the stream, or ask for it, are held until the end."""
        with self._lock:
            self.flush()
            yield

    def close(self) -> None:
        """Launches what waits, and gives the graphs back. What is launched from now on does not wait."""
        with self._lock:
            self._is_closed = True
            try:
                self.flush()
            finally:
                self._give_back()

    def _ends_or_begins(self, launch: Launch) -> bool:
        """As `takes`, for a launch with which a group may end or begin."""
        if self._is_busy or self._is_closed:
            self._launch_what_waits()
            return False
        self._is_busy = True
        try:
            group = self._group
            if group is not None and self._at == group.last and group.launches[-1] == launch:
                return self._complete(group)
            self._break_off()
            return self._begins(launch)
        finally:
            self._is_busy = False
            if self._is_closed:
                self._give_back()

    def _complete(self, group: _Group) -> bool:
        """Launches a group whose last launch has come; False where all before that went meanwhile."""
        launch_graph, executable, count = self._api.graphLaunch, group.executable, len(group.launches)
        # From here on no signal comes before the driver has the graph, and what went before does not go with it again.
        if self._group is not group:
            return False
        self._group = None
        if executable:
            try:
                launch_graph(executable, self._stream)
            except RuntimeError:
                # One by one, where the driver refuses the graph, as it does when memory runs out: or each tells what is wrong.
                self._due, self._came, self._went = group.launches, count, 0
                self._launch_what_waits()
                self._give_up(group)
                self._credit = 0
            else:
                self._credit = min(self._credit + 1, _CREDIT)
        else:
            self._due, self._came, self._went = group.launches, count, 0
            self._launch_what_waits()
        group.rounds += 1
        self._noted_s = perf_counter()
        before, self._before = self._before, group
        if before is not None and before.last + group.last + 2 <= _MOST:
            self._follows(before, group)
        return True

    def _follows(self, before: _Group, group: _Group) -> None:
        """Notes that a group came directly behind another, and makes them one where it does so again and again."""
        before.in_a_row = before.in_a_row + 1 if before.follower is group else 1
        before.follower = group
        if before.in_a_row > _TIMES_IN_A_ROW and self._groups.get(before.launches[0]) is before:
            self._make_group(before.launches + group.launches)
            self._before = None

    def _begins(self, launch: Launch) -> bool:
        """Whether a group begins with this launch; if not, it is noted."""
        now_s = perf_counter()
        if now_s - self._noted_s > _PAUSE_S:
            self._before = None
            self._end_repetition()
        self._noted_s = now_s
        if launch in self._groups and not self._is_captured():
            # What has been repeated may be a longer group that takes the place of this one, or that of all.
            self._end_repetition()
            group = self._groups.get(launch)
            if group is not None:
                if group.last == 0:
                    self._at, self._group = 0, group
                    return self._complete(group)
                self._at, self._group = 1, group
                return True
        self._before = None
        self._note(launch)
        return False

    def _note(self, launch: Launch) -> None:
        past = self._past
        if past.is_full:
            self._end_repetition()
        if past.repeated == _MOST or (past.repeated and not past.goes_on_with(launch)):
            self._make_group(past.take())
        past.note(launch)

    def _end_repetition(self) -> None:
        if self._past.repeated:
            self._make_group(self._past.take())
        self._past.interrupt()

    def _break_off(self) -> None:
        """Launches what waits: of a group, which goes on otherwise this time, or of what was interrupted."""
        group = self._group
        came = () if group is None else group.launches[: self._at]
        self._launch_what_waits()
        if group is None:
            return
        self._before = None
        group.breaks += 1
        if group.breaks > _MOST_BREAKS + group.rounds // _ROUNDS_PER_BREAK:
            self._give_up(group)
        # They may be a group of their own.
        self._past.interrupt()
        for launch in came:
            self._note(launch)

    def _launch_what_waits(self) -> None:
        """Launches one by one what came and did not go. May be called in the middle of itself, and again where it raised."""
        group = self._group
        if group is not None:
            # Nothing is called between these, and no handler comes.
            self._due, self._came = group.launches, self._at
            self._went, self._group = 0, None
        while True:
            # Nor here: one comes where a loop goes back.
            if self._went == self._came:
                return
            run, key = self._due[self._went]
            self._went += 1
            run(self._stream, key)

    def _make_group(self, launches: tuple[Launch, ...]) -> None:
        """Makes a group of these launches in place of one that begins as they do and is shorter, if it can be made now."""
        known = self._groups.get(launches[0])
        if (known is not None and known.last + 1 >= len(launches)) or self._is_closed or self._is_captured():
            return
        executable = 0
        if len(launches) >= _LEAST:
            if not self._credit:
                return
            self._credit -= 1
            try:
                executable = self._recorded(launches)
            except RuntimeError:
                # There may be no memory for it. Where more is wrong, launching tells.
                self._credit = 0
                return
        if known is None and len(self._groups) == _MOST_GROUPS:
            self._forget()
        self._groups[launches[0]] = _Group(launches, executable)
        if known is not None:
            self._drop(known)

    def _give_up(self, group: _Group) -> None:
        if self._groups.pop(group.launches[0], None) is not None:
            self._drop(group)

    def _drop(self, group: _Group) -> None:
        if group.executable:
            self._api.graphExecDestroy(group.executable)

    def _forget(self) -> None:
        # What is given back is not found any more, also where this ends in the middle.
        groups, self._groups = self._groups, {}
        for group in groups.values():
            self._drop(group)

    def _give_back(self) -> None:
        """Ends what the driver keeps for this, once nothing is in the middle of using it."""
        if not self._is_busy:
            self._forget()
            stream, self._recording_stream = self._recording_stream, None
            if stream is not None:
                self._api.streamDestroy(stream)

    def _is_captured(self) -> bool:
        """Whether somebody records what is put on the stream, or nobody can tell: then launching tells why."""
        try:
            return bool(self._api.streamIsCapturing(self._stream))
        except RuntimeError:
            return True

    def _recorded(self, launches: tuple[Launch, ...]) -> int:
        """A graph of these launches, none of which is run. Raises RuntimeError where the driver refuses it."""
        api = self._api
        if self._recording_stream is None:
            self._recording_stream = api.streamCreateWithFlags(api.streamNonBlocking)
        stream = self._recording_stream

        def issue() -> None:
            for run, key in launches:
                run(stream, key)

        with captured(api, stream, issue) as graph:
            return int(api.graphInstantiate(graph))


# Whether streams that are opened from now on group their launches.
is_on = True
# By the address of the stream; empty where launches are not grouped.
of_stream: dict[int, LaunchGroups] = {}

if hasattr(os, "register_at_fork"):
    # What waits is the parent's to launch; a child can use none of its streams.
    os.register_at_fork(after_in_child=of_stream.clear)


def alone_on(stream: int) -> AbstractContextManager[None]:
    """Within it, what other threads put on a stream whose launches are grouped comes later: for recording one's own."""
    groups = of_stream.get(stream)
    return nullcontext() if groups is None else groups.alone()


def flush(stream: int) -> None:
    """Launches what waits on a stream, if anything can."""
    groups = of_stream.get(stream)
    if groups is not None:
        groups.flush()


def flush_all() -> None:
    """Launches what waits on any stream."""
    for groups in list(of_stream.values()):
        groups.flush()
