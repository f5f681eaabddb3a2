"""When a comparison's sitting ends, what it confirms and what it says of it: with samples that are made up, in no time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.explanation import MOST_PROFILED
from flowbench.judge.verdict import Verdict
from flowbench.measure import comparison_session, session
from flowbench.measure.comparison_session import CONFIRMING_SHARE, ComparisonSession, Place
from flowbench.measure.disturbance import Counters
from flowbench.measure.plan import Request
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.rank_group import GroupResult
from flowbench.measure.ranks import Round
from flowbench.measure.resumption import whole_pairs
from flowbench.measure.schedule import Turn
from flowbench.measure.session import Watcher
from flowbench.record import store
from flowbench.record.run import Ending, RunDocument, Side
from flowbench.record.sample import Memory, RankSample, Sample

pytestmark = pytest.mark.usefixtures("toys")

REQUEST = Request(
    engines=("toy-sided",), reference="toy", models=("linear",), image_shape=(3, 4, 4), batch_sizes=(2,), pairs=8, threads=1
)  # fmt: skip

# A turn's time in ms, or None where it fails.
Outcome = Callable[[Turn], float | None]


class Listening(Watcher):
    """Keeps the number of each round, and of how many."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int]] = []

    def turn(self, turn: Turn, number: int, turns: int, left_s: float) -> None:
        self.rounds.append((number, turns))


class MadeUp(ComparisonSession):
    """A sitting whose samples cost nothing; the cap is reached after so many rounds."""

    def __init__(self, path: Path, document: RunDocument, outcome: Outcome, most_rounds: int, watcher: Watcher) -> None:
        places = dict.fromkeys(("base", "head", "canary"), Place())
        super().__init__(path, document, places, watcher, lambda: Counters(0, 0, 0, 0, 0))
        self.outcome, self.most_rounds, self.measured = outcome, most_rounds, 0
        self.rounds: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []

    def measure(self, turns: Sequence[Turn], later: Sequence[Sequence[Turn]] = ()) -> None:
        self.measured += 1
        names = [(one[0].pair, one[0].cell.input_shape[0]) for one in (turns, *later)]
        self.rounds.append((names[0], names[1:]))
        self.write(samples=(*self.document.samples, *(made_up(turn, self.outcome(turn)) for turn in turns)))

    def cap_left_s(self, share: float = 1.0) -> float:
        return share * self.most_rounds - self.measured - 0.5


def made_up(turn: Turn, step_ms: float | None) -> Sample:
    failed = step_ms is None
    memory = Memory(None, None, 2**20, 2**20)
    ranks = () if failed else (RankSample(0, 1, "cpu", (), (step_ms,) * 3, (1.0,) * 3, memory),)
    status, error = ("failed", "it broke") if failed else ("ok", None)
    wall_s = turn.cell.input_shape[0] / 2
    return Sample(turn.cell.key, turn.pair, turn.position, "2026-11-29T10:00:00Z", wall_s, status, error, None, ranks)


def sitting(
    tmp_path: Path,
    outcome: Outcome,
    request: Request = REQUEST,
    most_rounds: int = 1000,
    watcher: Watcher | None = None,
) -> RunDocument:
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})
    document = replace(document, protocol=replace(document.protocol, wall_cap_s=470.0))
    made_up = MadeUp(store.create(tmp_path, document), document, outcome, most_rounds, watcher or Listening())
    made_up.run()
    return made_up.document


def side(turn: Turn) -> str:
    return turn.cell.engine.partition("@")[2]


def rounds_of(document: RunDocument, engine: str) -> list[int]:
    return [sample.pair for sample in document.samples if document.by_key[sample.cell].engine == engine]


def sizes_of(document: RunDocument, side: str) -> Counter[int]:
    """How often a side was measured, by batch size."""
    cells = (document.by_key[sample.cell] for sample in document.samples)
    return Counter(cell.input_shape[0] for cell in cells if cell.engine.endswith(f"@{side}"))


def rounds_by_size(document: RunDocument) -> Counter[tuple[int, int]]:
    """How many samples there are, by pair and batch size."""
    return Counter((sample.pair, document.by_key[sample.cell].input_shape[0]) for sample in document.samples)


def noisy(turn: Turn, head_ms: float = 10.0) -> float:
    """Head's times jump about, so that no interval is ever narrow."""
    return head_ms * (1.0, 1.3)[turn.pair % 2] if side(turn) == "head" else 10.0


