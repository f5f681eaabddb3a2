"""`flowbench compare` with real processes: two commits of a small framework of the tests' own, in one sitting."""

from __future__ import annotations

import dataclasses
import errno
import json
import lzma
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowbench import cli
from flowbench.cell import Case, Cell
from flowbench.commands import comparing, false_alarms, planning, running
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.judge.verdict import Verdict
from flowbench.measure.comparison_session import ComparisonSession, Place, cores_of
from flowbench.measure.disturbance import Counters, disturbances, slept_s
from flowbench.measure.plan import Request
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.processes import child_environment, marked
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.schedule import Turn
from flowbench.record import aa, store
from flowbench.record.document import read_document
from flowbench.record.noise import NoiseFloor
from flowbench.record.run import Ending, RunDocument, Side
from flowbench.record.sample import Memory, RankSample, Sample

pytestmark = pytest.mark.usefixtures("toys")

NOTHING = Request()
REQUEST = Request(
    engines=("toy-sided",), reference="toy", models=("linear",), image_shape=(3, 4, 4), batch_sizes=(2,), steps=3, warmup=1,
    pairs=6, threads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def repository_of_a_framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    where = tmp_path / "repository"
    (where / "framework").mkdir(parents=True)
    subprocess.run(["git", "init", "-q"], cwd=where, check=True)
    for tag, text in {
        "quick": "STEP_MS, GRADIENT = 20, 1",
        "slow": "STEP_MS, GRADIENT = 60, 1",
        "wrong": "STEP_MS, GRADIENT = 20, 0.9",
        "raises": "STEP_MS, GRADIENT, RAISES = 20, 1, 'head will not'",
    }.items():
        (where / "framework/__init__.py").write_text(text)
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        for command in (["add", "-A"], [*identity, "commit", "-qm", tag], ["tag", tag]):
            subprocess.run(["git", *command], cwd=where, check=True)
    for module in (comparing, false_alarms, planning):
        monkeypatch.setattr(module, "REPOSITORY", where)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return where


def compare(tmp_path: Path, base: str, head: str | None, **options: object) -> tuple[int, str, RunDocument]:
    status, text = comparing.compare(base, head, REQUEST, tmp_path / "out", ("flowbench", "compare"), **options)
    (path,) = (tmp_path / "out").glob("*.json")
    document = read_document(path)
    assert not marked(document.run_id)
    assert not list((tmp_path / "cache").rglob("framework"))
    return status, text, document


def test_two_commits_in_one_sitting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, text, document = compare(tmp_path, "quick", "slow")
    comparison = comparing.judged(document)
    (time,) = comparison.times
    assert (status, time.verdict, time.confirmed) == (1, Verdict.SLOWER, True)
    assert "slower" in text
    assert "profiling 1 cell on both sides: what changed in what is slower or larger" in capfd.readouterr().err
    assert time.base == pytest.approx(20, rel=1e-3)
    assert time.change is not None
    assert time.change.ratio == pytest.approx(3, rel=1e-3)
    assert comparison.canary.state == "clear"
    assert document.comparison is not None
    commits = [side.git and side.git.commit for side in (document.comparison.base, document.comparison.head)]
    assert len(set(commits)) == 2
    assert [document.comparison.base.asked, document.comparison.head.asked] == ["quick", "slow"]
    rounds = {
        side: sorted(
            sample.pair
            for sample in document.samples
            if document.engine(document.by_key[sample.cell].engine).side == side
        )
        for side in ("base", "head", "canary", None)
    }
    assert rounds["base"] == rounds["head"] == list(range(12))
    assert rounds["canary"] == list(range(6))
    assert rounds[None] == [0, 1, 2]  # the reference
    assert document.ending.how == "complete"
    (path,) = (tmp_path / "out").glob("*.json")
    again, text = comparing.compare(str(path), None, Request(), None, ())
    assert (again, "slower" in text) == (1, True)
    status, text = comparing.compare(str(path), str(path), Request(), None, ())
    assert status in (0, 2)  # same, or too few pairs with the reference to tell
    assert "slower" not in text


def test_a_dry_run_says_what_would_be_measured_and_measures_nothing(
    repository_of_a_framework: Path, tmp_path: Path
) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "quick", "slow"], cwd=repository_of_a_framework, capture_output=True, text=True, check=True
    ).stdout.split()
    asked = dataclasses.replace(REQUEST, batch_sizes=(4, 2), pairs=8)
    sides, protocol, *cells, canary, last = planning.dry_run("quick", "slow", asked, ()).splitlines()
    assert sides == f"quick ({commit[0][:10]}) -> slow ({commit[1][:10]})"
    assert protocol == (
        "6 to 8 pairs, and 6 to confirm what looks changed, x (1 warm-up + 3 timed) steps, 1 thread, reference: toy"
    )
    assert [cell.partition(":")[0] for cell in cells[:2]] == [
        f"  linear [{size}, 3, 4, 4] toy-sided" for size in (4, 2)
    ]
    assert cells[0].endswith(": margin 1 %")
    assert cells[2].startswith("  margin of 2 cells: the least one; flowbench aa has not measured")
    assert canary == "  linear [2, 3, 4, 4] toy-sided: base once more, against itself"
    assert re.fullmatch(
        r"2 cells in one sitting, about .* at most on a quiet machine, then profiles of 2 cells at most", last
    )
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob("framework"))


