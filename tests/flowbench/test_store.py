"""Where documents are kept: never overwritten, whole at any moment, and what is said where they cannot be written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run
from flowbench.record import store
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument


@pytest.fixture
def document(toys: Path) -> RunDocument:
    return plan_run(Request(models=("linear",), engines=("toy",), reference="none"), ("test",))


def test_a_document_is_never_overwritten(document: RunDocument, tmp_path: Path) -> None:
    path = store.create(tmp_path / "a" / "b", document)
    assert read_document(path) == document
    with pytest.raises(FlowbenchError, match="File exists"):
        store.create(tmp_path / "a" / "b", document)
    assert read_document(path) == document


def test_a_full_disk_leaves_the_document_as_it_was(
    document: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.create(tmp_path, document)

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store.os, "fsync", no_space)
    with pytest.raises(FlowbenchError, match=r"cannot write .*: No space left on device; free some space or .* --out"):
        store.replace(path, replace(document, preset="other"))
    assert read_document(path) == document
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FlowbenchError, match="No space left"):
        store.create(tmp_path / "new", document)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_sitting_that_cannot_write_ends_in_one_line(site: Path, repository: Path, tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))  # bytes a file may have: the first sample is too much

    process = subprocess.run(
        [sys.executable, "-m", "flowbench", "run", "--model", "linear", "--input-shape", "3x4x4", "--batch-size", "2",
         "--engine", "toy", "--reference", "none", "--steps", "40", "--pairs", "9", "--out", "out"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{repository}"}, preexec_fn=limit,
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert process.returncode == 2
    (path,) = (tmp_path / "out").iterdir()
    name = path.relative_to(tmp_path)
    assert process.stderr.splitlines()[-1] == (
        f"flowbench: cannot write {name}: File too large; what was measured is in {name}, go on with: flowbench run --resume {name}"
    )
    assert "Traceback" not in process.stderr
    assert read_document(path).ending.how == "running"


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/out"])
def test_a_folder_that_cannot_be_is_named(place: str, document: RunDocument) -> None:
    with pytest.raises(FlowbenchError, match=f"cannot write {place}.*; choose another folder with --out"):
        store.create(Path(place), document)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(document: RunDocument, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(FlowbenchError, match="Permission denied"):
        store.create(tmp_path, document)


def test_a_link_is_its_document_under_another_name(document: RunDocument, tmp_path: Path) -> None:
    path, link = store.create(tmp_path / "out", document), tmp_path / "alias.json"
    link.symlink_to(path)
    for one, other in ((path, link), (link, path)):
        with store.held(one), pytest.raises(FlowbenchError, match="another process is writing"), store.held(other):
            pass
    store.replace(link, replace(document, preset="another"))
    assert link.is_symlink()
    assert read_document(path).preset == "another"


def test_a_lock_that_its_holder_took_away_meanwhile_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, calls, flock = store.lock_path(tmp_path / "run.json"), [], fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            lock.unlink()  # as the last holder does, between our opening the file and our locking it
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(store.fcntl, "flock", late)
    with (
        store.held(tmp_path / "run.json"),
        pytest.raises(FlowbenchError, match="another process is writing"),
        store.held(tmp_path / "run.json"),
    ):
        pytest.fail("two hold one document")
    assert not lock.exists()


@pytest.mark.parametrize("name", ["k", "k.lock", ".lock", "k.jsonl", ".k.lock", "k.LOCK.json", "lock"])
def test_holding_a_file_touches_no_other_and_not_itself(name: str, tmp_path: Path) -> None:
    files = {tmp_path / one for one in (name, "k", "k.lock", "k.json.lock", ".k.lock", f".{name}.lock", "poetry.lock")}
    for path in files:
        path.write_text(path.name)
    with store.held(tmp_path / name), store.held(tmp_path / "other"), store.held(tmp_path / "poetry.jsonl"):
        assert {path for path in tmp_path.iterdir() if path.suffix != ".lock" or path in files} == files
        with pytest.raises(FlowbenchError, match="another process is writing"), store.held(tmp_path / name):
            pass
    assert {path: path.read_text() for path in tmp_path.iterdir()} == {path: path.name for path in files}


def test_a_lock_that_somebody_wrote_in_stays(tmp_path: Path) -> None:
    lock = store.lock_path(tmp_path / "k")
    lock.write_text("mine")
    with store.held(tmp_path / "k"):
        pass
    assert lock.read_text() == "mine"


@pytest.mark.parametrize("name", ["n" * 250 + ".json", "n" * 140, "ä" * 127, "n" * 100, "n" * 101])
def test_the_longest_names_are_held_and_written_too(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("old")
    with store.held(path):
        store.write_whole(path, "new")
        names = {one.name for one in tmp_path.iterdir()}
        with store.held(tmp_path / ("m" + name[1:])):
            pass
        with pytest.raises(FlowbenchError, match="another process is writing"), store.held(path):
            pass
    assert max(len(one.encode()) for one in names - {name}) < 140, "some file systems take no more"
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {name: "new"}


def test_a_place_that_knows_no_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store.fcntl, "flock", refused)
    with (
        pytest.raises(FlowbenchError, match=r"run\.json\S*\.lock: No locks available"),
        store.held(tmp_path / "run.json"),
    ):
        pytest.fail("held without a lock")


def test_who_is_patient_waits_for_another_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "noise.json", contextlib.ExitStack()
    other.enter_context(store.held(path))
    with pytest.raises(FlowbenchError, match="another process is writing"), store.held(path):
        pass
    monkeypatch.setattr(store.time, "sleep", lambda _: other.close())  # it ends while we wait
    with (
        store.held(path, patience_s=600),
        pytest.raises(FlowbenchError, match="another process is writing"),
        store.held(path),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
