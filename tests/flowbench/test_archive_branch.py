"""The store on a git branch of its own: real repositories, pushes that race, what is on the branch and does not belong there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.archive import git_branch
from flowbench.archive.folder import Archive
from flowbench.commands import storing
from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run
from flowbench.record.document import document_text
from flowbench.record.run import Ending, RunDocument

PLACE = ("origin", "flowbench-runs")


@pytest.fixture
def document(toys: Path) -> RunDocument:
    plan = plan_run(Request(models=("linear",), engines=("toy",), reference="none"), ("test",))
    return replace(plan, run_id="run-1", ending=Ending("complete", "2026-11-29T13:01:00+00:00", None))


def git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", *who, "-C", directory, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def clones(tmp_path: Path) -> list[Path]:
    """Two clones of a bare repository that has one commit on main."""
    bare = tmp_path / "bare.git"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(bare))
    for name in ("one", "two"):
        git(tmp_path, "clone", "-q", str(bare), name)
        if name == "one":
            (tmp_path / "one" / "file").write_text("work in progress")
            git(tmp_path / "one", "checkout", "-q", "-b", "main")
            git(tmp_path / "one", "add", "file")
            git(tmp_path / "one", "commit", "-q", "-m", "first")
            git(tmp_path / "one", "push", "-q", "origin", "main")
    return [tmp_path / "one", tmp_path / "two"]


def names(clone: Path) -> set[str]:
    return set(git(clone.parent / "bare.git", "ls-tree", "-r", "--name-only", PLACE[1]).splitlines())


def test_push_makes_an_orphan_branch_and_touches_no_checkout(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    store = Archive(tmp_path / "store")
    store.add(document)
    (clones[0] / "file").write_text("changed")
    (clones[0] / "staged").write_text("staged")
    git(clones[0], "add", "staged")
    before = git(clones[0], "status", "--porcelain"), git(clones[0], "rev-parse", "HEAD")
    assert storing.push(store.folder, clones[0], *PLACE) == ("1 file pushed to flowbench-runs of origin", [])
    assert (git(clones[0], "status", "--porcelain"), git(clones[0], "rev-parse", "HEAD")) == before
    assert names(clones[0]) == {"runs/run-1.json"}
    assert git(tmp_path / "bare.git", "rev-list", "--count", PLACE[1]) == "1"
    assert storing.push(store.folder, clones[0], *PLACE)[0].startswith("0 files")
    other = tmp_path / "other"
    assert storing.pull(other, clones[1], *PLACE)[0].startswith("1 file pulled")
    assert (other / "runs/run-1.json").read_bytes() == (store.folder / "runs/run-1.json").read_bytes()
    assert storing.pull(other, clones[1], *PLACE)[0].startswith("0 files")


PUSHER = """
import sys
from pathlib import Path
from flowbench.commands import storing
print("ready", flush=True)
sys.stdin.readline()
print(storing.push(Path(sys.argv[1]), Path(sys.argv[2]), "origin", "flowbench-runs")[0])
"""


def test_two_clones_pushing_at_once_lose_nothing(document: RunDocument, clones: list[Path], tmp_path: Path) -> None:
    for round_number in range(3):
        pushers = []
        for who, clone in zip("ab", clones, strict=True):
            store = Archive(tmp_path / f"store-{who}")
            store.add(replace(document, run_id=f"{who}-{round_number}"))
            command = [sys.executable, "-c", PUSHER, str(store.folder), str(clone)]
            pushers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        for pusher in pushers:
            assert pusher.stdout is not None
            assert pusher.stdout.readline() == b"ready\n"
        for pusher in pushers:
            assert pusher.stdin is not None
            pusher.stdin.write(b"go\n")
            pusher.stdin.flush()
        for pusher in pushers:
            _, error = pusher.communicate(timeout=300)
            assert pusher.returncode == 0, error.decode()
    assert names(clones[0]) == {f"runs/{who}-{number}.json" for who in "ab" for number in range(3)}


def test_a_push_that_comes_second_begins_again(
    document: RunDocument, clones: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Archive(tmp_path / "store-a"), Archive(tmp_path / "store-b")
    one.add(replace(document, run_id="a"))
    two.add(replace(document, run_id="b"))
    commit = git_branch._Git.commit

    def overtaken(self: git_branch._Git, *arguments: object) -> str:
        made = commit(self, *arguments)
        if self._directory == clones[0]:
            storing.push(two.folder, clones[1], *PLACE)
        return made

    monkeypatch.setattr(git_branch._Git, "commit", overtaken)
    pauses: list[float] = []
    sent = git_branch.push(one, clones[0], *PLACE, pause=pauses.append)
    assert (sent.files, sent.retries, len(pauses)) == (("runs/a.json",), 1, 1)
    assert names(clones[0]) == {"runs/a.json", "runs/b.json"}
    assert git(tmp_path / "bare.git", "rev-list", "--count", PLACE[1]) == "2"


def test_a_push_that_the_remote_refuses_ends_with_its_reason(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    hook = tmp_path / "bare.git" / "hooks" / "update"
    hook.write_text("#!/bin/sh\necho 'no branches here' >&2\nexit 1\n")
    hook.chmod(0o755)
    store = Archive(tmp_path / "store")
    store.add(document)
    with pytest.raises(
        FlowbenchError,
        match=r"git push origin flowbench-runs was refused: .*no branches here.*; give another .* --remote",
    ):
        git_branch.push(store, clones[0], *PLACE, pause=lambda seconds: None)


def test_what_was_pruned_leaves_the_branch_and_does_not_come_back(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    one, two = Archive(tmp_path / "store-a"), Archive(tmp_path / "store-b")
    for run_id in ("old", "young"):
        one.add(
            replace(
                document, run_id=run_id, created={"old": "2001-01-01T00:00:00+00:00", "young": document.created}[run_id]
            )
        )
    storing.push(one.folder, clones[0], *PLACE)
    storing.pull(two.folder, clones[1], *PLACE)
    storing.prune(one.folder, 30, [clones[0]], dry_run=False)
    storing.push(one.folder, clones[0], *PLACE)
    assert names(clones[0]) == {"runs/young.json", "pruned.txt"}
    storing.push(two.folder, clones[1], *PLACE)
    assert names(clones[0]) == {"runs/young.json", "pruned.txt"}
    storing.pull(one.folder, clones[0], *PLACE)
    assert [entry.run_id for entry in one.contents().entries] == ["young"]


def test_foreign_files_on_the_branch_are_named_and_left_there(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    git(clones[0], "checkout", "-q", "--orphan", PLACE[1])
    git(clones[0], "rm", "-rqf", "--cached", ".")
    runs = clones[0] / "runs"
    runs.mkdir()
    (runs / "run-1.json").write_text(document_text(document))
    (runs / "half.json").write_text(document_text(document)[:500])
    (runs / "other.json").write_text(document_text(document))
    (clones[0] / "README.md").write_text("hands off")
    os.symlink("/etc/passwd", runs / "link.json")
    (runs / f"{'x' * 200}.json").write_text(document_text(document))
    (runs / "a b.json").write_text(document_text(document))
    (clones[0] / "imported").mkdir()
    (clones[0] / "imported" / "utf-16.json").write_text("{}", encoding="utf-16")
    git(clones[0], "add", "runs", "imported", "README.md")
    git(clones[0], "commit", "-q", "-m", "by hand")
    git(clones[0], "push", "-q", "origin", PLACE[1])
    said, beside = storing.pull(tmp_path / "store", clones[1], *PLACE)
    assert said.startswith("1 file pulled")
    assert [line.split(": ")[0] for line in beside] == [
        "flowbench-runs:imported/utf-16.json",
        "flowbench-runs:runs/a b.json",
        "flowbench-runs:runs/half.json",
        "flowbench-runs:runs/other.json",
        f"flowbench-runs:runs/{'x' * 200}.json",
    ]
    store = Archive(tmp_path / "store")
    store.add(replace(document, run_id="run-9"))
    storing.push(store.folder, clones[1], *PLACE)
    assert {"README.md", "runs/half.json", "runs/link.json", "runs/run-9.json"} <= names(clones[0])


def test_two_documents_of_one_name_are_refused(document: RunDocument, clones: list[Path], tmp_path: Path) -> None:
    one, two = Archive(tmp_path / "store-a"), Archive(tmp_path / "store-b")
    one.add(document)
    two.add(replace(document, preset="other"))
    storing.push(one.folder, clones[0], *PLACE)
    with pytest.raises(FlowbenchError, match="is on the branch with other content"):
        storing.push(two.folder, clones[1], *PLACE)


@pytest.mark.parametrize(("name", "said"), [("code/a.py", "it has code"), ("README", "it has no runs")])
def test_a_branch_of_something_else_is_left_alone(
    name: str, said: str, document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    (clones[0] / name).parent.mkdir(exist_ok=True)
    (clones[0] / name).write_text("print()")
    git(clones[0], "add", name)
    git(clones[0], "commit", "-qm", "code")
    git(clones[0], "push", "-q", "origin", "HEAD:refs/heads/code")
    before = git(tmp_path / "bare.git", "rev-parse", "code")
    store = Archive(tmp_path / "store")
    store.add(document)
    for move in (storing.push, storing.pull):
        with pytest.raises(FlowbenchError, match=f"branch 'code' of origin is none of a store: {said}; give a branch"):
            move(store.folder, clones[0], "origin", "code")
    assert git(tmp_path / "bare.git", "rev-parse", "code") == before


def test_what_is_no_repository_or_has_no_branch_is_said(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    store = Archive(tmp_path / "store")
    store.add(document)
    with pytest.raises(
        FlowbenchError, match=r"git rev-parse failed in .*not a git repository.*; give a clone with --repository"
    ):
        storing.push(store.folder, tmp_path, *PLACE)
    with pytest.raises(FlowbenchError, match="origin has no branch 'flowbench-runs'; flowbench store push makes it"):
        storing.pull(store.folder, clones[0], *PLACE)
    with pytest.raises(FlowbenchError, match=r"git ls-remote failed.*; give another remote with --remote"):
        storing.push(store.folder, clones[0], "nowhere", "b")
    with pytest.raises(FlowbenchError, match="no such folder"):
        storing.push(tmp_path / "none", clones[0], *PLACE)


@pytest.mark.parametrize(
    ("remote", "branch", "said"),
    [
        ("--upload-pack=touch {}", PLACE[1], "is no remote, expected a remote's name or address: give it with --remote"),
        ("--receive-pack=touch {}", PLACE[1], "is no remote"),
        ("", PLACE[1], "'' is no remote"),
        *(("origin", name, "is no name of a branch, expected one such as flowbench-runs: give it with --branch")
          for name in ("", "-x", "--force", "..", "*", "a b", "a:b", "HEAD", "@", "x.lock")),
    ],
)  # fmt: skip
def test_an_option_is_no_remote_and_what_git_takes_for_no_branch_is_said(
    remote: str, branch: str, said: str, document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    store, made = Archive(tmp_path / "store"), tmp_path / "made"
    store.add(document)
    remote = remote.format(made)
    for move in (storing.push, storing.pull):
        with pytest.raises(FlowbenchError) as refused:
            move(store.folder, clones[0], remote, branch)
        assert said in str(refused.value)
    assert not made.exists()
    assert git(tmp_path / "bare.git", "branch", "--format=%(refname)") == "refs/heads/main"


def test_a_branch_whose_name_ends_with_that_of_ours_is_another(
    document: RunDocument, clones: list[Path], tmp_path: Path
) -> None:
    store = Archive(tmp_path / "store")
    store.add(document)
    storing.push(store.folder, clones[0], *PLACE)
    git(clones[0], "push", "-q", "origin", f"main:refs/heads/zz/refs/heads/{PLACE[1]}")
    assert storing.pull(tmp_path / "other", clones[1], *PLACE)[0].startswith("1 file pulled")