def test_a_dry_run_knows_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "estimate_s", lambda cell, steps: 1000.0)
    last = planning.dry_run("quick", "slow", dataclasses.replace(REQUEST, pairs=None), ()).splitlines()[-1]
    assert (
        last == "1 cell in one sitting, 6 min 40 s at most, 1 min 40 s more to confirm, then profiles of 1 cell at most"
    )


def test_a_dry_run_of_a_stopped_comparison_counts_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stopped(tmp_path, monkeypatch, "slow")
    whole = planning.dry_run("quick", "slow", REQUEST, ())
    monkeypatch.setattr(planning, "estimate_s", lambda cell, steps: 60.0)
    # 12 rounds have base and head, 6 of them the canary, 3 the reference: two whole ones are there.
    left = planning.dry_run(None, None, NOTHING, (), resume=path)
    assert whole.splitlines()[0] == left.splitlines()[0]
    assert "about 25 min" in left.splitlines()[-1]


def test_what_cannot_be_planned_is_one_line(tmp_path: Path) -> None:
    document = tmp_path / "some.json"
    document.write_text("{}")
    limits = tmp_path / "limits.toml"
    limits.write_text('[[limit]]\ncell = "flow-eager/*"\nmax_step_ms = 1')
    for base, limit, said in (
        ("nowhere", None, "unknown ref 'nowhere'"),
        (None, None, "no BASE was given"),
        (str(document), None, "is a file: of documents nothing is measured"),
        ("quick", limits, "'flow-eager/*' matches no cell"),
    ):
        with pytest.raises(FlowbenchError, match=re.escape(said)):
            planning.dry_run(base, "slow", REQUEST, (), limits=limit)


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str | None, rounds: int = 2) -> Path:
    """A comparison of quick with `head` that the user stopped in the middle of a round, after `rounds` others."""

    class Impatient(comparing.ProgressDisplay):
        def turn(self, turn: Turn, number: int, turns: int, left_s: float) -> None:
            self.number = number

        def step(self, step: int) -> None:
            if self.number > rounds:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(comparing, "ProgressDisplay", Impatient)
        with pytest.raises(Interrupted, match=r"flowbench compare --resume .*json goes on"):
            comparing.compare("quick", head, REQUEST, tmp_path / "out", ())
    (path,) = (tmp_path / "out").glob("*.json")
    return path


