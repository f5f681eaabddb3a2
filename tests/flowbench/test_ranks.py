"""Groups of several ranks: released together, the slowest counts, the first failure is what one sees."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowbench.cell import Case, Cell, Device
from flowbench.engine_registry import load_engine
from flowbench.measure import rank_group
from flowbench.measure.agreement import compare_states
from flowbench.measure.processes import marked
from flowbench.measure.rank_group import GroupResult, RankGroup
from flowbench.measure.ranks import Round, get_ready, run_group
from flowbench.measure.wire import Job, Phase, RankState

pytestmark = pytest.mark.usefixtures("toys")
MARK = f"test-of-ranks-{os.getpid()}"  # not that of another run of these tests


def group(engine: str, world_size: int = 2, ddp: bool = False, **limits: Any) -> GroupResult:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", world_size, ddp, True, True, 1)
    result = run_group(Job(Cell.of(case, engine), 0, 3, 1, 0, 1e-4, 0.9), MARK, **limits)
    assert not marked(MARK)
    return result


def test_all_ranks_are_recorded_each_with_data_of_its_own() -> None:
    result = group("toy", world_size=3)
    assert result.error is None
    assert [rank.rank for rank in result.ranks] == [0, 1, 2]
    assert len({rank.losses for rank in result.ranks}) == 3


def test_no_phase_is_missed_however_soon_the_next_one_comes() -> None:
    phases: list[Phase] = []
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    result = run_group(Job(Cell.of(case, "toy"), 0, 3, 1, 0, 1e-4, 0.9), MARK, on_look=phases.append)
    assert result.error is None
    passed = list(dict.fromkeys(phases))
    assert passed == ["start", "import", "data", "barrier", "build", "warm-up", "steps", "end", "exit"], passed


def test_those_that_take_turns_open_and_end_together_and_build_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("ODD_SETUP_FILE", str(notes))
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    job = Job(Cell.of(case, "toy-setup"), 0, 3, 1, 0, 1e-4, 0.9)
    results = Round([replace(job, steps_per_turn=1)] * 3, MARK).run()
    assert [result.error for result in results] == [None] * 3
    assert notes.read_text().split() == (
        ["load"] * 3 + ["open"] * 3 + ["build", "step"] * 3 + ["close"] * 3 + ["exit"] * 3
    )
    notes.unlink()
    # Alone there is nobody to open together with.
    run_group(job, MARK)
    assert notes.read_text().split() == ["load", "build", "step", "close", "exit"]


def where_they_ran(
    device: Device, cores: tuple[int, ...], warmup: int, notes: Path
) -> tuple[GroupResult, dict[tuple[int, int], tuple[list[int], list[int]]]]:
    """Two ranks' result; by rank and step, where the thread that trains may run, and one started in the first step."""
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 2, True, True, True, 1, device)
    result = run_group(Job(Cell.of(case, "toy-gpu-cores"), 0, 3, warmup, 0, 1e-4, 0.9, cores=cores), MARK)
    assert result.error is None
    noted = [json.loads(line) for line in notes.read_text().splitlines()]
    assert {(rank, step) for rank, step, *_ in noted} >= {(rank, step) for rank in (0, 1) for step in range(3 + warmup)}
    return result, {(rank, step): (trains, started) for rank, step, trains, started in noted}


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """All cores that may be used, of which there are two at least."""
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("the system lets nobody choose cores")
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("there is one core only: nowhere else to be")
    monkeypatch.setenv("CORES_FILE", str(tmp_path / "notes"))
    return usable


def test_ranks_stay_on_the_cores_they_are_given(two_cores: list[int], tmp_path: Path) -> None:
    _, ran = where_they_ran("cpu", (two_cores[1],), 2, tmp_path / "notes")
    assert set(map(str, ran.values())) == {str(([two_cores[1]], [two_cores[1]]))}


def test_on_a_gpu_the_thread_that_trains_stays_on_its_ranks_core_after_its_first_step(
    two_cores: list[int], tmp_path: Path
) -> None:
    _, ran = where_they_ran("cuda", tuple(two_cores[:2]), 2, tmp_path / "notes")
    assert ran == {(rank, step): ([two_cores[rank]] if step else two_cores, two_cores) for rank, step in ran}


