"""One comment per pull request, kept up to date: found by marker and author, and never taken back to an older run.

GitHub has no conditional write, so that two runs that post at once can overwrite one another. A write is sent right after a
look, and gives up after the time-out; where another run may be posting, the comment is looked at again once that time is
over: then whatever was sent before one's own write has arrived, and the newer run writes again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from flowbench.errors import FlowbenchError
from flowbench.github.api import MOST_TRIES, TIMEOUT_S, Api, ApiError
from flowbench.github.comment import run_of
from flowbench.github.trust import Subject

AUTHOR = "github-actions[bot]"
_MOST_ROUNDS = 12
_NEARLY_AT_ONCE_S = 600.0


@dataclass(frozen=True)
class Posted:
    """What became of a comment: `outdated` where a newer run has written it already."""

    how: Literal["created", "updated", "unchanged", "outdated"]
    address: str | None


def post(
    api: Api,
    subject: Subject,
    body: str,
    *,
    author: str = AUTHOR,
    others_may_post: bool = True,
    settle_s: float = TIMEOUT_S + 1.0,
    wait: Callable[[float], None] = time.sleep,
) -> Posted:
    """Make the pull request have one comment of ours, of the newest run; raises ApiError where GitHub refuses."""
    how: Literal["created", "updated", "unchanged"] = "unchanged"
    failures = 0
    settled = not others_may_post
    for _ in range(_MOST_ROUNDS):
        ours = _comments(api, subject, author)
        newest = max((run for _, run in ours), default=-1)
        if newest > subject.run_id:
            _remove(api, [comment for comment, run in ours if run == subject.run_id])
            return Posted("outdated", None)
        try:
            if not ours:
                api.write("comment", lambda: subject.pull_request.create_issue_comment(body))
                how = "created"
                continue
            kept, run = ours[0]
            if run != subject.run_id or kept.body.replace("\r\n", "\n") != body:
                api.write("update the comment", functools.partial(kept.edit, body))
                how = "created" if how == "created" else "updated"
                continue
            if len(ours) > 1:
                _remove(api, [comment for comment, _ in ours[1:]])
                continue
        except ApiError as error:
            if error.status == 404 and ours:  # another run removed it since
                continue
            failures += 1
            if failures >= MOST_TRIES or not api.pause(error, failures - 1):
                raise
            continue
        if settled or how == "unchanged":
            return Posted(how, kept.html_url)
        wait(settle_s)
        settled = True
    raise FlowbenchError(
        f"the comment changed {_MOST_ROUNDS} times while it was written: other runs post at the same time"
    )


def others_may_post(api: Api, repository: str, subject: Subject) -> bool:
    """Whether another run for this pull request ended so lately that it may be posting right now."""
    repo = api.repository(repository)
    run = api.read("read the run", lambda: repo.get_workflow_run(subject.run_id))
    asked = {"branch": run.head_branch, "event": run.event}
    lately = api.read("list the runs", lambda: repo.get_workflow(run.workflow_id).get_runs(**asked).get_page(0))
    return any(
        other.id != run.id and abs((other.updated_at - run.updated_at).total_seconds()) < _NEARLY_AT_ONCE_S
        for other in lately
    )


def _comments(api: Api, subject: Subject, author: str) -> list[tuple[Any, int]]:
    """Our comments on all pages with their runs, oldest first."""
    found = api.read("list the comments", lambda: list(subject.pull_request.get_issue_comments()))
    ours = [
        (one, run)
        for one in found
        if one.user and one.user.login == author and (run := run_of(one.body or "")) is not None
    ]
    return sorted(ours, key=lambda pair: pair[0].id)


def _remove(api: Api, comments: list[Any]) -> None:
    for comment in comments:
        try:
            api.write("remove a second comment", comment.delete)
        except ApiError as error:
            if error.status != 404:  # the other run was quicker
                raise