def test_a_stopped_comparison_goes_on_with_its_whole_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stopped(tmp_path, monkeypatch, "slow", rounds=1)
    before = read_document(path)
    assert (before.ending.how, {sample.pair for sample in before.samples}) == ("interrupted", {0})

    def in_round(pair: int, *sides: str | None) -> tuple[Sample, ...]:
        wanted = [s for s in before.samples if before.engine(before.by_key[s.cell].engine).side in sides]
        return tuple(dataclasses.replace(sample, pair=pair) for sample in wanted)

    # Killed instead, when all rounds but the last were there, one of them without its other side.
    there = [*in_round(0, "base", "head", "canary", None), *in_round(1, "base", "head", "canary", None)]
    there += [sample for pair in (2, 3, 4) for sample in in_round(pair, "base", "head", "canary")]
    there += [sample for pair in range(6, 11) for sample in in_round(pair, "base", "head")]
    running = dataclasses.replace(before.ending, how="running")
    closed = dataclasses.replace(before.comparison, stopped={before.cases[0].key: "all 6 pairs were measured"})
    samples = (*there, *in_round(5, "base"))
    store.replace(path, dataclasses.replace(before, samples=samples, ending=running, comparison=closed))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    status, text = comparing.compare(None, None, Request(), tmp_path / "out", (), resume=link)
    assert link.is_symlink()
    assert not link.with_suffix(".html").exists()  # the reports lie beside the document
    after = read_document(path)
    assert after.samples[: len(there)] == tuple(there)
    new = Counter((s.pair, after.engine(after.by_key[s.cell].engine).side) for s in after.samples[len(there) :])
    assert new == Counter([(5, "base"), (5, "head"), (5, "canary"), (11, "base"), (11, "head")])
    (note,) = [finding.message for finding in after.findings if finding.kind == "resumed"]
    assert note.startswith("10 rounds were measured until 2")
    assert note in comparing.judged(after).stopping
    assert (status, after.ending.how) == (comparing.judged(after).exit_code, "complete")
    assert "after a pause" in text
    assert [path] == [*(tmp_path / "out").glob("*.json")]
    with pytest.raises(FlowbenchError, match=r"is complete, and its verdicts stand: flowbench compare .* shows them"):
        comparing.compare(None, None, Request(), tmp_path / "out", (), resume=path)


def test_a_stopped_comparison_goes_on_only_with_the_same_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository_of_a_framework: Path
) -> None:
    path = stopped(tmp_path, monkeypatch, None, rounds=0)
    whole = read_document(path)
    plain = dataclasses.replace(whole, comparison=None)
    capped = dataclasses.replace(whole, ending=Ending("wall_cap", None, "the cap of 9 s was reached"))
    store.replace(tmp_path / "plain.json", plain)
    store.replace(tmp_path / "capped.json", capped)

    def refusal(base: str | None = None, head: str | None = None, request: Request = NOTHING, doc: Path = path) -> str:
        with pytest.raises(FlowbenchError) as error:
            comparing.compare(base, head, request, tmp_path / "out", (), resume=doc)
        assert "\n" not in str(error.value)
        return str(error.value)

    with pytest.raises(FlowbenchError, match=r"is gone on with where it lies: leave --out .*elsewhere out"):
        comparing.compare(None, None, Request(), tmp_path / "elsewhere", (), resume=path)
    with pytest.raises(FlowbenchError, match=r"without writing anything: leave --out .*elsewhere out"):
        comparing.compare(str(path), None, Request(), tmp_path / "elsewhere", ())
    link = tmp_path / "link.json"
    link.symlink_to(path)
    with store.held(path), pytest.raises(FlowbenchError, match="another process is writing this run"):
        comparing.compare(None, None, Request(), None, (), resume=link)
    assert "go on with flowbench run --resume" in refusal(doc=tmp_path / "plain.json")
    for request in (NOTHING, Request(wall_cap_s=900.0)):  # more time makes no verdict open again
        said = refusal(request=request, doc=tmp_path / "capped.json")
        assert "has ended (the cap of 9 s was reached), and its verdicts stand" in said
    assert "compares 'quick' with 'working tree', asked for 'quick' with 'slow'" in refusal("quick", "slow")
    assert "steps 3, asked for 4;" in refusal("quick", None, dataclasses.replace(REQUEST, steps=4))
    assert "pairs 6, asked for 7;" in refusal(request=Request(pairs=7))
    (repository_of_a_framework / "framework/__init__.py").write_text("SLEEP_S, GRADIENT = 0.0, 1")
    assert "the uncommitted changes of the working tree are others" in refusal()
    subprocess.run(["git", "tag", "-f", "quick", "slow"], cwd=repository_of_a_framework, check=True)
    assert re.search("quick was [0-9a-f]{10} and is now [0-9a-f]{10}", refusal())
    with pytest.raises(FlowbenchError, match=r"go on with flowbench compare --resume"):
        running.run(Request(), path, tmp_path, ())
    with pytest.raises(FlowbenchError, match="no BASE was given"):
        comparing.compare(None, None, Request(), tmp_path, ())
    assert read_document(path) == whole


