"""Groups of several ranks: released together, the slowest counts, the first failure is what one sees."""

from __future__ import annotations

import pytest

from flowbench.cell import Case, Cell
from flowbench.measure import ranks
from flowbench.measure.processes import marked
from flowbench.measure.ranks import GroupResult, run_group
from flowbench.measure.wire import Job

pytestmark = pytest.mark.usefixtures("toys")
MARK = "test-of-ranks"


def group(engine: str, world_size: int = 2, **limits: float) -> GroupResult:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", world_size, False, True, True, 1)
    result = run_group(Job(Cell.of(case, engine), 0, 3, 1, 0, 1e-4, 0.9), MARK, **limits)
    assert not marked(MARK)
    return result


def test_all_ranks_are_recorded_each_with_data_of_its_own() -> None:
    result = group("toy", world_size=3)
    assert result.error is None
    assert [rank.rank for rank in result.ranks] == [0, 1, 2]
    assert len({rank.losses for rank in result.ranks}) == 3


def test_a_late_and_slow_rank_is_waited_for_and_shows() -> None:
    result = group("toy-second-slow")
    assert result.error is None
    quick, slow = result.ranks
    assert min(slow.steps_ms) >= 50
    assert min(slow.steps_ms) > max(quick.steps_ms)


def test_the_first_failure_ends_the_group_under_its_ranks_name() -> None:
    result = group("toy-second-raises")
    assert result.error == "rank 1: ValueError: rank 1 of 2 will not (in phase build)"
    assert result.ranks == ()


def test_a_rank_killed_for_memory_says_so_and_is_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter(range(100))  # the kernel's counter of such kills, as if it had risen
    monkeypatch.setattr(ranks, "_memory_kills", lambda: next(kills))
    result = group("toy-killed", world_size=1)
    assert result.error == "killed by SIGKILL in phase steps, after step 1: the system ran out of memory"
    assert (group("toy-score", world_size=1).error or "").startswith("ValueError: 1000 ")


def test_a_rank_that_hangs_ends_the_group() -> None:
    result = group("toy-hangs", silence_s=2)
    assert result.error is not None
    assert "hangs: no sign of progress for 2 s in phase steps, after step 1" in result.error
