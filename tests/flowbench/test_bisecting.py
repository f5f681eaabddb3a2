"""`flowbench bisect` above git: one cell, one quantity that is followed, and one line for what cannot be searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.cell import Case
from flowbench.commands import bisecting, comparing
from flowbench.commands.bisecting import OneQuantity
from flowbench.commands.bisection import Judged, Step
from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import Canary, Change, Comparison, ComparisonSet, Overall, Quantity, SideName, Verdict
from flowbench.measure.places import PlaceError
from flowbench.measure.plan import Request
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.refs import SideError, held_folder
from flowbench.record import store
from flowbench.record.run import Git, RunDocument, Side

CASE = Case("resnet18", (2, 3, 64, 64), "float32", "eager", 1, False, True, True, 1)
TIME, PEAK = Quantity("step time"), Quantity("peak allocated", 0)


def one(quantity: Quantity, verdict: Verdict, ratio: float = 1.0, spread: float | None = None) -> Comparison:
    change = Change(ratio, spread and ratio / spread, spread and ratio * spread)
    return Comparison(CASE, "flow-eager", "label", quantity, verdict, "because", change=change)


def judge(what: bisecting.What, *answers: tuple[Comparison, ...], canary: str = "clear") -> list[Verdict]:
    """The verdicts of one search for sittings that came to `answers`."""
    waiting = iter(answers)
    side = SideName("x", None, False)
    empty = ComparisonSet(side, side, (), Overall(None, 0, 0), Canary(canary, ""), "")
    look = OneQuantity(lambda base, head: replace(empty, comparisons=next(waiting)), what)
    return [look("good", "commit").verdict for _ in answers]


def test_what_is_worst_at_bad_is_followed_and_nothing_else() -> None:
    bad = (one(TIME, Verdict.SLOWER, 1.05), one(PEAK, Verdict.LARGER, 1.5))
    assert judge("any", bad, (one(TIME, Verdict.SLOWER, 2.0), one(PEAK, Verdict.SAME)), bad) == [
        Verdict.LARGER, Verdict.SAME, Verdict.LARGER
    ]  # fmt: skip
    assert judge("time", bad, (one(TIME, Verdict.FASTER), one(PEAK, Verdict.LARGER))) == [
        Verdict.SLOWER, Verdict.FASTER
    ]  # fmt: skip
    assert judge("memory", bad, (one(TIME, Verdict.UNCLEAR), one(PEAK, Verdict.SAME))) == [
        Verdict.LARGER, Verdict.SAME
    ]  # fmt: skip


def test_what_was_not_judged_is_never_taken_for_good() -> None:
    assert judge("any", (one(TIME, Verdict.SAME), one(PEAK, Verdict.UNCLEAR))) == [Verdict.UNCLEAR]
    assert judge("any", ()) == [Verdict.FAILED]
    bad = (one(PEAK, Verdict.LARGER, 1.5),)
    assert judge("any", bad, (one(TIME, Verdict.FAILED),)) == [Verdict.LARGER, Verdict.FAILED]


def test_what_is_unclear_counts_where_it_is_far_from_half_of_the_change() -> None:
    bad = (one(TIME, Verdict.SLOWER, 1.44),)
    unclear = [(one(TIME, Verdict.UNCLEAR, ratio, 1.1),) for ratio in (1.0, 1.15, 1.4)]
    assert judge("any", bad, *unclear) == [Verdict.SLOWER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER]
    assert judge("any", bad, (one(TIME, Verdict.UNCLEAR),))[1] is Verdict.UNCLEAR
    assert judge("any", bad, *unclear, canary="flagged")[1:] == [Verdict.UNCLEAR] * 3
    assert judge("any", unclear[0]) == [Verdict.UNCLEAR]


def test_a_commit_that_does_not_import_is_no_end_of_the_search() -> None:
    def measure(base: str, head: str) -> ComparisonSet:
        raise SideError(broken, f"the framework of {broken!r} does not import")

    broken = "commit"
    look = OneQuantity(measure)("good", "commit")
    assert (look.verdict, look.words) == (Verdict.FAILED, "the framework of 'commit' does not import")
    broken = "good"  # nothing can be compared with it
    with pytest.raises(SideError, match="'good' does not import"):
        OneQuantity(measure)("good", "commit")


def test_a_stopped_search_goes_on_with_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No git: somebody may be editing this checkout while the tests run.
    monkeypatch.setattr("flowbench.measure.plan.fingerprint.read_git", lambda directory: None)
    request = Request(preset="smoke", reference="none", threads=1, pairs=6)
    sides = {name: Side(name * 40, Git(name * 40, None, False)) for name in "abcd"}

    def left(head: str, how: str, asked: Request = request) -> Path:
        document = plan_comparison(asked, (), sides["a"], sides[head], {})
        return store.create(tmp_path, replace(document, ending=replace(document.ending, how=how)))

    before = left("b", "complete")
    left("b", "complete", replace(request, pairs=7))  # of another search
    half = left("c", "running")
    (tmp_path / "half-written.json").write_text("{")
    (tmp_path / "foreign.json").write_text('{"schema": "another"}')
    measured: list[tuple[str, str, Path | None]] = []

    def measure(base: str, head: str, *_: object, resume: Path | None) -> tuple[Path, RunDocument]:
        measured.append((base[0], head[0], resume))
        return tmp_path, plan_comparison(request, (), sides[base[0]], sides[head[0]], {})

    monkeypatch.setattr(comparing, "measured", measure)
    look = bisecting.Sittings(request, tmp_path, (), resume=True)
    assert look("a" * 40, "b" * 40).head.asked == "b" * 40
    assert (measured, look.kept) == ([], {"b" * 40: before})
    for head in "bcd":
        look("a" * 40, head * 40)
    assert look.kept == dict.fromkeys(("b" * 40, "c" * 40, "d" * 40), tmp_path)
    assert measured == [("a", "b", None), ("a", "c", half), ("a", "d", None)]
    bisecting.Sittings(request, tmp_path, (), resume=False)("a" * 40, "b" * 40)
    assert measured[3:] == [("a", "b", None)]


def test_a_search_that_finds_no_room_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> None:
        with held_folder():
            pass

    (tmp_path / "cache").touch()  # in a file nothing can be placed
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bisecting, "bisect", nowhere)
    request = Request(preset="smoke", reference="none", threads=1, models=("linear",), batch_sizes=(1,))
    said = (
        f"cannot write {tmp_path}/cache/.*; what was measured is in {tmp_path}: the same command with --resume goes on"
    )
    with pytest.raises(PlaceError, match=said):
        bisecting.search("a", "b", "linear", "any", request, tmp_path, (), resume=False)


def test_one_cell_is_asked_for(tmp_path: Path) -> None:
    request = Request(preset="smoke", reference="none", threads=1)
    with pytest.raises(FlowbenchError, match=r"--cell 'resnet' fits \d+ cells, expected one: resnet"):
        bisecting.search("a", "b", "resnet", "any", request, tmp_path, (), resume=False)
    with pytest.raises(FlowbenchError, match="--cell 'nothing' fits 0 cells, expected one: "):
        bisecting.search("a", "b", "nothing", "any", request, tmp_path, (), resume=False)
    with pytest.raises(FlowbenchError, match="do not differ in torch-eager: give an --engine that imports framework"):
        bisecting.search(
            "a", "b", "resnet", "any", replace(request, engines=("torch-eager",)), tmp_path, (), resume=False
        )


def test_each_try_that_was_measured_again_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    tries = (
        Judged(Verdict.UNCLEAR, "step time unclear (+4.0 %): too wide"),
        Judged(Verdict.SLOWER, "step time slower"),
    )
    bisecting._told(Step("a" * 40, "A change", "bad", tries))
    assert capsys.readouterr().err.splitlines() == [
        "aaaaaaaaaa try 1, measured again: step time unclear (+4.0 %): too wide",
        "aaaaaaaaaa A change: worse after 2 tries: step time slower",
    ]
