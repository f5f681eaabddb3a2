"""Sittings with real processes: what is measured, what goes wrong, and that nothing is left."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from flowbench.commands import running
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.processes import marked
from flowbench.measure.resumption import check_resumable, resumed_protocol, whole_rounds
from flowbench.measure.session import Session, Watcher, run_session
from flowbench.record import machine, store
from flowbench.record.document import read_document
from flowbench.record.machine import read_git
from flowbench.record.run import Finding, RunDocument
from flowbench.record.sample import Sample
from flowbench.report import render

ROOT = Path(__file__).resolve().parents[2]
_changes = machine._changes

pytestmark = pytest.mark.usefixtures("toys", "still_tree")


@pytest.fixture
def still_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may be editing this checkout while the tests run."""
    monkeypatch.setattr(machine, "_changes", lambda root: "digest" if root == ROOT else _changes(root))


class Silent(Watcher):
    def turn(self, turn, number, turns, left_s):
        self.left_s = left_s

    def step(self, step):
        pass

    def sample(self, sample):
        pass


def measure(tmp_path: Path, *engines: str, **changes: object) -> RunDocument:
    """A sitting of `engines` on the smallest model; the last one is the reference."""
    request = {
        "image_shape": (3, 4, 4),
        "batch_sizes": (2,),
        "steps": 3,
        "warmup": 1,
        "pairs": 2,
        "threads": 1,
    } | changes
    document = plan_run(Request(models=("linear",), engines=engines, reference=engines[-1], **request), ("test",))
    path = store.create(tmp_path, document)
    measured = run_session(path, document, Silent())
    assert read_document(path) == measured
    assert not marked(measured.run_id)
    assert list(tmp_path.glob(".*")) == [], "no lock is left"
    return measured


def test_steps_of_several_threads_that_are_held_up_are_told_once_a_cell_with_what_helps(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy-hiccups", threads=2)
    (told,) = [finding for finding in document.findings if finding.kind == "uneven steps"]
    assert told.cell == of(document, "toy-hiccups")[0].cell
    assert re.fullmatch(
        r"steps of one process took \d+ to \d{3} ms: GOMP_SPINCOUNT=1000 in the environment .*", told.message
    )
    alone = measure(tmp_path, "toy-hiccups", threads=1)
    assert not [finding for finding in alone.findings if finding.kind == "uneven steps"], "nobody waits for another"


def of(document: RunDocument, engine: str) -> list[Sample]:
    return [sample for sample in document.samples if document.by_key[sample.cell].engine == engine]


def test_each_engine_runs_in_mirrored_rounds_and_is_recorded_in_full(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy-talks", "toy", pairs=3, batch_sizes=(2, 1))
    order = [
        (document.by_key[s.cell].input_shape[0], document.by_key[s.cell].engine, s.pair, s.position)
        for s in document.samples
    ]
    assert order == [
        (size, engine, pair, position)
        for pair in range(3)
        for size in (2, 1)
        for position, engine in enumerate(("toy-talks", "toy") if pair % 2 == 0 else ("toy", "toy-talks"))
    ]
    for sample in document.samples:
        (rank,) = sample.ranks
        assert sample.status == "ok"
        assert sample.loss_difference == (None if document.by_key[sample.cell].engine == "toy" else 0)
        assert (len(rank.warmup_ms), len(rank.steps_ms), len(rank.losses)) == (1, 3, 4)
        assert rank.threads == 1
        assert rank.memory.resident_peak_bytes >= rank.memory.resident_before_bytes > 0
        assert rank.memory.allocated_peak_bytes is None
    assert document.ending.how == "complete"
    assert document.reference == "toy"
    assert {engine.version for engine in document.engines} == {document.versions["numpy"]}
    assert running.exit_status(document) == 0


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("toy-raises", "ValueError: the toy | broke on purpose (in phase steps, raised at odd_engines.py:"),
        ("toy-raises-in-build", "MemoryError: asked for 10 GiB (in phase build, raised at odd_engines.py:"),
        (
            "toy-exits",
            "ended with status 7 in phase steps, after step 1, without a result; its last words: the toy's last words",
        ),
        ("toy-segfaults", "died of SIGSEGV in phase steps, after step 1"),
        ("toy-killed", "died of SIGKILL in phase steps, after step 1"),
        ("toy-hangs", "hangs: no sign of progress for 8 s in phase steps, after step 1"),
        ("toy-threads", "RuntimeError: the engine uses 2 threads, the cell asks for 1 (in phase end)"),
    ],
)
def test_an_engine_that_goes_wrong_fails_its_cell_alone(engine: str, said: str, tmp_path: Path) -> None:
    document = measure(tmp_path, engine, "toy", timeout_s=8 if engine == "toy-hangs" else None)
    (failed,) = of(document, engine)  # tried once, not in every round
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.startswith(said)
    assert [sample.status for sample in of(document, "toy")] == ["ok", "ok"]
    assert document.ending.how == "complete"
    assert running.exit_status(document) == 2