def test_every_sitting_has_base_once_more_at_its_cheapest_case() -> None:
    document = plan_comparison(replace(REQUEST, batch_sizes=(8, 2, 4)), (), Side("a", None), Side("b", None), {})
    by_side = {
        name: [c.input_shape[0] for c in document.cells if c.engine.endswith(f"@{name}")] for name in ("head", "canary")
    }
    assert by_side == {"head": [8, 2, 4], "canary": [2]}


def test_sampling_ends_with_a_narrow_interval_and_what_looks_slower_is_confirmed(tmp_path: Path) -> None:
    watcher = Listening()
    document = sitting(tmp_path, lambda turn: 12.0 if side(turn) == "head" else 10.0, watcher=watcher)
    (time,) = judge_document(document).times
    assert (time.verdict, time.confirmed, time.pairs, time.confirmation_pairs) == (Verdict.SLOWER, True, 12, 6)
    assert rounds_of(document, "toy-sided@head") == [*range(6), *range(8, 14)]
    assert rounds_of(document, "toy-sided@canary") == list(range(6))
    assert rounds_of(document, "toy") == [0, 1, 2]
    assert document.comparison is not None
    assert list(document.comparison.stopped.values()) == ["the intervals were narrow enough after 6 pairs"]
    assert (document.ending.how, document.ending.reason) == ("complete", None)
    assert watcher.rounds == [*((number, 8) for number in range(1, 7)), *((number, 12) for number in range(7, 13))]
    positions = [(sample.pair, sample.position) for sample in document.samples if "base" in sample.cell]
    assert positions[:4] == [(0, 0), (1, 3), (2, 0), (3, 2)], "every other round is reversed"


def test_sampling_ends_with_the_last_pair(tmp_path: Path) -> None:
    document = sitting(tmp_path, noisy)
    assert rounds_of(document, "toy-sided@head") == list(range(8))
    assert document.comparison is not None
    assert list(document.comparison.stopped.values()) == [
        "all 8 pairs were measured, and the interval is still wider than wanted"
    ]
    assert document.ending.how == "complete"


def test_the_cap_says_how_many_rounds_each_case_has(tmp_path: Path) -> None:
    document = sitting(tmp_path, noisy, replace(REQUEST, batch_sizes=(4, 2)), most_rounds=3)
    assert document.comparison is not None
    assert list(document.comparison.stopped.values()) == [
        "the cap of 470 s was reached after 2 of 8 rounds",
        "the cap of 470 s was reached after 1 of 8 rounds",
    ]
    assert (document.ending.how, document.ending.reason) == ("wall_cap", "the cap of 470 s was reached")
    assert Counter(sample.pair for sample in document.samples if "head" in sample.cell) == {0: 2, 1: 1}


def test_rounds_that_are_sure_to_follow_may_start_ahead(tmp_path: Path) -> None:
    def outcome(turn: Turn) -> float:
        return 13.0 + turn.pair if side(turn) == "head" and turn.cell.input_shape[0] == 4 else 10.0

    request = replace(REQUEST, batch_sizes=(4, 2))
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})
    sitting = MadeUp(store.create(tmp_path, document), document, outcome, 1000, Listening())
    sitting.run()
    ahead = dict(sitting.rounds)
    assert ahead[0, 4] == [(0, 2), *((pair, size) for pair in range(1, 6) for size in (4, 2))], (
        "not beyond the least pairs"
    )
    assert ahead[5, 4] == [(5, 2)]
    assert ahead[6, 4] == [], "the other case was precise, and this one may be now"
    assert ahead[8, 4] == [(pair, 4) for pair in range(9, 14)], "all that confirm"


@pytest.mark.parametrize(("most_rounds", "pairs"), [(10, {4: 4, 2: 6}), (14, {4: 4, 2: 8}), (15, {4: 8, 2: 7})])
def test_where_the_cap_has_no_time_for_the_least_pairs_of_all_some_get_theirs(
    tmp_path: Path, most_rounds: int, pairs: dict[int, int]
) -> None:
    document = sitting(tmp_path, noisy, replace(REQUEST, batch_sizes=(4, 2)), most_rounds)
    assert sizes_of(document, "head") == pairs
    assert document.ending.how == "wall_cap"
    assert document.comparison is not None
    why = document.comparison.stopped[document.cases[0].key]
    assert why.startswith("the cap of 470 s leaves no time for 6 rounds of all cases") == (pairs[4] < pairs[2])
    left_out = "the cap of 470 s left no time for the least rounds of 1 of the cases"
    assert document.ending.reason == ("the cap of 470 s was reached" if most_rounds != 14 else left_out)


