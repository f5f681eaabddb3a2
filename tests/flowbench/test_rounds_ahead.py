"""Rounds whose processes start ahead: as many as there are cores and memory for, none left that is not wanted any more."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from flowbench.cell import Case, Cell
from flowbench.measure import rank_group, rounds_ahead
from flowbench.measure.processes import marked
from flowbench.measure.rank_process import RankProcess
from flowbench.measure.ranks import Round
from flowbench.measure.rounds_ahead import RoundsAhead
from flowbench.measure.schedule import Turn
from flowbench.measure.wire import Job

pytestmark = pytest.mark.usefixtures("toys")
MARK = f"test-of-rounds-ahead-{os.getpid()}"  # not that of another run of these tests
CASE = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)


def round_of(pair: int, case: Case = CASE, engine: str = "toy") -> list[Turn]:
    """Two turns."""
    return [Turn(Cell.of(case, engine), pair, position) for position in range(2)]


def job_of(turn: Turn) -> Job:
    return Job(turn.cell, 0, 2, 1, 0, 1e-4, 0.9, steps_per_turn=1)


def ahead(cores: int, free_bytes: int = 2**50) -> RoundsAhead:
    return RoundsAhead(job_of, MARK, None, cores, lambda: free_bytes)


def test_so_many_start_that_each_core_has_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("ODD_SETUP_FILE", str(notes))
    rounds = [round_of(pair, engine="toy-setup") for pair in range(4)]
    some = ahead(cores=3)
    first = some.take(rounds[0], rounds[1:])
    assert notes.read_text().split() == ["load"] * 4, "two rounds, and nothing beyond what is done together"
    assert len(marked(MARK)) == 4
    assert [result.error for result in first.run()] == [None] * 2
    assert len(marked(MARK)) == 2, "what waits for its round lives on"
    before_s = some.cpu_s()
    assert before_s > 0
    second = some.take(rounds[1], rounds[2:])
    assert notes.read_text().split().count("load") == 4, "it had started before"
    assert some.cpu_s() == 0, "nothing else waits"
    assert [result.error for result in second.run()] == [None] * 2
    assert not marked(MARK)


def test_what_will_not_come_any_more_is_ended() -> None:
    some = ahead(cores=6)
    some.take(round_of(0), [round_of(1), round_of(2)]).run()
    assert len(marked(MARK)) == 4
    some.take(round_of(1), [round_of(3)]).close()
    assert not marked(MARK)
    some.take(round_of(3), [round_of(4)]).close()
    assert len(marked(MARK)) == 2
    some.close()
    assert not marked(MARK)


def test_what_is_killed_while_it_waits_starts_anew(wait: Callable[..., None]) -> None:
    some = ahead(cores=3)
    some.take(round_of(0), [round_of(1)]).run()
    victim, *_ = marked(MARK)
    os.kill(victim, signal.SIGKILL)
    wait(lambda: psutil.Process(victim).status() == psutil.STATUS_ZOMBIE, "the end of what was killed")
    assert [result.error for result in some.take(round_of(1)).run()] == [None] * 2
    assert not marked(MARK)


@pytest.mark.parametrize("change", [{"ddp": True}, {"ddp": True, "world_size": 2}])
def test_ranks_that_meet_start_with_their_round(monkeypatch: pytest.MonkeyPatch, change: dict[str, int]) -> None:
    started = started_of(monkeypatch)
    together = dataclasses.replace(CASE, **change)  # type: ignore[arg-type]
    ahead(cores=16).take(round_of(0), [round_of(0, together), round_of(1)])
    assert len(started) == 1
    ahead(cores=16).take(round_of(0, together), [round_of(1)])
    assert len(started) == 3, "the round to be run starts in any case"


def test_memory_bounds_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started = started_of(monkeypatch)
    rounds = [round_of(pair) for pair in range(4)]
    ahead(cores=16, free_bytes=4 * 5 * 2**30).take(rounds[0], rounds[1:])
    assert len(started) == 2, "a quarter of the memory has room for five processes of a GiB each"
    started.clear()
    ahead(cores=16, free_bytes=1).take(rounds[0], rounds[1:])
    assert len(started) == 1


def test_what_waits_has_its_cores_when_one_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    started = started_of(monkeypatch)
    rounds = [round_of(pair) for pair in range(6)]
    some = ahead(cores=6)
    some.take(rounds[0], rounds[1:])
    assert len(started) == 3
    monkeypatch.setattr(Round, "waits", False)
    monkeypatch.setattr(Round, "close", lambda _: None)
    some.take(rounds[1], rounds[2:])
    assert len(started) == 3 + 2, "this one and one more: the third waits"


def test_however_many_cores_there_are_pipes_for_so_many_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    started = started_of(monkeypatch)
    rounds = [round_of(pair) for pair in range(600)]
    ahead(cores=1000).take(rounds[0], rounds[1:])
    assert len(started) == rounds_ahead._MOST_PROCESSES / 2


def test_a_round_that_the_system_does_not_let_start_ahead_starts_when_it_is_to_be_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts, refused = 0, {2, 4}
    start = rank_group.start_rank

    def start_some(*arguments: Any) -> RankProcess:
        nonlocal starts
        starts += 1
        if starts - 1 in refused:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*arguments)

    monkeypatch.setattr(rank_group, "start_rank", start_some)
    some = ahead(cores=6)
    assert [result.error for result in some.take(round_of(0), [round_of(1)]).run()] == [None] * 2
    assert not marked(MARK)
    one, other = (
        result.error for result in some.take(round_of(1)).run()
    )  # of a round that is to be run somebody has to know
    assert one == (
        "its process cannot be started: Resource temporarily unavailable: raise ulimit -u (or pids.max of a container), or take"
        " fewer ranks"
    )
    assert other is None, "the other group went on alone"
    assert not marked(MARK)
    assert [result.error for result in some.take(round_of(1)).run()] == [None] * 2


def started_of(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Rounds that are started from now on, in name only."""
    started: list[Round] = []
    monkeypatch.setattr(Round, "start", lambda one: started.append(one))
    monkeypatch.setattr(rounds_ahead, "get_ready", lambda _: None)
    return started
