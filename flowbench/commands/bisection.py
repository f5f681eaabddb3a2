"""The search for the commit that made a cell slower or larger: `git bisect` chooses, `flowbench compare`'s verdicts decide.

The search runs in a worktree of its own that holds no files, so that no checkout is touched; what is measured is checked out
by the comparison.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flowbench.errors import FlowbenchError
from flowbench.git import git_environment
from flowbench.judge.verdict import Verdict
from flowbench.measure.refs import held_folder, pruned, resolve, unplaced, unread

# How often a step that was not judged is measured before it is skipped.
MOST_TRIES = 3


@dataclass(frozen=True)
class Judged:
    """What a comparison of GOOD with one commit came to, and its figures in words."""

    verdict: Verdict
    words: str


@dataclass(frozen=True)
class Step:
    """One commit that was looked at, and what it was taken for."""

    commit: str
    subject: str
    taken_for: str
    tries: tuple[Judged, ...]


@dataclass(frozen=True)
class Found:
    """The commits of which one made the change: one alone, or several where those between were skipped."""

    suspects: tuple[str, ...]
    steps: tuple[Step, ...]


Judge = Callable[[str, str], Judged]


def bisect(
    repository: Path,
    good: str,
    bad: str,
    judge: Judge,
    told: Callable[[Step], None] = lambda step: None,
    left: Callable[[str], None] = lambda text: None,
) -> Found:
    """Search between two refs of `repository`; `judge(good, commit)` compares two commits. `told` hears of every step.

    Raises FlowbenchError for refs that are unknown or do not follow one another, and where BAD is not worse than GOOD.
    """
    git = _Git(repository)
    first, last = git.commit(good), git.commit(bad)
    if first == last:
        raise FlowbenchError(f"{good!r} and {bad!r} are the same commit, {first[:10]}: there is nothing between them")
    if git.fails("merge-base", "--is-ancestor", first, last):
        swapped = not git.fails("merge-base", "--is-ancestor", last, first)
        raise FlowbenchError(
            f"{good!r} ({first[:10]}) does not lead to {bad!r} ({last[:10]}); "
            + ("it is the other way round: swap them" if swapped else "give a commit that BAD was made from")
            + " (a shallow clone may lack it: git fetch --unshallow)" * (not swapped)
        )
    steps = [_look(git, judge, first, last)]
    told(steps[0])
    if steps[0].taken_for != "bad":
        raise FlowbenchError(
            f"{bad!r} is not worse than {good!r} for certain: {steps[0].tries[-1].words}; there is nothing to search for"
        )
    with git.bare_worktree() as search:
        said = search.run("bisect", "start", "--no-checkout", last, first)
        while not (suspects := _suspects(said)):
            left(said.splitlines()[0])
            commit = search.run("rev-parse", "BISECT_HEAD")
            step = _look(git, judge, first, commit)
            steps.append(step)
            told(step)
            said = search.run("bisect", step.taken_for, commit, ok=(0, 2))
    return Found(suspects, tuple(steps))


def describe(repository: Path, found: Found) -> str:
    """The result in words, with what the commit changed."""
    git = _Git(repository)
    if len(found.suspects) > 1:
        lines = ["one of these commits made the change; the others could not be judged:"]
        return "\n".join([*lines, *(f"  {commit[:10]} {git.subject(commit)}" for commit in found.suspects)])
    (commit,) = found.suspects
    last = [step for step in found.steps if step.commit == commit][-1]
    stat = git.run("show", "--stat=100", "--format=%h %an, %ad%n  %s", "--date=iso", commit)
    return f"the first commit that is worse: {last.tries[-1].words}\n{stat}"


def _look(git: _Git, judge: Judge, good: str, commit: str) -> Step:
    """Compare, and again where it was not judged."""
    tries: list[Judged] = []
    while len(tries) < MOST_TRIES and not (tries and tries[-1].verdict.is_judged):
        tries.append(judge(good, commit))
        if tries[-1].verdict in (Verdict.FAILED, Verdict.VOID, Verdict.LOST, Verdict.NEW):
            break  # it will not run the next time either
    verdict = tries[-1].verdict
    taken_for = "bad" if verdict.is_regression else "good" if verdict.is_judged else "skip"
    return Step(commit, git.subject(commit), taken_for, tuple(tries))


def _suspects(said: str) -> tuple[str, ...]:
    """The commits that git bisect names at its end; none while it goes on."""
    first = re.search(r"^([0-9a-f]{40,64}) is the first bad commit", said, re.MULTILINE)
    if first:
        return (first[1],)
    if "only 'skip'ped commits left" in said:
        return tuple(re.findall(r"^[0-9a-f]{40,64}$", said, re.MULTILINE))
    return ()


class _Git:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def run(self, *arguments: str, ok: tuple[int, ...] = (0,)) -> str:
        """What git prints; raises FlowbenchError with its last line where it fails, PlaceError where the machine fails it."""
        done = self._done(*arguments)
        if done.returncode not in ok:
            unwritten = unplaced(self._directory, done, "the search's worktree")
            if unwritten is not None:
                raise unwritten
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise FlowbenchError(f"git {arguments[0]} failed in {self._directory}: {lines[-1][:300] if lines else ''}")
        return done.stdout.strip()

    def fails(self, *arguments: str) -> bool:
        return self._done(*arguments).returncode != 0

    def commit(self, ref: str) -> str:
        """The commit of a ref; raises FlowbenchError where there is none."""
        done = self._done("rev-parse", "--git-dir")
        if done.returncode != 0:
            raise unread(self._directory, done.stderr, "there are no commits to search: run flowbench in a clone")
        return resolve(self._directory, ref)

    def subject(self, commit: str) -> str:
        return self.run("show", "--no-patch", "--format=%s", commit)

    @contextlib.contextmanager
    def bare_worktree(self) -> Iterator[_Git]:
        """A worktree without files, for the state of one search; it is gone afterwards, of a killed one after the next."""
        with pruned(self._directory), held_folder() as folder:
            place = folder / "search"
            self.run("worktree", "add", "--quiet", "--detach", "--no-checkout", str(place))
            try:
                yield _Git(place)
            finally:
                self.run("worktree", "remove", "--force", str(place))

    def _done(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(self._directory), *arguments]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=600,
                env=git_environment(),
            )
        except FileNotFoundError:
            raise FlowbenchError("git is not installed; flowbench bisect searches with it") from None
