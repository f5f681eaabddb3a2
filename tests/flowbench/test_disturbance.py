"""What else a machine does: whose cores count, and from where on it is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flowbench.measure import disturbance
from flowbench.measure.disturbance import Counters, awakened, disturbances, read_counters, uneven_steps

# user, nice, system, idle, waiting, interrupts, soft interrupts, stolen, guest, guest nice: proc(5).
STAT = """\
cpu  1000 200 300 9000 50 10 20 40 0 0
cpu0 100 0 0 900 0 0 0 0 0 0
cpu1 200 10 20 800 7 1 2 4 0 0
cpu2 300 0 0 700 0 0 0 6 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(
    ("cores", "busy", "stolen"),
    [({1}, 233, 4), ({1, 2}, 533, 10), ({1, 7}, 1530, 40), (set(), 1530, 40)],  # core 7 is of another numbering
)
def test_only_cores_that_may_be_used_count(
    cores: set[int], busy: int, stolen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(disturbance, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(disturbance, "_usable", lambda: cores)
    ticks = os.sysconf("SC_CLK_TCK")
    counters = read_counters()
    assert (counters.busy_s * ticks, counters.stolen_s * ticks) == (pytest.approx(busy), pytest.approx(stolen))


def test_without_proc_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance, "_STAT", tmp_path / "stat")
    counters = read_counters()
    assert (counters.busy_s, counters.stolen_s) == (0, 0)


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Counters(10, 22, 0, 20, 0, 10, 10), []),
        (Counters(10, 22.1, 0, 20, 0, 10, 10), [("other load", "other processes used 0.2 of 2 cores")]),
        (Counters(10, 20, 0.4, 20, 0, 10, 10), []),
        (Counters(10, 20, 0.5, 20, 0, 10, 10), [("stolen time", "the hypervisor gave 0.05 of 2 cores to others")]),
        (Counters(10, 20, 0, 20, 3, 10, 10), [("swapping", "3 pages were swapped")]),
        (Counters(10, 20, 0, 20, 0, 11, 11), []),
        (Counters(10, 20, 0, 20, 0, 10, 12), []),
        (
            Counters(10, 20, 0, 20, 0, 10, 13),
            [("clock", "the time of day was set by +3 s: times of day are off here, ")],
        ),
        (Counters(0, 20, 1, 0, 3, 0, 0), []),
    ],
)
def test_what_is_told_of_ten_seconds_on_two_cores(after: Counters, said: list[tuple[str, str]]) -> None:
    found = list(disturbances(Counters(0, 0, 0, 0, 0, 0, 0), after, 2))
    assert [kind for kind, _ in found] == [kind for kind, _ in said]
    assert all(text.startswith(start) for (_, text), (_, start) in zip(found, said, strict=True))


def test_what_should_sleep_and_does_not_is_told() -> None:
    ready = Counters(10, 0, 0, 0, 0, waiting_s=7)
    for waiting_s, said in [(7, []), (7.7, []), (9, ["processes that wait for their round used 0.5 of 2 cores"])]:
        found = [
            message.partition(":")[0]
            for _, message in awakened(ready, Counters(14, 0, 0, 0, 0, waiting_s=waiting_s), 2)
        ]
        assert found == said


@pytest.mark.parametrize(
    ("steps_ms", "is_told"),
    [((40, 300, 2317), True), ((12, 60), True), ((13, 60), False), ((1, 49), False), ((100, 499), False), ((), False)],
)
def test_steps_of_several_times_the_shortest_are_uneven_unless_they_are_a_blink(
    steps_ms: tuple[float, ...], is_told: bool
) -> None:
    assert (uneven_steps(steps_ms) is not None) == is_told