def test_no_report_takes_the_place_of_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stopped(tmp_path, monkeypatch, "quick", rounds=0)
    limits, link = path.with_suffix(".txt"), tmp_path / "limits"
    limits.write_text("")
    link.symlink_to(limits)
    for given in (limits, link):
        with pytest.raises(FlowbenchError, match=f"^{given} has the limits, and a report of .* would take its place"):
            comparing.compare(None, None, Request(), None, (), resume=path, limits=given)
    assert limits.read_text() == ""


def test_the_wall_cap_counts_what_was_measured_before_a_pause(tmp_path: Path) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {}, with_canary=False)
    cell = document.cells[0]
    failed = Sample(cell.key, 0, 0, "2026-11-29T10:00:00Z", 40.0, "failed", "it is", None, ())
    document = dataclasses.replace(
        document, samples=(failed,), protocol=dataclasses.replace(document.protocol, wall_cap_s=39.0)
    )
    path = store.create(tmp_path, document)
    assert ComparisonSession(path, document, {}, ProgressDisplay(document)).over_wall_cap()
    assert not ComparisonSession(
        path, dataclasses.replace(document, samples=()), {}, ProgressDisplay(document)
    ).over_wall_cap()


@pytest.mark.parametrize(
    ("head", "verdict", "said"), [("raises", Verdict.FAILED, "head will not"), ("wrong", Verdict.VOID, "loss")]
)
def test_a_side_that_fails_or_trains_wrongly_is_tried_once(
    tmp_path: Path, head: str, verdict: Verdict, said: str
) -> None:
    status, text, document = compare(tmp_path, "quick", head)
    (time,) = comparing.judged(document).times
    assert (status, time.verdict) == (2, verdict)
    assert said in time.reason
    assert said in text
    assert f"{verdict}: linear" in text
    assert "sampling: a side failed or is void" in text
    assert {sample.pair for sample in document.samples} == {0}
    assert "a side failed or is void" in comparing.judged(document).stopping


def test_what_cannot_be_compared_is_one_line(tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text('[[limit]]\ncell = "*"\nmax_speed = 1')
    nowhere = tmp_path / "nowhere.toml"
    nowhere.write_text('[[limit]]\ncell = "flow-eager/resnet999/*"\nmax_step_ms = 1')
    (tmp_path / "half.json").write_text("{")
    other = json.dumps({"schema": "another", "schema_version": 1})
    (tmp_path / "other.json").write_text(other)
    cases = [
        (("nowhere", None, REQUEST), {}, "unknown ref 'nowhere'"),
        (("quick", None, dataclasses.replace(REQUEST, pairs=3)), {}, "expected at least 6"),
        (("quick", None, dataclasses.replace(REQUEST, engines=("toy",))), {}, "has no base and head"),
        (("quick", None, REQUEST), {"limits": limits}, "unknown key 'max_speed'"),
        (
            ("quick", None, REQUEST),
            {"limits": nowhere},
            "'flow-eager/resnet999/*' matches no cell; cells here are: toy-sided/",
        ),
        (("quick", None, REQUEST), {"limits": tmp_path / "none.toml"}, "No such file"),
        ((str(tmp_path / "half.json"), str(tmp_path / "other.json"), Request()), {}, "half.json"),
        ((str(tmp_path / "other.json"), None, Request()), {}, "this is another tool's file"),
        ((str(tmp_path / "other.json"), "quick", Request()), {}, "give two run documents, or two git refs"),
        ((str(tmp_path / "other.json"), None, REQUEST), {}, "compared as they are"),
    ]
    for (base, head, request), options, said in cases:
        out = None if base.endswith(".json") else tmp_path / "out"
        with pytest.raises(FlowbenchError) as error:
            comparing.compare(base, head, request, out, (), **options)
        assert said in str(error.value)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("out/*.json"))


