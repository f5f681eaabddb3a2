"""The store of runs: immutable documents, an index that can be made anew, writers at once, foreign files, pruning."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flowbench import history
from flowbench.archive import folder
from flowbench.archive.folder import Archive
from flowbench.commands import storing
from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run
from flowbench.record import store as record_store
from flowbench.record.document import document_text
from flowbench.record.run import Ending, RunDocument, Side, SidesCompared

DONE = Ending("complete", "2026-11-29T13:01:00+00:00", None)


@pytest.fixture
def document(toys: Path) -> RunDocument:
    plan = plan_run(Request(models=("linear",), engines=("toy",), reference="none"), ("test",))
    return replace(plan, run_id="run-1", created="2026-11-29T13:00:00+00:00", ending=DONE)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path / "store")


def ids(archive: Archive) -> list[str]:
    return [entry.run_id for entry in archive.contents().entries]


def test_a_document_is_kept_as_it_is_and_never_changes(document: RunDocument, archive: Archive) -> None:
    assert archive.add(document)
    assert archive.document("run-1") == document
    assert not archive.add(document)
    with pytest.raises(FlowbenchError, match="is there with other content, and a stored document never changes"):
        archive.add(replace(document, preset="other"))
    assert archive.document("run-1") == document
    assert [path.name for path in archive.runs.iterdir()] == ["run-1.json"]


def test_what_may_still_change_and_ids_that_are_paths_are_refused(document: RunDocument, archive: Archive) -> None:
    unfinished, side = replace(document, ending=Ending("running", None, None)), Side("a", None)
    with pytest.raises(FlowbenchError, match=r"has no ending.*; finish it with flowbench run --resume, then add it$"):
        archive.add(unfinished)
    sides = SidesCompared(side, side, 0.01, 1, 1, {}, {})
    with pytest.raises(
        FlowbenchError, match=r"has no ending.*; finish it with flowbench compare --resume, then add it$"
    ):
        archive.add(replace(unfinished, comparison=sides))
    with pytest.raises(FlowbenchError, match="cannot be a file's name"):
        archive.add(replace(document, run_id="../../evil"))
    with pytest.raises(FlowbenchError, match=r"no run '\.\./store/index' is in"):
        archive.document("../store/index")


def test_the_index_is_made_from_the_documents_whatever_became_of_it(document: RunDocument, archive: Archive) -> None:
    archive.add(document)
    archive.add(replace(document, run_id="run-0", created="2026-11-29T14:30:00+02:00"))
    whole = archive.contents()
    assert ids(archive) == ["run-0", "run-1"]  # by their time, whatever zone it is told in
    index = archive.folder / "index.json"
    written = index.read_bytes()
    odd = written.replace(b'"run_id": "run-0"', b'"run_id": 7', 1), written.replace(b"2026-11-29T14", b"yesterday", 1)
    for broken in (b"", b"[", b"{}", written[:-9], *odd, None):
        index.unlink() if broken is None else index.write_bytes(broken)
        assert archive.contents() == whole
        assert index.read_bytes() == written
    (archive.runs / "run-0.json").unlink()
    assert ids(archive) == ["run-1"]


def test_reading_uses_the_index_and_reindex_does_not(document: RunDocument, archive: Archive) -> None:
    archive.add(document)
    archive.contents()
    index = archive.folder / "index.json"
    index.write_bytes(index.read_bytes().replace(b"2026-11-29T13:00", b"2001-11-29T13:00"))
    assert archive.contents().entries[0].created.startswith("2001")
    assert archive.contents(anew=True).entries[0].created.startswith("2026")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_where_nothing_can_be_written_a_store_is_read(
    number: int, document: RunDocument, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add(document)

    def read_only(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *mode)

    real = os.open
    monkeypatch.setattr(folder.os, "open", read_only)
    assert ids(archive) == ["run-1"]
    assert [path.name for path in archive.folder.iterdir()] == ["runs"]
    room = "free some space or " if number in (errno.ENOSPC, errno.EDQUOT) else ""
    said = rf"\.lock: {os.strerror(number)}; {room}take a store in a folder that can be written"
    with pytest.raises(FlowbenchError, match=said):
        storing.reindex(archive.folder)
    with pytest.raises(FlowbenchError, match=said):
        storing.prune(archive.folder, 0, (), dry_run=False)
    assert ids(archive) == ["run-1"]


@pytest.mark.parametrize("what", ["no lock", "no space", "a folder as lock", "a folder as index"])
def test_a_store_is_read_without_its_index_being_written(
    what: str, document: RunDocument, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add(document)
    index, other, made = archive.folder / "index.json", tmp_path / "added.json", tempfile.mkstemp
    other.write_text(document_text(replace(document, run_id="run-2")))

    def without_lock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def without_space(dir: Path, prefix: str) -> tuple[int, str]:
        if prefix == ".index.json.":  # the document that is added still has room
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return made(dir=dir, prefix=prefix)

    if what == "a folder as lock":
        (archive.folder / ".lock").mkdir()
    elif what == "a folder as index":
        index.mkdir()
    with monkeypatch.context() as patch:
        if what == "no lock":
            patch.setattr(folder.fcntl, "flock", without_lock)
        elif what == "no space":
            patch.setattr(record_store.tempfile, "mkstemp", without_space)
        assert ids(archive) == ["run-1"]
        assert history.show(archive.folder, None, None, "csv")[0].count("toy/linear/") == 3
        assert storing.add(archive.folder, [other]) == (f"1 run added to {archive.folder}", [])
        assert ids(archive) == ["run-1", "run-2"]
        assert not index.is_file()
        with pytest.raises(
            FlowbenchError, match=r"; (free some space or )?take a store in a folder that can be written$"
        ):
            storing.reindex(archive.folder)
    assert not list(archive.folder.glob(".index*"))


def test_foreign_and_half_written_files_are_named_and_left_alone(document: RunDocument, archive: Archive) -> None:
    archive.add(document)
    text = document_text(document)
    left = {
        "runs/run-2.json": "holds run 'run-1', expected the run its name says",
        "runs/half.json": "line ",
        "runs/.run-3.json.tmp": "half-written",
        "runs/notes.txt": "no document",
        "imported/odd.json": "not a file of imported points",
        "thing": "no part of a store",
    }
    (archive.folder / "imported").mkdir()
    for name in left:
        (archive.folder / name).write_text(text[:300] if "half" in name else text)
    (archive.runs / "link.json").symlink_to(archive.runs / "run-1.json")
    contents = archive.contents()
    assert [entry.run_id for entry in contents.entries] == ["run-1"]
    reasons = {str(stranger.path.relative_to(archive.folder)): stranger.reason for stranger in contents.strangers}
    assert set(reasons) == {*left, "runs/link.json"}
    assert all(reasons[name].startswith(reason) for name, reason in left.items()), reasons
    assert all((archive.folder / name).exists() for name in left)
    said = storing.reindex(archive.folder)
    assert said[0].startswith("1 run and 0 imported points")
    assert len(said[1]) == 7


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from flowbench.archive import folder
from flowbench.archive.folder import Archive
from flowbench.record.document import read_document
document, archive, who = read_document(sys.argv[1]), Archive(Path(sys.argv[2])), sys.argv[3]
print("ready", flush=True)
sys.stdin.readline()
for number in range(15):
    archive.add(replace(document, run_id=f"{who}-{number}"))
    archive.contents()
"""