def test_without_a_warm_up_no_thread_of_the_engine_is_held(two_cores: list[int], tmp_path: Path) -> None:
    _, ran = where_they_ran("cuda", tuple(two_cores[:2]), 0, tmp_path / "notes")
    assert ran == dict.fromkeys(ran, (two_cores, two_cores))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_core_that_may_not_be_used_any_more_is_told_and_costs_no_figure(
    device: Device, two_cores: list[int], tmp_path: Path
) -> None:
    result, ran = where_they_ran(device, (4000, 4001), 2, tmp_path / "notes")
    assert ran == dict.fromkeys(ran, (two_cores, two_cores))
    gone = ("4000, 4001",) if device == "cpu" else ("4000", "4001")
    assert {*result.notes} >= {f"it ran on any core, not on {one} alone: Invalid argument" for one in gone}


@pytest.mark.parametrize("steps_per_turn", [None, 1])
def test_an_engine_that_is_no_subclass_may_lack_what_came_later(steps_per_turn: int | None) -> None:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    job = Job(Cell.of(case, "toy-no-subclass"), 0, 3, 1, 0, 1e-4, 0.9, steps_per_turn=steps_per_turn)
    assert run_group(job, MARK).error is None
    assert load_engine("toy-no-subclass").tunes == "always"


def test_those_that_tune_nothing_build_at_the_same_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("ODD_SETUP_FILE", str(notes))
    monkeypatch.setenv("ODD_BUILDERS", "3")  # none of them goes on before all three build
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    job = Job(Cell.of(case, "toy-setup"), 0, 3, 1, 0, 1e-4, 0.9, steps_per_turn=1)
    results = Round([job] * 3, MARK, silence_s=30).run(build_together=True)
    assert [result.error for result in results] == [None] * 3
    assert notes.read_text().split() == [
        word for word in ("load", "open", "build", "step", "close", "exit") for _ in "abc"
    ]


def test_groups_that_work_at_the_same_time_are_listened_to_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ODD_SETUP_FILE", str(tmp_path / "notes"))
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    job = Job(Cell.of(case, "toy-talks-while-loading"), 0, 3, 1, 0, 1e-4, 0.9, steps_per_turn=1)
    rounds = [Round([job], f"{MARK}/{number}", silence_s=10) for number in range(2)]
    for one in rounds:
        one.start()
    get_ready(rounds)
    assert [one.waits for one in rounds] == [True, True]
    assert [result.error for one in rounds for result in one.run()] == [None, None]


def test_ranks_that_find_no_open_file_fail_their_group_and_keep_none(request: pytest.FixtureRequest) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = next(number for number in count(1) if len(set(range(number)) - taken) == 12)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    for _ in range(3):
        result = group("toy", world_size=4)
        assert result.error is not None
        said = r"its process cannot be started \(rank [123] of 4\): Too many open files: raise ulimit -n, or take fewer ranks"
        assert re.fullmatch(said, result.error)
        assert result.ranks == ()
    assert len(os.listdir("/proc/self/fd")) == len(taken)
    assert group("toy", world_size=1).error is None, "there is room for one"


def test_a_group_without_a_rank_has_no_result() -> None:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    never_started = RankGroup(Job(Cell.of(case, "toy"), 0, 3, 1, 0, 1e-4, 0.9), MARK, None)
    assert never_started.result(()).error == "a rank ended without a result"


def test_a_late_and_slow_rank_is_waited_for_and_shows() -> None:
    result = group("toy-second-slow")
    assert result.error is None
    quick, slow = result.ranks
    assert min(slow.steps_ms) >= 50
    assert min(quick.steps_ms) < 50  # each rank's own: of three steps, one at least was not held up by other programs


def test_the_first_failure_ends_the_group_under_its_ranks_name() -> None:
    result = group("toy-second-raises")
    line = next(
        number
        for number, text in enumerate(Path(__file__).with_name("odd_engines.py").read_text().splitlines(), 1)
        if "of {task.world_size} will not" in text
    )
    said = f"rank 1: ValueError: rank 1 of 2 will not (in phase build, raised at odd_engines.py:{line})"
    assert result.error == said
    assert result.ranks == ()