@pytest.mark.parametrize(("starting_s", "left_out"), [(0.0, 4), (1.5, 2)])
def test_starting_processes_of_others_ahead_makes_no_round_the_longest(
    tmp_path: Path, starting_s: float, left_out: int
) -> None:
    request = replace(REQUEST, batch_sizes=(4, 2))
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})
    document = replace(document, protocol=replace(document.protocol, wall_cap_s=470.0))
    sitting = MadeUp(store.create(tmp_path, document), document, noisy, 10, Listening())
    # Of the 2 s of a round of 4 images these have gone into starting; what is left is less than the 1 s of the other.
    longest, other = sitting.document.cases
    sitting._starting_s = dict.fromkeys(((longest, pair) for pair in range(8)), starting_s)
    sitting.run()
    assert sitting.document.comparison is not None
    early = [case for case in (longest, other) if "leaves no time" in sitting.document.comparison.stopped[case.key]]
    assert [case.input_shape[0] for case in early] == [left_out]


def test_a_case_with_all_its_rounds_was_not_cut_short_by_the_cap(tmp_path: Path) -> None:
    document = sitting(tmp_path, noisy, replace(REQUEST, batch_sizes=(4, 2)), most_rounds=15)
    assert document.comparison is not None
    assert [document.comparison.stopped[case.key] for case in document.cases] == [
        "all 8 pairs were measured, and the interval is still wider than wanted",
        "the cap of 470 s was reached after 7 of 8 rounds",
    ]


def gone_on(tmp_path: Path, document: RunDocument, outcome: Outcome, most_rounds: int) -> RunDocument:
    """The sitting of `document` after an interruption, with so many more rounds."""
    stopped = whole_pairs(replace(document, ending=Ending("interrupted", None, "stopped by the user")))
    again = MadeUp(store.create(tmp_path / f"{most_rounds} more", stopped), stopped, outcome, most_rounds, Listening())
    again.run()
    return again.document


@pytest.mark.parametrize("most_rounds", [3, 10, 14])
def test_a_case_that_was_closed_for_lack_of_time_goes_on_with_more(tmp_path: Path, most_rounds: int) -> None:
    request = replace(REQUEST, batch_sizes=(4, 2))
    short = sitting(tmp_path, noisy, request, most_rounds)
    assert short.comparison is not None
    assert any(why.startswith("the cap of 470 s") for why in short.comparison.stopped.values())
    longer = gone_on(tmp_path, short, noisy, 1000)
    assert longer.samples[: len(short.samples)] == short.samples
    assert sizes_of(longer, "head") == {4: 8, 2: 8}
    assert longer.ending.how == "complete"


def test_only_the_rounds_that_are_missing_need_time_where_a_sitting_goes_on(tmp_path: Path) -> None:
    """Of the longer case two of the least rounds are missing, which take 4 s together; the other case has all of these."""
    short = sitting(tmp_path, noisy, replace(REQUEST, batch_sizes=(4, 2)), most_rounds=10)
    assert sizes_of(short, "head") == {4: 4, 2: 6}
    assert sizes_of(gone_on(tmp_path, short, noisy, 5), "head") == {4: 8, 2: 7}


def test_without_more_time_a_case_is_closed_again(tmp_path: Path) -> None:
    short = sitting(tmp_path, noisy, replace(REQUEST, batch_sizes=(4, 2)), most_rounds=14)
    again = gone_on(tmp_path, short, noisy, 0)
    assert again.samples == short.samples
    assert again.comparison is not None
    assert again.comparison.stopped[again.cases[0].key] == "the cap of 470 s was reached after 4 of 8 rounds"
    assert (again.ending.how, again.ending.reason) == ("wall_cap", "the cap of 470 s was reached")


def test_a_round_that_was_slept_through_is_measured_where_a_sitting_goes_on(tmp_path: Path) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {})
    asleep = MadeUp(store.create(tmp_path, document), document, noisy, 1000, Listening())
    readings = iter(range(0, 1000, 60))
    asleep._clocks = lambda: Counters(0, 0, 0, 0, 0, next(readings))
    asleep.run()
    assert asleep.document.samples == ()
    assert sizes_of(gone_on(tmp_path, asleep.document, noisy, 1000), "head") == {2: 8}