def test_writers_at_once_lose_nothing(document: RunDocument, archive: Archive, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(document_text(document))
    command = [sys.executable, "-c", WRITER, str(path), str(archive.folder)]
    writers = [
        subprocess.Popen([*command, who], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for who in ("a", "b", "c")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
    for writer in writers:
        _, error = writer.communicate(b"go\n", timeout=300)
        assert writer.returncode == 0, error.decode()
    expected = {f"{who}-{number}" for who in "abc" for number in range(15)}
    index = json.loads((archive.folder / "index.json").read_text())
    assert {run["run_id"] for run in index["runs"]} == expected
    assert set(ids(archive)) == expected
    assert archive.contents().strangers == ()


def test_pruning_keeps_what_is_young_and_what_is_referred_to(
    document: RunDocument, archive: Archive, tmp_path: Path
) -> None:
    now = datetime.now(UTC)

    def add(run_id: str, days: float, **changes: object) -> None:
        created = (now - timedelta(days=days)).isoformat(timespec="seconds")
        archive.add(replace(document, run_id=run_id, created=created, **changes))

    add("old", 100)
    add("older", 100)
    add("named", 100, command=("compare", "base-of-named"))
    add("base-of-named", 200)
    add("base-of-young", 200)
    add("young", 1, command=("compare", "base-of-young"))
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "README.md").write_text("From run `named`, not from threshold or bold-22.")
    (reports / "out").mkdir()
    (reports / "out" / "old.md").write_text("run: old")  # its own report, where it was written
    said, _ = storing.prune(archive.folder, 30, [reports], dry_run=True)
    assert "would remove old\nwould remove older\n" in said
    assert len(ids(archive)) == 6
    said, _ = storing.prune(archive.folder, 30, [reports], dry_run=False)
    assert f"kept named: {reports / 'README.md'} refers to it" in said
    assert "kept base-of-named: " in said
    assert "kept base-of-young: " in said
    assert said.endswith("2 runs removed")
    assert set(ids(archive)) == {"named", "base-of-named", "base-of-young", "young"}
    assert archive.pruned() == {"old", "older"}
    with pytest.raises(FlowbenchError, match="name where reports lie with --referred-in"):
        storing.prune(archive.folder, 30, [tmp_path / "nowhere"], dry_run=False)


def test_nothing_is_pruned_where_a_text_cannot_be_read(
    document: RunDocument, archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add(replace(document, run_id="old", created="2020-01-01T00:00:00+00:00"))
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "README.md").write_text("old")

    def refuse(path: Path, **_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(FlowbenchError, match=r"README.md: Permission denied, and what it refers to has to stay"):
            storing.prune(archive.folder, 30, [tmp_path / "reports"], dry_run=False)
    assert ids(archive) == ["old"]
    (archive.folder / "pruned.txt").write_bytes(b"one\n\xff\n")
    assert "one" in archive.pruned()
