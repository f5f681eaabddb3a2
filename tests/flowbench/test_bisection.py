"""The search for a commit: real repositories, a real process per measurement, and verdicts that are bad, good or neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flowbench.commands.bisection import Judged, bisect, describe
from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import Verdict

CHANGE = 6  # the commit, of twelve, that brings the slowdown or the growth


def git(directory: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(["git", *who, "-C", directory, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flowbench" / "sides"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A repository with a package of one module, whose step costs more from one commit on, and breaks in between."""
    root = tmp_path / "package"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    for number in range(12):
        cost, memory = (130, 3000) if number >= CHANGE else (100, 1000)
        (root / "tiny.py").write_text(f"COMMIT = {number}\nSTEP_MS = {cost}\nPEAK_BYTES = {memory}\n")
        (root / f"file{number}").write_text("x")
        git(root, "add", ".")
        git(root, "commit", "-q", "-m", f"change {number}")
        git(root, "tag", f"c{number}")
    (root / "tiny.py").write_text("work in progress")
    return root


class Measuring:
    """Measures two commits with a process each, which imports the package as it was; `odd` says what some come to instead."""

    def __init__(self, root: Path, folder: Path, quantity: str, odd: dict[int, list[Verdict]] | None = None) -> None:
        self.root, self.folder, self.quantity, self.odd = root, folder, quantity, odd or {}
        self.asked: list[int] = []

    def __call__(self, good: str, commit: str) -> Judged:
        base, head = (self.measure(one) for one in (good, commit))
        number = int(git(self.root, "show", "--no-patch", "--format=%s", commit).split()[1])
        self.asked.append(number)
        waiting = self.odd.get(number, [])
        if waiting:
            return Judged(waiting.pop(0), "not this time")
        worse = Verdict.SLOWER if self.quantity == "STEP_MS" else Verdict.LARGER
        return Judged(worse if head > base else Verdict.SAME, f"{base} -> {head}")

    def measure(self, commit: str) -> int:
        place = self.folder / commit
        place.mkdir(exist_ok=True)
        (place / "tiny.py").write_text(git(self.root, "show", f"{commit}:tiny.py"))
        code = f"import tiny; print(tiny.{self.quantity})"
        done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=True)
        return int(done.stdout)


@pytest.mark.parametrize("quantity", ["STEP_MS", "PEAK_BYTES"])
def test_the_commit_is_found_and_no_checkout_is_touched(package: Path, tmp_path: Path, quantity: str) -> None:
    before = git(package, "status", "--porcelain"), git(package, "rev-parse", "HEAD")
    found = bisect(package, "c0", "main", Measuring(package, tmp_path, quantity))
    assert found.suspects == (git(package, "rev-parse", f"c{CHANGE}"),)
    assert (git(package, "status", "--porcelain"), git(package, "rev-parse", "HEAD")) == before
    assert len(git(package, "worktree", "list").splitlines()) == 1
    assert not git(package, "for-each-ref", "refs/bisect")
    assert len(found.steps) <= 5
    text = describe(package, found)
    assert text.startswith(
        f"the first commit that is worse: {'100 -> 130' if quantity == 'STEP_MS' else '1000 -> 3000'}\n"
    )
    assert f"change {CHANGE}" in text
    assert "tiny.py" in text


def test_what_is_unclear_is_measured_again(package: Path, tmp_path: Path) -> None:
    odd = {number: [Verdict.UNCLEAR] for number in range(12)}
    measuring = Measuring(package, tmp_path, "STEP_MS", odd)
    found = bisect(package, "c0", "main", measuring)
    assert found.suspects == (git(package, "rev-parse", f"c{CHANGE}"),)
    assert all(measuring.asked.count(number) == 2 for number in measuring.asked)


