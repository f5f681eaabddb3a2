"""The sides of a comparison from a git repository: what is checked out, what is refused, and that nothing is left."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from flowbench.archive import git_branch
from flowbench.commands import bisection
from flowbench.errors import FlowbenchError
from flowbench.measure import plan, refs
from flowbench.measure.refs import held_folder, placed_copy, placed_sides
from flowbench.measure.resumption import differences
from flowbench.record import machine
from flowbench.record.machine import read_git
from flowbench.record.run import Git

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")  # submodules from a folder, which git refuses by default
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "protocol.file.allow")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "always")
    return tmp_path / "cache" / "flowbench" / "sides"


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(where: Path, name: str, text: str) -> str:
    (where / name).parent.mkdir(parents=True, exist_ok=True)
    (where / name).write_text(text)
    git(where, "add", "-A")
    git(where, "commit", "-qm", name)
    return git(where, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: no framework, one that imports, and one that does not; then a branch back at the good one."""
    where = tmp_path / "repository"
    where.mkdir()
    git(where, "init", "-q", "-b", "main")
    commit(where, "README", "nothing here")
    git(where, "tag", "empty")
    commit(where, "framework/__init__.py", "VALUE = 1")
    git(where, "tag", "good")
    commit(where, "framework/__init__.py", "import no_such_module")
    git(where, "tag", "broken")
    git(where, "reset", "-q", "--hard", "good")
    return where