def test_the_exit_code_of_what_is_unclear_can_be_chosen(tmp_path: Path) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {})

    def sample(cell: Cell, pair: int, time_ms: float) -> Sample:
        ranks = (RankSample(0, 1, "cpu", (), (time_ms,) * 3, (1.0,) * 4, Memory(None, None, 2**20, 2**20)),)
        return Sample(cell.key, pair, 0, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, ranks)

    def status(name: str, *head_ms: float, **options: object) -> int:
        samples = tuple(
            sample(cell, pair, time_ms if cell.engine.endswith("@head") else 10.0)
            for cell in document.cells
            for pair, time_ms in enumerate(head_ms)
        )
        path = store.create(tmp_path, dataclasses.replace(document, run_id=name, samples=samples))
        return comparing.compare(str(path), None, NOTHING, None, (), **options)[0]

    limits = tmp_path / "limits.toml"
    limits.write_text('[[limit]]\ncell = "*"\nmax_step_ms = 1000\nexit_code = 75')
    assert status("by default", *(10.0, 12.0) * 3) == 2
    assert status("chosen", *(10.0, 12.0) * 3, unclear_exit_code=75) == 75
    assert status("slower", *(12.0,) * 12, unclear_exit_code=75) == 1
    assert status("same", *(10.0,) * 6, unclear_exit_code=75) == 0
    assert status("not measured", unclear_exit_code=75) == 2
    with pytest.raises(FlowbenchError, match=r"a limit of .*limits.toml has it too: give another one"):
        status("with a limit", 10.0, limits=limits, unclear_exit_code=75)


def test_a_round_that_the_machine_slept_through_is_measured_anew(tmp_path: Path) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {}, with_canary=False)
    readings = iter(
        [
            Counters(0, 0, 0, 0, 0, 0),
            Counters(1, 0, 0, 0, 0, 100),
            Counters(1, 0, 0, 0, 0, 100),
            Counters(2, 0, 0, 0, 0, 101),
        ]
    )
    path = store.create(tmp_path / "out", document)
    session = ComparisonSession(
        path, document, dict.fromkeys(("base", "head"), Place()), ProgressDisplay(document), lambda: next(readings)
    )
    session._round(document.cases[0], 0)  # the repository's own framework serves: the toy fails in it, twice
    assert len(session.document.samples) == len(document.cells)
    (slept,) = [finding for finding in session.document.findings if finding.kind == "sleep"]
    assert slept.message == "the machine slept for 99 s in round 1, which was measured anew"


def test_clocks_that_part() -> None:
    before = Counters(10, 0, 0, 0, 0, 10, 1000)
    assert list(disturbances(before, Counters(20, 0, 0, 0, 0, 20, 1010), 2)) == []
    asleep = Counters(20, 0, 0, 0, 0, 80, 1070)
    assert slept_s(before, asleep) == 60
    assert list(disturbances(before, asleep, 2)) == [("sleep", "the machine slept for 60 s")]
    ((kind, message),) = disturbances(before, Counters(20, 0, 0, 0, 0, 20, 410), 2)
    assert (kind, "set by -600 s" in message) == ("clock", True)


def test_all_sides_of_a_round_share_its_cores() -> None:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 1, False, True, True, 2)
    assert [cores_of(case, pair, [0, 1, 2, 3, 4]) for pair in range(4)] == [(0, 1), (2, 3), (0, 4), (1, 2)]
    assert cores_of(case, 0, [0, 1]) == ()
    on_gpus = dataclasses.replace(case, device="cuda", world_size=2, ddp=True, threads=16)
    assert [cores_of(on_gpus, pair, [4, 5, 6]) for pair in range(3)] == [(4, 5), (4, 6), (5, 6)]
    assert cores_of(on_gpus, 0, [4, 5]) == ()