def test_what_stays_unclear_is_skipped_and_what_fails_is_not_tried_again(package: Path, tmp_path: Path) -> None:
    odd = {5: [Verdict.UNCLEAR] * 9, 7: [Verdict.FAILED] * 9}
    measuring = Measuring(package, tmp_path, "STEP_MS", odd)
    found = bisect(package, "c0", "main", measuring)
    taken = {step.subject: (step.taken_for, len(step.tries)) for step in found.steps}
    assert taken.get("change 5", ("skip", 3)) == ("skip", 3)
    assert taken.get("change 7", ("skip", 1)) == ("skip", 1)
    suspects = {git(package, "show", "--no-patch", "--format=%s", commit) for commit in found.suspects}
    assert "change 6" in suspects
    assert suspects <= {"change 5", "change 6", "change 7"}


def test_where_neighbours_are_all_skipped_the_suspects_are_named(package: Path, tmp_path: Path) -> None:
    odd = {number: [Verdict.VOID] * 9 for number in range(1, 11)}
    found = bisect(package, "c0", "c11", Measuring(package, tmp_path, "STEP_MS", odd))
    assert len(found.suspects) == 11
    text = describe(package, found)
    assert text.startswith("one of these commits made the change; the others could not be judged:\n")
    assert "change 6" in text
    assert len(git(package, "worktree", "list").splitlines()) == 1


def test_what_cannot_be_searched_is_refused(package: Path, tmp_path: Path) -> None:
    measuring = Measuring(package, tmp_path, "STEP_MS")
    with pytest.raises(FlowbenchError, match="'c4' is not worse than 'c1' for certain: 100 -> 100"):
        bisect(package, "c1", "c4", measuring)
    with pytest.raises(FlowbenchError, match="unknown ref 'nowhere'"):
        bisect(package, "c1", "nowhere", measuring)
    with pytest.raises(FlowbenchError, match="are the same commit"):
        bisect(package, "main", "c11", measuring)
    with pytest.raises(FlowbenchError, match=r"does not lead to .*: swap them$"):
        bisect(package, "c9", "c1", measuring)
    git(package, "checkout", "-q", "-f", "--orphan", "other")
    git(package, "commit", "-q", "-m", "other")
    with pytest.raises(FlowbenchError, match=r"does not lead to .* was made from .a shallow clone"):
        bisect(package, "other", "c1", measuring)
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{package}", "shallow")
    with pytest.raises(FlowbenchError, match=r"unknown ref 'HEAD~1'.*: this clone is shallow: git fetch --unshallow"):
        bisect(tmp_path / "shallow", "HEAD~1", "HEAD", measuring)
    with pytest.raises(FlowbenchError, match=r"is in no git repository.*: run flowbench in a clone"):
        bisect(tmp_path, "a", "b", measuring)


def test_an_interrupted_search_leaves_nothing(package: Path, tmp_path: Path) -> None:
    measuring = Measuring(package, tmp_path, "STEP_MS")

    def judge(good: str, commit: str) -> Judged:
        if len(measuring.asked) == 2:
            raise KeyboardInterrupt
        return measuring(good, commit)

    with pytest.raises(KeyboardInterrupt):
        bisect(package, "c0", "main", judge)
    assert len(git(package, "worktree", "list").splitlines()) == 1
    assert not git(package, "for-each-ref", "refs/bisect")


def test_what_a_killed_search_left_is_removed_by_the_next(package: Path, tmp_path: Path, cache: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from flowbench.commands.bisection import Judged, Verdict, bisect\n"
        "answers = [Judged(Verdict.SLOWER, '')]\n"
        "def judge(good, commit): return answers.pop() if answers else os.kill(os.getpid(), signal.SIGKILL)\n"
        "bisect(pathlib.Path(sys.argv[1]), 'c0', 'main', judge)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, package]).returncode == -9
    assert len(git(package, "worktree", "list").splitlines()) == 2
    bisect(package, "c0", "main", Measuring(package, tmp_path, "STEP_MS"))
    assert list(cache.iterdir()) == []
    assert len(git(package, "worktree", "list").splitlines()) == 1