def test_a_rank_killed_for_memory_says_so_and_is_the_first_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter(range(100))  # the kernel's counter of such kills, as if it had risen
    monkeypatch.setattr(rank_group, "_memory_kills", lambda: next(kills))
    result = group("toy-killed", world_size=1)
    assert result.error == "killed by SIGKILL in phase steps, after step 1: the system ran out of memory"
    assert (group("toy-score", world_size=1).error or "").startswith("ValueError: 1000 ")


def test_what_was_killed_for_memory_before_a_round_is_not_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [0]
    monkeypatch.setattr(rank_group, "_memory_kills", lambda: kills[0])
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 1)
    one = Round([Job(Cell.of(case, "toy-killed"), 0, 3, 1, 0, 1e-4, 0.9)], MARK)
    one.start()
    get_ready([one])
    kills[0] += 1  # another program's, while these ranks slept
    (result,) = one.run()
    assert result.error == "died of SIGKILL in phase steps, after step 1"


def test_ranks_that_were_frozen_with_us_do_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen_s = [0.0]  # all that a paused container shows: much time has passed since the last look

    def look(phase: Phase) -> None:
        frozen_s[0] = 1000.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + frozen_s[0])
    monkeypatch.setattr(rank_group, "time", clock)
    result = group("toy", silence_s=60, on_look=look)
    assert result.error is None
    assert result.notes[0] == "flowbench stood still for 1000 s (stopped, or its container paused?)"


def test_a_rank_that_hangs_ends_the_group() -> None:
    result = group("toy-hangs", silence_s=8)
    assert result.error is not None
    assert "hangs: no sign of progress for 8 s in phase steps, after step 1" in result.error


def test_ranks_that_hold_the_same_weights_agree() -> None:
    result = group("toy-agrees")
    assert result.error is None
    assert result.disagreement is None
    assert result.notes == ()


def test_a_difference_of_one_bit_is_found_and_its_tensor_named() -> None:
    result = group("toy-second-drifts")
    assert result.error is None
    assert result.disagreement == "the ranks disagree: bias of rank 1 is not that of rank 0, bit for bit"


def test_where_an_engine_shows_no_parameters_that_is_said() -> None:
    assert set(group("toy").notes) == {"the engine shows no parameters, so whether the ranks agree is not known"}


def test_states_are_compared_by_name_and_loss() -> None:
    same = RankState({"a": "1", "b": "2"}, 0.5)
    assert compare_states({}, exact=True) is None
    assert compare_states({0: same}, exact=True) is None
    assert compare_states({0: same, 1: same}, exact=True) is None
    other = RankState({"a": "1", "b": "3", "c": "4"}, 0.5)
    assert "b and 1 more of rank 1 is" in (
        compare_states({0: RankState({**same.parameters, "c": "5"}, 0.5), 1: other}, exact=True) or ""
    )
    assert "c of rank 2 is" in (
        compare_states({0: same, 2: RankState({**same.parameters, "c": "4"}, 0.5)}, exact=True) or ""
    )
    near = RankState(same.parameters, 0.5000001)
    assert "the loss is 0.5000001 on rank 1, 0.5 on rank 0" in (compare_states({0: same, 1: near}, exact=True) or "")
    assert compare_states({0: same, 1: near}, exact=False) is None
    assert compare_states({0: same, 1: RankState(same.parameters, 0.6)}, exact=False) is not None
    assert compare_states({0: same, 1: RankState(same.parameters, None)}, exact=False) is not None


@pytest.mark.parametrize("engine", ["flow-eager", "torch-eager"])
def test_ranks_of_a_real_engine_train_together(engine: str) -> None:
    if engine == "torch-eager":
        pytest.importorskip("torch")
    result = group(engine, ddp=True)
    assert result.error is None
    assert result.disagreement is None
    assert result.notes == ()
    first, second = result.ranks
    assert first.losses != second.losses  # each has data of its own


def test_one_rank_may_train_through_ddp_as_well() -> None:
    assert group("flow-eager", world_size=1, ddp=True).error is None