def test_aa_goes_on_where_it_was_killed_and_leaves_a_noise_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from flowbench.judge.false_alarms import noise_floor, sitting_shift
    from flowbench.record.machine import read_machine
    from flowbench.record.noise import noise_path, read_floors

    out = tmp_path / "aa.jsonl"
    request = dataclasses.replace(REQUEST, reference=None)
    subprocess.run(["git", "checkout", "-q", "quick"], cwd=false_alarms.REPOSITORY, check=True)
    text = false_alarms.aa(request, 1, (0.5,), False, out, ())
    assert "false alarms: 0 of 1" in text
    assert "noise floor: too few sittings for a noise floor" in text
    assert "sitting 1 of 1: linear [2, 3, 4, 4], pair 1 of 6 (and up to 6 to confirm), " in capsys.readouterr().err
    assert "+50 % injected: found in 1 of 1" in text
    whole = out.read_text()
    setting, (sitting,) = aa.read(out)
    assert {pair.side for pair in sitting.pairs} == {"base", "head", "head+50%"}
    out.write_text(whole + whole.splitlines()[1][:1000])  # killed while it wrote the second one
    assert aa.begin(out, setting) == 1
    assert out.read_text() == whole
    assert "false alarms: 0 of 1" in false_alarms.aa(request, 1, (0.5,), False, out, ())
    assert read_floors(read_machine()) == {}
    head, line = whole.splitlines()
    loaded = tmp_path / "loaded.jsonl"
    loaded.write_text("\n".join([head.replace('"load":false', '"load":true'), *[line] * 10]) + "\n")
    assert "with a competing load of its own" in false_alarms.aa(request, 10, (0.5,), True, loaded, ())
    assert read_floors(read_machine()) == {}, "a load of our own is no noise of the machine"
    out.write_text("\n".join([head, *[line] * 10]) + "\n")
    text = false_alarms.aa(request, 10, (0.5,), False, out, ())
    assert "(95 % of the sittings showed less)" in text
    assert "for the margin within a sitting, 1 % here" in text, "the same sitting ten times, and no change"
    (floor,) = read_floors(read_machine()).values()
    assert (floor.sittings, floor.alarms, floor.cell) == (10, 0, f"toy-sided/{setting.case.key}")
    unchanged = [false_alarms.evidence(setting, sitting, "head")] * 10
    assert (floor.floor, floor.shift) == (noise_floor(unchanged), sitting_shift(unchanged))
    earlier = json.loads(noise_path().read_text())
    del earlier["machines"][0]["floors"][0]["shift"]  # as an earlier version kept it
    noise_path().write_text(json.dumps(earlier))
    assert read_floors(read_machine()) == {floor.cell: dataclasses.replace(floor, shift=None)}
    out.write_text(whole)
    with pytest.raises(FlowbenchError, match="another setting \\(slowdowns differ\\)"):
        false_alarms.aa(request, 2, (0.4,), False, out, ())
    for broken in ("{", "[" * 100_000):
        noise_path().write_text(broken)
        with pytest.raises(FlowbenchError, match="it keeps noise floors: delete it"):
            false_alarms.aa(request, 2, (0.5,), False, out, ())
    assert out.read_text() == whole, "that is said before a sitting is measured"


