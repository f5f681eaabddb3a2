"""`/bench` as a comment: whoever may write starts a run for the commit shown at that time; everyone else is ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowbench.commands import commenting
from flowbench.errors import FlowbenchError
from flowbench.github.api import Api, ApiError

SHA = "a" * 40


@pytest.fixture
def ask(github: Any, tmp_path: Path) -> Any:
    """Handles a comment; gives what was said."""
    github.permissions["maintainer"] = "write"

    def call(body: str = "/bench", login: str = "maintainer", **changes: Any) -> str:
        comment = {"body": body, "user": {"login": login}, "created_at": "2026-11-29T10:00:00Z"}
        payload = {"action": "created", "issue": {"number": 12, "pull_request": {}}, "comment": comment, **changes}
        event = tmp_path / "event.json"
        event.write_text(json.dumps(payload))
        return commenting.dispatch(event, "o/r", "bench.yml", api=Api("t", github.address, lambda seconds: None))

    return call


@pytest.mark.parametrize("body", ["/bench", "  /bench \n", f"/bench {SHA}"])
def test_someone_who_may_write_starts_a_run_for_the_commit_shown(ask: Any, github: Any, body: str) -> None:
    github.activity.append({"timestamp": "2026-11-29T09:59:00Z", "after": SHA})
    assert ask(body) == f"started bench.yml for #12 at {SHA}"
    assert github.dispatched == [{"ref": "main", "inputs": {"pull_request": "12", "commit": SHA}}]


@pytest.mark.parametrize("permission", ["read", "triage", "none", ""])
def test_anyone_else_is_ignored(ask: Any, github: Any, permission: str) -> None:
    github.permissions["visitor"] = permission
    assert ask(login="visitor") == "ignored: visitor may not write to o/r"
    assert ask(login="stranger") == "ignored: stranger may not write to o/r"
    assert github.dispatched == []


@pytest.mark.parametrize("body", ["please /bench", "/benchmark", "/bench abc", "/bench\nrm -rf /", ""])
def test_other_comments_are_ignored_before_anything_is_asked(ask: Any, github: Any, body: str) -> None:
    assert ask(body) == "ignored: no /bench comment on a pull request"
    assert github.log == []


def test_comments_on_issues_and_edited_ones_are_ignored(ask: Any, github: Any) -> None:
    assert ask(issue={"number": 12}).startswith("ignored")
    assert ask(action="edited").startswith("ignored")
    assert github.log == []


def test_a_commit_that_came_after_the_comment_is_not_measured(ask: Any, github: Any) -> None:
    github.activity.append({"timestamp": "2026-11-29T10:00:01Z", "after": SHA})
    assert ask() == f"ignored: #12 was pushed to after the comment; ask for one commit: /bench {SHA}"
    assert ask(f"/bench {SHA}").startswith("started")
    assert ask(f"/bench {'c' * 40}").startswith(
        "ignored: pull request #12 is not open at cccccccccc; it stands at aaaa"
    )
    github.pulls[12]["state"] = "closed"
    assert ask().startswith("ignored: pull request #12 is not open")
    assert len(github.dispatched) == 1


def test_an_event_that_is_none_and_a_workflow_that_is_missing_are_said(ask: Any, github: Any, tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    for content in ("{", "[]", '{"comment": {}}', "[" * 100_000):
        odd.write_text(content)
        with pytest.raises(FlowbenchError, match="expected the payload of issue_comment"):
            commenting.dispatch(odd, "o/r", "bench.yml")
    from fake_github import Fault

    github.faults.append(Fault("POST", "dispatches", 422, message="Unexpected inputs provided"))
    with pytest.raises((ApiError, FlowbenchError), match=r"bench\.yml"):
        ask()