def test_no_sampling_goes_on_where_figures_ended_it_or_confirming_rounds_have_begun(tmp_path: Path) -> None:
    def outcome(turn: Turn) -> float:
        """Head is slower at both sizes: certainly so at one, with times that jump about at the other."""
        slow_ms = 14.0 + 0.6 * (turn.pair % 2) if turn.cell.input_shape[0] == 4 else 12.0
        return slow_ms if side(turn) == "head" else 10.0

    short = sitting(tmp_path, outcome, replace(REQUEST, batch_sizes=(4, 2), pairs=10), most_rounds=15)
    assert short.comparison is not None
    assert [short.comparison.stopped[case.key] for case in short.cases] == [
        "the cap of 470 s was reached after 9 of 10 rounds",
        "the intervals were narrow enough after 6 pairs",
    ]
    assert {sample.pair for sample in short.samples} == {*range(9), 10, 11}
    longer = gone_on(tmp_path, short, outcome, 1000)
    assert rounds_by_size(longer) - rounds_by_size(short) == Counter(
        {(pair, size): 2 for pair in (12, 13, 14, 15) for size in (4, 2)}
    )
    # A pair that lacks a side is measured anew even so; rounds that confirm are none of sampling.
    halved = [sample for sample in short.samples if (sample.pair, "head" in sample.cell) != (3, True)]
    again = gone_on(tmp_path, replace(short, samples=tuple(halved)), outcome, 0)
    assert again.comparison is not None
    assert again.comparison.stopped[again.cases[1].key] == "the cap of 470 s was reached after 5 of 10 rounds"


def test_confirming_may_take_a_quarter_more_than_the_cap(tmp_path: Path) -> None:
    document = sitting(tmp_path, lambda turn: 12.0 if side(turn) == "head" else 10.0, most_rounds=8)
    assert rounds_of(document, "toy-sided@head") == [*range(6), *range(8, 12)]
    assert document.ending.how == "wall_cap"
    assert document.ending.reason == (
        "the cap of 470 s was reached, and a quarter more, before all new pairs were measured"
    )


def test_a_sitting_and_the_profiles_of_what_is_worse_take_ten_minutes_at_most() -> None:
    plan = plan_comparison(replace(REQUEST, pairs=None), (), Side("a", None), Side("b", None), {})
    last_round_s, profile_s = 11, 10  # on an H200, with room to spare
    assert plan.protocol.wall_cap_s is not None
    assert plan.protocol.wall_cap_s * (1 + CONFIRMING_SHARE) + last_round_s + 2 * MOST_PROFILED * profile_s <= 600


def test_a_presets_engine_of_no_side_is_left_out_without_a_word() -> None:
    """Nobody asked for it by name; one that somebody did is refused."""
    request = replace(
        REQUEST, preset="smoke", engines=(), reference=None, models=("resnet18",), image_shape=(3, 64, 64)
    )
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})
    assert [engine.name for engine in document.engines] == [
        "flow-eager@base", "flow-eager@head", "flow-eager@canary", "torch-eager",
    ]  # fmt: skip
    assert document.not_measured == ()
    with pytest.raises(FlowbenchError, match="engine torch-channels-last has no base and head"):
        plan_comparison(
            replace(request, engines=("flow-eager", "torch-channels-last")), (), Side("a", None), Side("b", None), {}
        )


def test_sides_that_fail_while_they_are_confirmed_end_the_sitting_in_order(tmp_path: Path) -> None:
    def outcome(turn: Turn) -> float | None:
        return None if turn.pair >= 9 else 12.0 if side(turn) == "head" else 10.0

    document = sitting(tmp_path, outcome)
    (time,) = judge_document(document).times
    assert (time.verdict, time.reason) == (Verdict.FAILED, "head, pair 10: it broke")
    assert rounds_of(document, "toy-sided@base") == [*range(6), 8, 9]
    assert document.ending.how == "complete"