def test_noise_that_cannot_be_kept_says_where_else_and_that_the_sittings_are(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, made = tmp_path / "aa.jsonl", store.tempfile.mkstemp
    content = lzma.decompress((repository / "reports" / "aa-2-cores" / "unchanged.jsonl.xz").read_bytes())
    out.write_bytes(b"\n".join(content.splitlines()[:11]) + b"\n")

    def refusal() -> str:
        with pytest.raises(FlowbenchError) as refused:
            false_alarms._keep(out)
        return str(refused.value)

    def full(**how: object) -> tuple[int, str]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    noise = tmp_path / "state" / "flowbench" / "noise.json"
    again = f"give the same command again: it goes on with the 10 sittings in {out}"
    monkeypatch.setattr(store.tempfile, "mkstemp", full)
    assert refusal() == (
        f"cannot write {noise}: No space left on device; free some space or set XDG_STATE_HOME to another folder, and {again}"
    )
    noise.parent.rmdir()
    noise.parent.write_text("")
    assert refusal() == f"cannot write {noise}: File exists; set XDG_STATE_HOME to another folder, and {again}"
    monkeypatch.setattr(store.tempfile, "mkstemp", made)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    false_alarms._keep(out)
    assert (tmp_path / "elsewhere" / "flowbench" / "noise.json").is_file()


def test_sittings_are_not_kept_where_noise_floors_are(tmp_path: Path) -> None:
    out = tmp_path / "state" / "x" / ".." / "flowbench" / "noise.json"
    with pytest.raises(
        FlowbenchError, match=r"noise\.json is where noise floors are kept: choose another file with --out"
    ):
        false_alarms.aa(REQUEST, 1, (), False, out, ())
    assert not (tmp_path / "state").exists()


def test_a_sitting_of_too_few_pairs_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = plan_comparison(REQUEST, (), Side("a", None), Side("b", None), {}, with_canary=False)
    memory = Memory(None, None, 2**20, 2**20)

    def cut_short(path: Path, document: RunDocument, places: object, watcher: object) -> RunDocument:
        ranks = (RankSample(0, 1, "cpu", (), (10.0,) * 3, (1.0,) * 4, memory),)
        samples = tuple(
            Sample(cell.key, pair, 0, "2026-11-29T10:00:00Z", 300.0, "ok", None, None, ranks)
            for cell in document.cells
            for pair in range(2)
        )
        stopped = {document.cases[0].key: "the cap of 470 s was reached after 2 of 20 rounds"}
        return dataclasses.replace(
            document, samples=samples, comparison=dataclasses.replace(document.comparison, stopped=stopped)
        )

    monkeypatch.setattr(false_alarms, "run_comparison", cut_short)
    with pytest.raises(
        FlowbenchError, match=r"came to 2 pairs, expected at least 6 \(the cap of 470 s .*: give --pairs"
    ):
        false_alarms._sitting(document, {}, False, ProgressDisplay(document))


def test_the_load_does_not_outlive_one_that_is_killed(wait: Callable[..., None]) -> None:
    program = (
        "import subprocess, time; from flowbench.commands.false_alarms import load_command;"
        "print(subprocess.Popen(load_command()).pid, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=child_environment(), text=True
    )
    assert parent.stdout is not None
    load = psutil.Process(int(parent.stdout.readline()))
    assert load.is_running()
    parent.kill()
    parent.communicate()
    wait(lambda: not load.is_running() or load.status() == psutil.STATUS_ZOMBIE, "the end of the load")


def test_noise_of_few_sittings_is_none_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise_of(sittings: int, shift: float | None) -> tuple[dict[str, float], dict[str, float]]:
        floor = NoiseFloor("toy-sided/a", 1.3, sittings, 0, "2026-11-29T10:00:00Z", shift)
        monkeypatch.setattr(comparing, "read_floors", lambda machine: {"toy-sided/a": floor})
        plan = comparing._planned(REQUEST, (), Side("a", None), Side("b", None)).comparison
        assert plan is not None
        return plan.noise_floors, plan.sitting_shifts

    assert noise_of(9, 0.02) == ({}, {})
    assert noise_of(10, 0.02) == ({"toy-sided/a": 1.3}, {"toy-sided/a": 0.02})
    assert noise_of(10, 0.0) == ({"toy-sided/a": 1.3}, {"toy-sided/a": 0.0})
    assert noise_of(10, None) == ({"toy-sided/a": 1.3}, {}), "an earlier version measured it"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compare", "nowhere"], "unknown ref 'nowhere'"),
        (["compare", "none.json", "neither.json"], "unknown ref 'none.json', expected a branch, tag or commit of"),
        (["compare", "none.json", "neither.json"], "or a run document's file"),
        (["compare", "quick", "--pairs", "2", "--engine", "toy-sided", "--model", "linear"], "expected at least 6"),
        (["aa", "--slowdown", "0%"], "'0%' is no slowdown"),
        (["aa", "--slowdown", "x"], "'x' is no slowdown"),
        (["aa", "--engine", "toy-sided", "--model", "linear", "--batch-size", "1", "2"], "expected one cell"),
    ],
)
def test_the_command_line_says_it_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("full_from", "said"),
    [
        (".json", r"what was measured is in \S+\.json: flowbench compare --resume \S+\.json goes on"),
        (".md", r"all was measured: flowbench compare \S+\.json judges it"),
    ],
)
def test_a_disk_that_fills_up_leaves_the_way_on(
    full_from: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = Counter[str](), store.write_whole

    def until_full(path: Path, content: str | bytes) -> None:
        written[path.suffix] += 1
        if path.suffix == full_from and written[path.suffix] > (full_from == ".json"):  # the plan has room
            raise store.WriteError(f"cannot write {path}: No space left on device", "choose another folder with --out")
        write(path, content)

    monkeypatch.setattr(store, "write_whole", until_full)
    with pytest.raises(FlowbenchError, match=rf"^cannot write \S+: No space left on device; {said}$"):
        comparing.compare("quick", "quick", REQUEST, tmp_path / "out", ())
    (path,) = (tmp_path / "out").glob("*.json")
    assert read_document(path).ending.how == ("running" if full_from == ".json" else "complete")
    assert not marked(read_document(path).run_id)
    if full_from == ".json":
        written.clear()
        subprocess.run(["git", "checkout", "-q", "quick"], cwd=false_alarms.REPOSITORY, check=True)
        with pytest.raises(FlowbenchError, match="No space left on device; free some space there, or set TMPDIR"):
            false_alarms.aa(dataclasses.replace(REQUEST, reference=None), 1, (), False, tmp_path / "aa.jsonl", ())