@pytest.mark.parametrize(
    ("engine", "said"),
    [("toy-wrong", "they differ by"), ("toy-not-finite", "its loss at step 2 is not finite")],
)
def test_an_engine_that_trains_otherwise_is_void(engine: str, said: str, tmp_path: Path) -> None:
    document = measure(tmp_path, engine, "toy")
    (void,) = of(document, engine)
    assert void.status == "void"
    assert void.error is not None
    assert said in void.error
    assert void.ranks[0].steps_ms  # what it took is kept, to be looked at
    assert [sample.status for sample in of(document, "toy")] == ["ok", "ok"]
    assert running.exit_status(document) == 2


def test_ranks_that_drift_apart_are_void(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy-second-drifts", "toy-agrees", world_sizes=(2,), pairs=1)
    (sample,) = of(document, "toy-second-drifts")
    assert sample.status == "void"
    assert sample.error == "the ranks disagree: bias of rank 1 is not that of rank 0, bit for bit"
    assert len(sample.ranks) == 2
    assert of(document, "toy-agrees")[0].status == "ok"
    assert "the ranks disagree: bias of rank 1" in render(document, "console")


def test_a_process_that_an_engine_leaves_is_ended_and_named(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy-child", "toy", pairs=1)
    (finding,) = [finding for finding in document.findings if finding.kind == "left behind"]
    assert "time.sleep(1000)" in finding.message
    assert of(document, "toy-child")[0].status == "ok"


def test_the_memory_peak_is_that_of_the_timed_steps_and_children_count(tmp_path: Path) -> None:
    held = measure(tmp_path, "toy-holds", "toy", pairs=1)
    above = {engine: of(held, engine)[0].ranks[0].memory.resident_above_bytes for engine in ("toy-holds", "toy")}
    assert 290e6 < above["toy-holds"] - above["toy"] < 320e6
    # The peak lies in step 2: as a warm-up step it is not counted.
    warmed = measure(tmp_path, "toy-holds", "toy", pairs=1, warmup=3, steps=1)
    above = {engine: of(warmed, engine)[0].ranks[0].memory.resident_above_bytes for engine in ("toy-holds", "toy")}
    assert abs(above["toy-holds"] - above["toy"]) < 20e6
    child = measure(tmp_path, "toy-child", "toy", pairs=1)
    above = {engine: of(child, engine)[0].ranks[0].memory.resident_above_bytes for engine in ("toy-child", "toy")}
    assert above["toy-child"] - above["toy"] > 2e6


def test_without_its_reference_an_engine_runs_alone_and_the_document_says_so(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy", "toy-missing")
    assert document.reference is None
    assert [left_out.what for left_out in document.not_measured] == ["toy-missing"]
    assert "there is no reference" in document.not_measured[0].reason
    assert [(sample.status, sample.loss_difference) for sample in document.samples] == [("ok", None)] * 2


def test_what_an_engine_does_not_support_is_listed_with_its_reason(tmp_path: Path) -> None:
    request = Request(models=("linear", "resnet18"), engines=("toy",), reference="none", image_shape=(3, 64, 64))
    document = plan_run(request, ("test",))
    assert {cell.model for cell in document.cells} == {"linear"}
    assert {left_out.reason for left_out in document.not_measured} == {"the toy knows only the model linear"}


def test_the_wall_cap_ends_a_sitting_between_rounds(tmp_path: Path) -> None:
    document = measure(tmp_path, "toy", pairs=50, batch_sizes=(2, 1), wall_cap_s=1e-9)
    assert document.ending.how == "wall_cap"
    assert len(document.samples) == 0
    assert {left_out.reason for left_out in document.not_measured} == {
        "the sitting ended before it: the cap of 1e-09 s was reached"
    }
    assert running.exit_status(document) == 2


@pytest.mark.parametrize(
    ("pairs", "rounds", "status", "said"),
    [
        (3, 4, 0, "2 cells with 2 of 3 pairs"),
        (3, 3, 2, "1 cell with 1 of 3 pairs, 1 cell with 2 of 3 pairs"),
        (3, 1, 2, "1 of 2 cells not measured, 1 cell with 1 of 3 pairs"),
        (1, 1, 2, "1 of 2 cells not measured"),
        (2, 4, 0, None),
        (1, 2, 0, None),
    ],
)
def test_what_the_wall_cap_keeps_from_being_measured_is_told_with_the_way_out(
    pairs: int, rounds: int, status: int, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pairs of each cell are something to tell from, as in a comparison; one of several is not."""
    monkeypatch.setattr(Session, "over_wall_cap", lambda sitting: len(sitting.document.samples) >= rounds)
    request = Request(models=("linear",), engines=("toy",), reference="none", batch_sizes=(2, 1), image_shape=(3, 4, 4),
                      steps=1, warmup=0, pairs=pairs, threads=1, wall_cap_s=9)  # fmt: skip
    ended, text = running.run(request, None, tmp_path, ())
    (path,) = tmp_path.glob("*.json")
    assert len(read_document(path).samples) == rounds
    told = [line for line in text.splitlines() if line.startswith("incomplete, as the cap of 9 s was reached: ")]
    way_out = f"; go on with: flowbench run --resume {path}"
    assert told == ([f"incomplete, as the cap of 9 s was reached: {said}{way_out}"] if said else [])
    assert ended == status
    if said:
        monkeypatch.setattr(Session, "over_wall_cap", lambda sitting: False)
        assert running.run(Request(), path, None, ())[0] == 0
        assert read_document(path).ending.how == "complete"


def test_a_presets_wall_cap_holds_unless_pairs_are_asked_for() -> None:
    caps = {}
    for pairs in (None, 6):
        for cap in (None, 9.0):
            request = Request(
                "cpu", engines=("toy",), reference="none", models=("linear",), pairs=pairs, wall_cap_s=cap
            )
            caps[pairs, cap] = plan_run(request, ("test",)).protocol.wall_cap_s
    assert caps == {(None, None): 330, (None, 9.0): 9, (6, None): None, (6, 9.0): 9}


def test_resuming_measures_what_is_missing_in_whole_rounds(tmp_path: Path) -> None:
    whole = measure(tmp_path, "toy-talks", "toy", pairs=3)
    cells = [cell.key for cell in whole.cells]
    found = tuple(
        Finding("other load", f"{cell} in {pair}", cell, pair) for cell, pair in [(cells[0], 0), (cells[0], 1)]
    )
    notes = (Finding("threads", "too many", None, None),)
    cut = dataclasses.replace(
        whole,
        samples=whole.samples[:3],
        findings=(*notes, *found),
        ending=dataclasses.replace(whole.ending, how="running"),
    )
    resumed = whole_rounds(cut)
    assert resumed.samples == whole.samples[:2]
    assert resumed.findings[:-1] == (*notes, found[0]), "what was found in the round that is dropped goes with it"
    assert [finding.message for finding in resumed.findings if finding.kind == "resumed"] == [
        "1 samples of unfinished rounds were measured anew"
    ]
    path = tmp_path / "resumed.json"
    store.replace(path, resumed)
    again = run_session(path, resumed, Silent())
    assert again.samples[:2] == whole.samples[:2]
    assert Counter(sample.pair for sample in again.samples) == {0: 2, 1: 2, 2: 2}
    assert again.ending.how == "complete"


def test_an_interruption_says_what_is_left_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "write_reports", stop)
    request = Request(models=("linear",), engines=("toy",), reference="none", batch_sizes=(2,), image_shape=(3, 4, 4),
                      steps=1, warmup=0, pairs=1, threads=1)  # fmt: skip
    with pytest.raises(Interrupted, match=r"all was measured, see it with: flowbench report .*\.json$"):
        running.run(request, None, tmp_path, ())
    (path,) = tmp_path.glob("*.json")
    assert read_document(path).ending.how == "complete"


def test_an_ending_is_written_over_one_that_was_interrupted(tmp_path: Path) -> None:
    document = plan_run(Request(models=("linear",), engines=("toy",), reference="none", threads=1), ("test",))
    session = Session(store.create(tmp_path, document), document, Silent())
    session.finish("complete", None)
    session.finish("interrupted", "stopped by the user")
    assert [one.reason for one in session.document.not_measured] == [
        "the sitting ended before it: stopped by the user"
    ] * len(document.cells)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"machine": {"cpu_model": "another one"}}, "machine's cpu_model: another one / "),
        ({"machine": {"memory_bytes": 1}}, "machine's memory_bytes: 1 / "),
        ({"git": {"commit": "0" * 40}}, f"commit: {'0' * 40} / "),
        ({"git": {"changes": "another"}}, "the uncommitted changes of the working tree are others"),
        ({"versions": {"numpy": "0.1"}}, "version of numpy: 0.1 / "),
    ],
)
def test_resuming_elsewhere_is_refused_by_name(change: dict, named: str, tmp_path: Path) -> None:
    document = plan_run(Request(models=("linear",), engines=("toy",), reference="none"), ("test",))
    check_resumable(document, Request(), "run.json")
    for name, values in change.items():
        old = getattr(document, name)
        new = {**old, **values} if isinstance(old, dict) else dataclasses.replace(old, **values)
        document = dataclasses.replace(document, **{name: new})
    with pytest.raises(FlowbenchError, match="cannot be resumed here") as caught:
        check_resumable(document, Request(), "run.json")
    assert named in str(caught.value)


def test_resuming_with_other_settings_is_refused_by_name() -> None:
    document = plan_run(Request(models=("linear",), engines=("toy",), reference="none", steps=7), ("test",))
    check_resumable(document, Request(steps=7, engines=("toy",), broadcast_buffers=True), "run.json")
    for request, said in [
        (Request(steps=8), "steps 7, asked for 8"),
        (Request(warmup=0), "warmup 3, asked for 0"),
        (Request(engines=("toy-talks", "toy")), "engines toy, asked for toy, toy-talks"),
        (Request(reference="toy"), "reference none, asked for toy"),
        (Request(image_shape=(1, 2, 3)), "input shapes (3, 224, 224), asked for (1, 2, 3)"),
        (Request(broadcast_buffers=False), "buffers broadcast True, asked for False"),
        (Request(launcher_options=("--host=a",)), "launcher options (), asked for ('--host=a',)"),
        (Request(pairs=4), "pairs 3, asked for 4"),
        (Request(world_sizes=(2,)), "world sizes 1, asked for 2"),
        (Request(ddp=True), "ddp False, asked for True"),
    ]:
        with pytest.raises(FlowbenchError) as caught:
            check_resumable(document, request, "run.json")
        assert f": {said};" in str(caught.value)


def test_limits_may_change_when_resuming() -> None:
    document = plan_run(Request(models=("linear",), engines=("toy",), reference="none", wall_cap_s=1), ("test",))
    request = Request(wall_cap_s=60, timeout_s=5)
    check_resumable(document, request, "run.json")
    protocol = resumed_protocol(document, request)
    assert (protocol.wall_cap_s, protocol.timeout_s) == (60, 5)
    assert resumed_protocol(document, Request()) == document.protocol


def test_changes_of_the_working_tree_are_told_apart(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    def changes() -> str | None:
        found = read_git(tmp_path / "inner")
        assert found is not None
        assert found.dirty == (found.changes is not None)
        return found.changes

    (tmp_path / "inner").mkdir()
    assert read_git(tmp_path / "inner") is None
    git("init")
    (tmp_path / "inner" / "a").write_text("1")
    git("add", ".")
    git("commit", "-m", "a")
    seen = [changes()]
    (tmp_path / "inner" / "a").write_text("2")
    seen.append(changes())
    (tmp_path / "b").write_text("1")
    seen.append(changes())
    (tmp_path / "b").write_text("22")
    seen.append(changes())
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "run.json").write_text("{}")
    assert seen[0] is None
    assert len(set(seen)) == 4
    assert changes() == seen[-1]


def test_two_writers_of_one_document_are_kept_apart(tmp_path: Path) -> None:
    document = plan_run(Request(models=("linear",), engines=("toy",), reference="none"), ("test",))
    path = store.create(tmp_path, document)
    with store.held(path), pytest.raises(FlowbenchError, match="another process is writing this run"):
        run_session(path, document, Silent())


def test_what_another_process_has_measured_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(models=("linear",), engines=("toy",), reference="none", batch_sizes=(2,), image_shape=(3, 4, 4),
                      steps=1, warmup=0, pairs=2, threads=1)  # fmt: skip
    document = plan_run(request, ("test",))
    path = store.create(tmp_path, document)
    check = running.check_resumable

    def meanwhile(*arguments: object) -> None:
        check(*arguments)  # type: ignore[arg-type]
        run_session(path, document, Silent())

    monkeypatch.setattr(running, "check_resumable", meanwhile)
    with pytest.raises(FlowbenchError, match=r"another process has gone on with this run meanwhile: start again"):
        running.run(Request(), path, None, ())
    assert read_document(path).ending.how == "complete"
    assert len(read_document(path).samples) == 2
