"""The bot against a server that behaves like GitHub: whose comment it is, one per pull request, errors, and races of two runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowbench import cli
from flowbench.commands import commenting
from flowbench.errors import FlowbenchError
from flowbench.github.api import Api, ApiError
from flowbench.github.post import post
from flowbench.github.trust import Subject, TrustError, subject_of
from flowbench.record.run import Git, RunDocument

SHA, NEWER = "a" * 40, "b" * 40
MARKER = "<!-- flowbench run={} -->\n"


class Bot:
    """`flowbench comment` against the server; the times it would have slept are kept instead."""

    def __init__(self, github: Any, artifact: Callable[..., Path], tmp_path: Path) -> None:
        self.github, self.artifact, self.slept = github, artifact, []
        self.summary = tmp_path / "summary.md"
        self.environment = {
            "GITHUB_TOKEN": "t",
            "GITHUB_API_URL": github.address,
            "GITHUB_STEP_SUMMARY": str(self.summary),
        }
        self.api = Api("t", github.address, self.slept.append, timeout_s=5)

    def __call__(self, run_id: int = 77, path: Path | None = None, **options: object) -> str:
        return commenting.comment(
            path or self.artifact(), "o/r", run_id, environment=self.environment, api=self.api, **options
        )

    @property
    def writes(self) -> list[str]:
        return [method for method, _ in self.github.log if method != "GET"]


@pytest.fixture
def bot(github: Any, artifact: Callable[..., Path], tmp_path: Path) -> Bot:
    return Bot(github, artifact, tmp_path)


def test_a_comment_is_made_and_then_kept_up_to_date(bot: Bot) -> None:
    assert bot().startswith("comment created: https://github.com/o/r/pull/12#issuecomment-")
    (body,) = bot.github.bodies(12)
    assert body.startswith(MARKER.format(77))
    assert "resnet50" in body
    assert "Measured by code of this pull request, which can fake its own numbers" in body
    assert "Stale" not in body
    assert bot().startswith("comment unchanged")
    bot.github.add_run(78, SHA)
    assert bot(78).startswith("comment updated")
    (body,) = bot.github.bodies(12)
    assert body.startswith(MARKER.format(78))


def test_ours_is_found_by_marker_and_author_over_all_pages(bot: Bot) -> None:
    bot.github.add_comment(12, MARKER.format(1) + "forged", login="somebody")
    for number in range(7):
        bot.github.add_comment(12, f"talk {number}")
    bot.github.add_comment(12, MARKER.format(5) + "older")
    bot.github.add_comment(12, "quoting\n" + MARKER.format(99999))
    assert bot().startswith("comment updated")
    assert len(bot.github.bodies(12)) == 10
    assert bot.github.bodies(12)[0].endswith("forged")
    assert bot.github.bodies(12)[8].startswith(MARKER.format(77))


def test_an_older_run_never_overwrites_a_newer_one(bot: Bot) -> None:
    bot.github.add_comment(12, MARKER.format(80) + "newer")
    assert "has the comment of a newer run already" in bot()
    assert bot.github.bodies(12) == [MARKER.format(80) + "newer"]
    assert bot.writes == []


def test_a_head_that_moved_since_gets_a_line(bot: Bot) -> None:
    bot.github.add_pull(12, NEWER)
    bot()
    (body,) = bot.github.bodies(12)
    assert f"**Stale:** measured at {SHA[:10]}; the pull request stands at {NEWER[:10]} since." in body


def test_second_comments_are_removed(bot: Bot) -> None:
    for run in (3, 4, 5):
        bot.github.add_comment(12, MARKER.format(run))
    assert bot().startswith("comment updated")
    assert len(bot.github.bodies(12)) == 1


def test_a_dry_run_prints_and_posts_nothing(bot: Bot) -> None:
    assert bot(dry_run=True).startswith(MARKER.format(77))
    assert bot.writes == []


@pytest.mark.parametrize(
    ("git", "said"),
    [
        (Git("c" * 40, None, False), "the artifact is of commit cccccccccc, run 77 was of aaaaaaaaaa"),
        (Git(SHA, None, True), "the artifact is of commit none"),
        (None, "the artifact is of commit none"),
    ],
)
def test_numbers_of_another_commit_are_refused(bot: Bot, git: Git | None, said: str) -> None:
    with pytest.raises(TrustError, match=said):
        bot(path=bot.artifact(git=git))
    assert bot.writes == []


def test_the_pull_request_is_the_one_of_the_runs_own_branch(bot: Bot) -> None:
    bot.github.add_pull(13, SHA, owner="victim", branch="topic", repo_id=3)
    bot.github.add_pull(14, SHA, branch="other")
    bot()
    assert [len(bot.github.bodies(number)) for number in (12, 13, 14)] == [1, 0, 0]
    bot.github.add_run(78, SHA, branch="nowhere")
    with pytest.raises(TrustError, match="0 open pull requests come from fork:nowhere"):
        bot(78)
    bot.github.add_run(79, SHA, event="push")
    with pytest.raises(TrustError, match="run 79 was started by 'push'"):
        bot(79)


def test_a_run_that_was_asked_for_says_so_by_the_name_its_workflow_gave_it(bot: Bot) -> None:
    dispatched = {"event": "workflow_dispatch", "branch": "main", "owner": "o"}
    bot.github.add_run(78, NEWER, display_title=f"bench #12 at {SHA}", **dispatched)
    assert bot(78).startswith("comment created")
    bot.github.add_run(79, NEWER, display_title=f"bench #12 at {SHA}", **{**dispatched, "branch": "evil"})
    bot.github.add_run(80, NEWER, display_title=f"bench #12 at {NEWER}", **dispatched)
    bot.github.add_run(81, NEWER, display_title="bench #12", **dispatched)
    for run_id, said in ((79, "not for a pull request on main"), (80, "run 80 was of bbbbb"), (81, "not for a pull")):
        with pytest.raises(TrustError, match=said):
            bot(run_id)


def fault(bot: Bot, *arguments: Any, **options: Any) -> None:
    from fake_github import Fault

    bot.github.faults.append(Fault(*arguments, **options))


@pytest.mark.parametrize("status", [500, 502, 503, 429])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_is_temporary_is_asked_again_after_the_time_that_is_asked_for(bot: Bot, status: int, method: str) -> None:
    fault(bot, method, "comments|runs", status, times=2, headers={"Retry-After": "7"})
    assert bot().startswith("comment created")
    assert bot.slept == [7.0, 7.0]
    assert len(bot.github.bodies(12)) == 1


def test_rate_limits_are_waited_for_within_bounds(bot: Bot) -> None:
    limit = {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": str(int(time.time()) + 30)}
    fault(bot, "GET", "comments", 403, headers=limit, message="API rate limit exceeded")
    assert bot().startswith("comment created")
    assert 20 < bot.slept[0] <= 31
    fault(bot, "GET", "comments", 403, headers={"Retry-After": "3600"}, message="secondary rate limit")
    assert "::notice title=flowbench::GitHub refused to list the comments: 403 secondary rate limit" in bot()


def test_a_write_whose_answer_was_lost_is_not_done_twice(bot: Bot) -> None:
    fault(bot, "POST", "comments", None, after=True)
    assert bot().startswith("comment ")
    assert len(bot.github.bodies(12)) == 1
    bot.github.add_run(78, SHA)
    fault(bot, "PATCH", "comments", 502, after=True)
    assert bot(78).startswith("comment ")
    (body,) = bot.github.bodies(12)
    assert body.startswith(MARKER.format(78))


def test_what_stays_broken_ends_in_one_line_with_the_report_in_the_summary(bot: Bot) -> None:
    fault(bot, "POST", "comments", 503, times=99)
    with pytest.raises(ApiError, match="GitHub refused to comment: 503 as the test wants it"):
        bot()
    assert bot.slept == [1.0, 2.0, 4.0, 8.0]
    assert "resnet50" in bot.summary.read_text()


def test_a_network_that_is_gone_ends_in_one_line(bot: Bot) -> None:
    fault(bot, "GET", "runs/77", None, times=99)
    with pytest.raises(ApiError, match="GitHub did not answer when asked to read run 77: ConnectionError"):
        bot()


def test_time_outs_are_tried_again(bot: Bot) -> None:
    slow = iter([True, False, False])
    answer = bot.github.answer

    def late(method: str, path: str, *rest: Any) -> Any:
        if path.endswith("runs/77") and next(slow, False):
            time.sleep(1.5)
        return answer(method, path, *rest)

    bot.github.answer = late
    bot.api = Api("t", bot.github.address, bot.slept.append, timeout_s=1)
    assert bot().startswith("comment created")
    assert bot.slept == [1.0]


def test_without_permission_the_report_goes_to_the_summary_and_nothing_fails(bot: Bot) -> None:
    fault(bot, "POST", "comments", 403, message="Resource not accessible by integration")
    said = bot()
    assert said.startswith("::notice title=flowbench::GitHub refused to comment: 403 Resource not accessible")
    assert said.endswith(f"; the report is in the job's summary ({bot.summary})")
    assert bot.summary.read_text().startswith(MARKER.format(77))


def test_a_summary_that_cannot_be_written_is_said(bot: Bot, tmp_path: Path) -> None:
    fault(bot, "POST", "comments", 403, times=2, message="Resource not accessible by integration")
    bot.environment["GITHUB_STEP_SUMMARY"] = str(tmp_path)
    said = f"; the report is nowhere: the job's summary {tmp_path} cannot be written: Is a directory"
    assert bot().endswith(said)
    del bot.environment["GITHUB_STEP_SUMMARY"]
    assert bot().endswith("; the report is nowhere: the job has no summary, GITHUB_STEP_SUMMARY is not set")


@pytest.mark.parametrize(
    ("status", "said"), [(404, "is the token allowed to see it"), (422, "422 as the"), (401, "not valid")]
)
def test_what_asking_again_does_not_change_is_not_asked_again(bot: Bot, status: int, said: str) -> None:
    fault(bot, "POST", "comments", status, times=9)
    with pytest.raises(ApiError, match=said):
        bot()
    assert bot.slept == []
    with pytest.raises(ApiError, match="GitHub refused to read run 5: 404 Not Found"):
        bot(5)


def test_the_check_says_what_the_exit_code_says(bot: Bot) -> None:
    bot(check=True)
    (check,) = bot.github.checks
    assert (check["name"], check["head_sha"], check["conclusion"]) == ("bench", SHA, "neutral")


def test_a_comparison_is_judged_anew_and_says_what_changed(bot: Bot, comparison: RunDocument) -> None:
    assert bot(path=bot.artifact(comparison), check=True).startswith("comment created")
    (body,) = bot.github.bodies(12)
    assert "slower" in body.splitlines()[1]
    assert "<details><summary>What changed</summary>" in body
    block = body.split("```text\n")[-1].split("\n```")[0]
    assert "10.00 ->        260.0  +250.0  relu float32[4] in layer1ˋˋˋ</details>" in block
    (check,) = bot.github.checks
    assert check["conclusion"] == "failure"


def test_limits_are_those_of_the_job_and_a_check_fails_on_one_that_is_exceeded(
    bot: Bot, comparison: RunDocument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bot.artifact(comparison)
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "flowbench.toml"  # taken without being named
    own.write_text('[[limit]]\ncell = "flow-eager/*"\nmax_step_ms = 700\nexit_code = 3\n')
    assert "Limit: " in bot(path=path, dry_run=True)
    kept = tmp_path / "kept.toml"
    kept.write_text(
        '[[limit]]\ncell = "flow-eager/*"\nmax_step_ms = 800\n[[limit]]\ncell = "other/*"\nmax_step_ms = 7\n'
    )
    body = bot(path=path, dry_run=True, limits=kept)
    assert "max_step_ms = 800: kept" in body
    assert "other/*: no such cell was measured, so max_step_ms = 7 cannot be checked" in body
    with pytest.raises(FlowbenchError, match=r"none.toml: No such file or directory, expected limits in TOML"):
        bot(path=path, limits=tmp_path / "none.toml")
    own.write_text('[[limit]]\ncell = "flow-eager/*"\nmax_step_ms = 700\nexit_code = 3\n')
    alike = (replace(one.ranks[0], steps_ms=(500 + 0.1 * (one.pair % 3),)) for one in comparison.samples)
    samples = [replace(one, ranks=(rank,)) for one, rank in zip(comparison.samples, alike, strict=True)]
    same = replace(comparison, samples=tuple(samples))
    bot(path=bot.artifact(same), check=True)
    own.write_text('[[limit]]\ncell = "flow-eager/*"\nmax_step_ms = 400\nexit_code = 3\n')
    bot(path=bot.artifact(same), check=True)
    found = [(check["conclusion"], check["output"]["title"]) for check in bot.github.checks]
    assert found == [("success", "bench: passed"), ("failure", "bench: failed")]


def test_hostile_artifacts_post_nothing(bot: Bot, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text("{}")
    with pytest.raises(FlowbenchError, match="refused"):
        bot(path=path)
    assert bot.github.log == []


def test_a_long_report_is_cut_and_says_so(document: RunDocument, monkeypatch: pytest.MonkeyPatch) -> None:
    from flowbench.github import comment

    monkeypatch.setattr(comment, "render", lambda *given, **options: "x" * 100_000)
    text = comment.text_of(Subject(None, 12, SHA, SHA, 77), document)
    assert len(text) <= comment.MOST_CHARACTERS
    assert "… cut here" in text
    assert text.rstrip().endswith("</sub>")


class Settling:
    """The settling time of several runs: over for one when each has come to it, or has ended. No clock says so."""

    def __init__(self, runs: set[int]) -> None:
        self.posting, self.changed = set(runs), threading.Condition()

    def rest(self, run_id: int) -> None:
        with self.changed:
            self.posting.discard(run_id)
            self.changed.notify_all()

    def wait(self, run_id: int) -> None:
        self.rest(run_id)
        with self.changed:
            assert self.changed.wait_for(lambda: not self.posting, timeout=60)


@pytest.mark.parametrize("number", range(100, 109))
def test_two_runs_that_post_at_once_leave_one_comment_the_newer_runs(bot: Bot, number: int) -> None:
    """Both have looked before either writes; a settling time is longer than a write may take, so it is over once both have."""
    bot.github.add_pull(number, SHA, branch=f"b{number}")
    if number % 3 == 2:
        bot.github.add_comment(number, MARKER.format(1))
    first_writes, settling = threading.Barrier(2), Settling({8, 9})
    to_write = {MARKER.format(run_id) + "text" for run_id in (8, 9)}
    failures: list[BaseException] = []

    def before_write(body: str) -> None:
        if body in to_write:
            to_write.discard(body)
            first_writes.wait(60)

    def run(run_id: int) -> None:
        try:
            api = Api("t", bot.github.address)
            subject = Subject(api.repository("o/r").get_pull(number), number, SHA, SHA, run_id)
            post(api, subject, MARKER.format(run_id) + "text", wait=lambda _: settling.wait(run_id))
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)
        finally:
            settling.rest(run_id)

    bot.github.before_write = before_write
    threads = [threading.Thread(target=run, args=(run_id,)) for run_id in (8, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert to_write == set()
    assert bot.github.bodies(number) == [MARKER.format(9) + "text"]


def test_an_older_write_that_comes_late_is_written_over(bot: Bot, document: RunDocument) -> None:
    """The older run has looked, and its write arrives after the newer one's: the worst that can happen."""
    bot.github.add_comment(12, MARKER.format(1))
    older_sent, newer_done = threading.Event(), threading.Event()

    def before_write(body: str) -> None:
        if body.startswith(MARKER.format(76)):
            older_sent.set()
            newer_done.wait(10)

    bot.github.before_write = before_write
    subject = subject_of(bot.api, "o/r", 77, document)
    older = threading.Thread(
        target=post,
        args=(Api("t", bot.github.address), replace(subject, run_id=76), MARKER.format(76)),
        kwargs={"settle_s": 0.0},
    )
    older.start()
    assert older_sent.wait(10)

    def settle(seconds: float) -> None:
        newer_done.set()
        older.join()

    assert post(bot.api, subject, MARKER.format(77), wait=settle).how == "updated"
    assert bot.github.bodies(12) == [MARKER.format(77)]


def test_the_command_line(bot: Bot, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in bot.environment.items():
        monkeypatch.setenv(name, value)
    arguments = ["comment", "--artifact", str(bot.artifact()), "--repo", "o/r", "--run-id"]
    for run_id, status, said in (("77", 0, "comment created"), ("5", 2, "GitHub refused to read run 5: 404")):
        with pytest.raises(SystemExit) as stop:
            cli.main([*arguments, run_id])
        captured = capfd.readouterr()
        assert (stop.value.code or 0) == status
        assert said in captured.out + captured.err
    monkeypatch.delenv("GITHUB_TOKEN")
    with pytest.raises(SystemExit):
        cli.main([*arguments, "77"])
    assert "GITHUB_TOKEN is not set" in capfd.readouterr().err