def value(import_path: str) -> str:
    code = "import framework; print(framework.VALUE)"
    environment = {**os.environ, "PYTHONPATH": import_path}
    return subprocess.run(
        ["python3", "-P", "-c", code], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_ref_and_the_working_tree_as_it_is_now(repository: Path, cache: Path) -> None:
    (repository / "framework/__init__.py").write_text("from framework.more import VALUE")
    (repository / "framework/more.py").write_text("VALUE = 2")  # not even added
    with placed_sides(repository / "framework", "good", None) as (base, head):
        (repository / "framework/more.py").write_text("VALUE = 3")  # an edit in the middle of the sitting
        assert (value(base.import_path), value(head.import_path)) == ("1", "2")
        assert (base.side.asked, head.side.asked) == ("good", "working tree")
        assert base.side.git is not None
        assert head.side.git is not None
        assert base.side.git.commit == head.side.git.commit == git(repository, "rev-parse", "good")
        assert (base.side.git.dirty, head.side.git.dirty) == (False, True)
        assert sorted(path.name for path in Path(head.import_path).iterdir()) == ["framework"]
    assert list(cache.iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_copy_needs_no_git(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlowbenchError, match="has no framework/"), placed_copy(tmp_path):
        pass
    (tmp_path / "framework").mkdir()
    (tmp_path / "framework/__init__.py").write_text("VALUE = 1")
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with placed_copy(tmp_path) as side:
            (tmp_path / "framework/__init__.py").write_text("VALUE = 2")
            patch.undo()
            assert value(side.import_path) == "1"
            assert side.side.git is None
    assert list(cache.glob("*")) == []


def test_what_a_killed_process_left_is_removed_by_the_next(repository: Path, cache: Path) -> None:
    (cache / "dead").mkdir(parents=True)
    (cache / "dead" / "lock").touch()
    with placed_sides(repository, "good", "good") as (base, head):
        assert (value(base.import_path), value(head.import_path)) == ("1", "1")
        assert not (cache / "dead").exists()
        with placed_sides(repository, "good", None):  # two at once leave each other alone
            assert value(base.import_path) == "1"
        assert value(base.import_path) == "1"


def test_a_checkout_that_is_ended_in_the_middle_leaves_nothing(repository: Path, cache: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    commit(repository, ".gitattributes", "*.slow filter=slow")
    commit(repository, "framework/data.slow", "x")
    git(
        repository,
        "config",
        "filter.slow.smudge",
        f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 30",
    )
    code = (
        "import pathlib, signal, sys\n"
        "from flowbench.measure.refs import placed_sides\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "with placed_sides(pathlib.Path(sys.argv[1]), 'HEAD', 'HEAD'): pass\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(repository)])
    until = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 7
    status = Path("/proc") / started.read_text().strip() / "stat"
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"  # git's own child
    assert list(cache.iterdir()) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_worktrees_that_a_killed_git_left_locked_are_forgotten(repository: Path, cache: Path, tmp_path: Path) -> None:
    for place in (cache / "dead" / "head", tmp_path / "elsewhere"):
        git(repository, "worktree", "add", "-q", "--detach", "--lock", "--reason", "initializing", str(place))
        shutil.rmtree(place)
    (cache / "dead").rmdir()
    with placed_sides(repository, "good", None):
        pass
    listed = git(repository, "worktree", "list", "--porcelain")
    assert str(cache) not in listed
    assert f"worktree {tmp_path / 'elsewhere'}\n" in listed  # someone else's, who may bring it back


def test_a_folder_that_is_swept_before_it_is_held_is_made_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, swept = refs.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if (
            how == refs.fcntl.LOCK_EX and not swept
        ):  # another process comes between the making of the lock and its holding
            swept.extend(cache.iterdir())
            refs._sweep(cache, cache)
        lock(descriptor, how)

    monkeypatch.setattr(refs.fcntl, "flock", late)
    with held_folder() as folder:
        assert folder.is_dir()
        assert len(swept) == 1
        assert folder not in swept
    assert list(cache.iterdir()) == []


def test_a_folder_without_a_lock_is_removed_when_it_is_old(repository: Path, cache: Path) -> None:
    for name, age_s in (("old", 601), ("new", 0)):
        (cache / name / "head").mkdir(parents=True)
        os.utime(cache / name, (time.time() - age_s,) * 2)
    with placed_sides(repository, "good", None):
        pass
    assert [folder.name for folder in cache.iterdir()] == ["new"]


@pytest.mark.parametrize(
    ("base", "head", "said"),
    [
        ("nowhere", None, "unknown ref 'nowhere', expected a branch, tag or commit"),
        ("good", "nowhere", "unknown ref 'nowhere'"),
        ("--all", None, "unknown ref '--all'"),
        ("good", "", "unknown ref ''"),  # a variable that was not set is not the working tree
        ("empty", None, "'empty' has no framework/"),
        (
            "good",
            "broken",
            (
                "the framework of 'broken' does not import: ModuleNotFoundError: No module named 'no_such_module'"
                " (framework/__init__.py, line 1)"
            ),
        ),
    ],
)
def test_refs_that_cannot_be_measured(repository: Path, cache: Path, base: str, head: str | None, said: str) -> None:
    with pytest.raises(FlowbenchError) as error, placed_sides(repository, base, head):
        pass
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert list(cache.glob("*")) == []
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_shallow_clone_is_told_apart(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    missing = git(repository, "rev-parse", "empty")
    with (
        pytest.raises(FlowbenchError, match="this clone is shallow: git fetch --unshallow"),
        placed_sides(tmp_path / "shallow", missing, None),
    ):
        pass


def test_outside_of_a_repository(tmp_path: Path) -> None:
    with pytest.raises(FlowbenchError, match="is in no git repository"), placed_sides(tmp_path, "main", None):
        pass


def test_a_dirty_submodule_is_refused(repository: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, "file", "x")
    git(repository, "submodule", "--quiet", "add", str(other), "framework/part")
    git(repository, "commit", "-qm", "a submodule")
    with placed_sides(repository, "HEAD", None) as (base, _):
        assert (Path(base.import_path) / "framework/part/file").read_text() == "x"
    (repository / "framework/part/file").write_text("changed")
    with (
        pytest.raises(FlowbenchError, match="submodule 'framework/part' of the working tree has changes of its own"),
        placed_sides(repository, "HEAD", None),
    ):
        pass


def test_a_full_disk_is_said_whoever_writes_there(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = (
        rf"^cannot write {cache}: No space left on device \(.* of its disk's .* are free\); free some space or set"
        " XDG_CACHE_HOME to another folder$"
    )
    monkeypatch.setattr(refs.shutil, "copy2", full)
    with pytest.raises(FlowbenchError, match=said), placed_sides(repository, "good", None):
        pass
    with pytest.raises(FlowbenchError, match=said), placed_copy(repository):
        pass
    assert list(cache.iterdir()) == []


@pytest.fixture
def of_another_owner(repository: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The repository is to git as if another user owned it; how that is allowed."""
    for scope in ("GLOBAL", "SYSTEM"):
        monkeypatch.setenv(f"GIT_CONFIG_{scope}", os.devnull)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    if subprocess.run(["git", "-C", repository, "rev-parse"], capture_output=True).returncode == 0:
        pytest.skip("this git reads repositories of any owner")
    return f"git config --global --add safe.directory {repository}"


def test_a_repository_of_another_owner_is_not_called_none(
    repository: Path, of_another_owner: str, tmp_path: Path
) -> None:
    said = f"git does not read the repository of {repository}: .* ownership .*; to allow it: {of_another_owner}$"
    with pytest.raises(FlowbenchError, match=said), placed_sides(repository, "good", None):
        pass
    with pytest.raises(FlowbenchError, match=said):
        bisection._Git(repository).commit("good")
    with pytest.raises(FlowbenchError, match=f"ownership .*; to allow it: {of_another_owner}$"):
        git_branch._Git(repository)
    assert (read_git(repository), read_git(tmp_path)) == (None, None)
    assert (machine.why_no_commit(repository) or "").endswith(f"; to allow it: {of_another_owner}")
    assert machine.why_no_commit(tmp_path) is None, "there is no repository: nothing is amiss"


def test_a_run_whose_commit_git_refuses_to_tell_says_so(
    repository: Path, of_another_owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan.flowbench, "__file__", str(repository / "__init__.py"))
    request = plan.Request(preset="smoke", reference="none", threads=1)
    document = plan.plan_run(request, ())
    assert document.git is None
    (found,) = [one for one in document.findings if one.kind == "commit"]
    assert found.message.startswith("the commit that is measured is not known: fatal: detected dubious ownership")
    assert found.message.endswith(of_another_owner)
    known = replace(document, git=Git("a" * 40, None, False))
    (what,) = differences(known, request)
    assert what.startswith(f"commit: {'a' * 40} / not known (fatal: detected dubious ownership")


def test_why_a_commit_is_not_known(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.why_no_commit(repository / "framework") is None
    (tmp_path / "new").mkdir()
    git(tmp_path / "new", "init", "-q")
    assert (machine.why_no_commit(tmp_path / "new") or "").startswith("fatal: ambiguous argument 'HEAD'")
    monkeypatch.setenv("PATH", "")
    assert machine.why_no_commit(tmp_path) is None
    assert machine.why_no_commit(repository) == "git does not run: No such file or directory"


def test_what_git_says_of_a_broken_repository_is_passed_on(repository: Path) -> None:
    broken = git(repository, "rev-parse", "broken")
    file = repository / ".git" / "objects" / broken[:2] / broken[2:]
    file.chmod(0o600)
    file.write_text("junk")
    with pytest.raises(FlowbenchError, match=r"^unknown ref 'broken', .* \(git: error: inflate: data stream error"):
        refs.resolve(repository, "broken")
    (repository / ".git" / "index").write_text("junk")
    with (
        pytest.raises(
            FlowbenchError, match=r"^git status failed in .*: fatal: .*index: index file smaller than expected$"
        ),
        placed_sides(repository, "good", None),
    ):
        pass


def test_in_a_git_hook_nothing_is_written_into_the_index_of_the_commit_that_is_made(
    repository: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    theirs = commit(other, "framework/__init__.py", "VALUE = 3")
    (repository / "staged").write_text("of the commit that is being made")
    git(repository, "add", "staged")
    index = (repository / ".git" / "index").read_bytes()
    good = git(repository, "rev-parse", "good")
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))  # as for a pre-commit hook
    with placed_sides(repository, "good", None) as (base, head):
        assert (value(base.import_path), value(head.import_path)) == ("1", "1")
    assert (repository / ".git" / "index").read_bytes() == index
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))  # as for a hook of another repository
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert refs.resolve(repository, "HEAD") == good
    seen = read_git(repository)
    assert seen is not None
    assert (seen.commit, seen.dirty) == (good, True)
    assert bisection._Git(repository).commit("HEAD") == good
    assert git_branch._Git(repository).run("rev-parse", "HEAD") == good
    assert git(other, "rev-parse", "HEAD") == theirs


def test_a_tree_of_which_git_says_nothing_is_not_taken_for_a_clean_one(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = read_git(repository)
    assert clean is not None
    assert (clean.dirty, clean.changes) == (False, None)
    (repository / "new").symlink_to("nowhere")
    linked = read_git(repository)
    assert linked is not None
    assert linked.dirty
    run = machine._git
    monkeypatch.setattr(machine, "_git", lambda where, *words: None if "status" in words else run(where, *words))
    silent = read_git(repository)
    assert silent is not None
    assert (silent.dirty, silent.changes) == (True, "unknown")