@pytest.mark.parametrize("lost", [("toy-sided@head", "flow-eager@head"), ("toy-sided@base", "flow-eager@head")])
def test_sampling_ends_where_no_engine_has_both_sides_any_more(tmp_path: Path, lost: tuple[str, str]) -> None:
    request = replace(REQUEST, engines=("toy-sided", "flow-eager"))
    document = sitting(tmp_path, lambda turn: None if turn.cell.engine in lost else noisy(turn), request)
    assert {sample.pair for sample in document.samples} == {0}
    assert document.comparison is not None
    assert list(document.comparison.stopped.values()) == ["a side failed or is void after 1 rounds"]


def test_an_engine_with_both_sides_keeps_its_case_open(tmp_path: Path) -> None:
    request = replace(REQUEST, engines=("toy-sided", "flow-eager"))
    document = sitting(tmp_path, lambda turn: None if turn.cell.engine == "toy-sided@head" else noisy(turn), request)
    assert rounds_of(document, "flow-eager@head") == list(range(8))
    assert rounds_of(document, "toy-sided@head") == [0]


def test_a_round_that_the_machine_sleeps_through_again_and_again_closes_its_case(tmp_path: Path) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {})
    path = store.create(tmp_path, document)
    sitting = MadeUp(path, document, lambda turn: 10.0, 1000, Listening())
    readings = iter(range(0, 1000, 60))
    sitting._clocks = lambda: Counters(0, 0, 0, 0, 0, next(readings))
    sitting.run()
    assert sitting.document.samples == ()
    assert sitting.measured == comparison_session._MOST_SLEEPS
    assert sitting.document.comparison is not None
    assert list(sitting.document.comparison.stopped.values()) == ["the machine slept through round 1 3 times"]
    assert [finding.kind for finding in sitting.document.findings] == ["sleep"] * 3
    (time,) = judge_document(sitting.document).times
    assert time.reason == "head was not measured: the machine slept through round 1 3 times"
    left_out = {one.reason for one in sitting.document.not_measured}
    assert left_out == {"the sitting ended before it: the machine slept through round 1 3 times"}


def test_the_cap_is_not_named_for_what_the_machine_slept_through(tmp_path: Path) -> None:
    request = replace(REQUEST, batch_sizes=(4, 2))
    document = plan_comparison(request, (), Side("a", None), Side("b", None), {})
    document = replace(document, protocol=replace(document.protocol, wall_cap_s=470.0))
    sitting = MadeUp(store.create(tmp_path, document), document, noisy, 8, Listening())
    readings = iter([0, 60, 120, 180, 240, 300])  # before and after each of the first three
    sitting._clocks = lambda: Counters(0, 0, 0, 0, 0, next(readings, 360))
    sitting.run()
    assert sitting.document.ending.reason == "the cap of 470 s was reached"
    slept, capped = judge_document(sitting.document).times
    assert slept.reason == "head was not measured: the machine slept through round 1 3 times"
    assert capped.pairs > 0
    assert "the machine slept" not in capped.reason


def test_what_disturbs_a_round_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {})
    memory = Memory(None, None, 2**20, 2**20)
    rank = RankSample(0, 1, "cpu", (), (10.0,) * 5, (1.0,) * 5, memory)
    result = GroupResult((rank,), None, ("a remark",), None, ("python a child",))
    monkeypatch.setattr(Round, "start", lambda _: None)
    monkeypatch.setattr(Round, "run", lambda *_, **__: [result] * len(document.cells))
    readings = iter([Counters(0, 0, 0, 0, 0), Counters(0.5, 500, 0, 0, 0), Counters(1, 1000, 0, 0, 0)])
    monkeypatch.setattr(session, "read_counters", lambda: next(readings))
    sides = dict.fromkeys(("base", "head", "canary"), Place())
    sitting = ComparisonSession(
        store.create(tmp_path, document), document, sides, Listening(), lambda: Counters(0, 0, 0, 0, 0)
    )
    waiting_s = iter([9, 30, 30 + 0.5 * document.machine.usable_cores])  # before, when all were ready, and in the end
    monkeypatch.setattr(sitting._ahead, "cpu_s", lambda: next(waiting_s))
    sitting._round(document.cases[0], 0)
    found = sitting.document.findings[len(document.findings) :]
    kinds = Counter(finding.kind for finding in found)
    assert kinds == {"other load": 2, "left behind": 1, "remark": len(document.cells)}
    cores = document.machine.usable_cores
    told = f"processes that wait for their round used {cores:.1f} of {cores} cores: something runs on after load()"
    assert told in {finding.message for finding in found}
