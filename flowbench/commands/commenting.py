"""What `flowbench comment` and `flowbench dispatch` do: from an artifact to a comment, from a comment to a run; in words."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowbench.commands.limits import limits_text
from flowbench.errors import FlowbenchError
from flowbench.github.api import Api, ApiError
from flowbench.github.artifact import read_artifact
from flowbench.github.comment import judged, text_of
from flowbench.github.post import AUTHOR, others_may_post, post
from flowbench.github.trust import Subject, subject_of
from flowbench.judge.limits import parse_limits
from flowbench.judge.verdict import ComparisonSet
from flowbench.record.quantities import instant

_REQUEST = re.compile(r"/bench(?:[ \t]+([0-9a-fA-F]{40}))?[ \t]*")
_MAY_ASK = ("admin", "maintain", "write")
_MOST_EVENT_BYTES = 2**20


def comment(
    artifact: Path,
    repository: str,
    run_id: int,
    *,
    limits: Path | None = None,
    dry_run: bool = False,
    check: bool = False,
    author: str = AUTHOR,
    environment: Mapping[str, str] = os.environ,
    api: Api | None = None,
) -> str:
    """Post the report of `artifact`, which run `run_id` made; returns what was done, in a line (with `dry_run`, the comment).

    `limits` are a file of the job's, never the artifact's. Raises FlowbenchError where nothing may be posted. Where the token
    may not comment, the report goes to the job's summary.
    """
    limits_here = limits_text(limits)
    checked = parse_limits(*limits_here) if limits_here is not None else ()
    document = read_artifact(artifact)
    api = api or client(environment)
    subject = subject_of(api, repository, run_id, document)
    body = text_of(subject, document, checked)
    if dry_run:
        return body
    where = f"pull request #{subject.number} of {repository}"
    try:
        posted = post(api, subject, body, author=author, others_may_post=others_may_post(api, repository, subject))
        if check:
            _check(api, repository, subject, judged(document, checked))
    except ApiError as error:
        summary = _write_summary(body, environment)
        if error.status != 403:
            raise
        return f"::notice title=flowbench::{error}; {summary}"
    if posted.how == "outdated":
        return f"{where} has the comment of a newer run already: left as it is"
    return f"comment {posted.how}: {posted.address} ({where})"


def dispatch(
    event: Path, repository: str, workflow: str, environment: Mapping[str, str] = os.environ, api: Api | None = None
) -> str:
    """Start `workflow` for a `/bench` comment by someone who may write; returns what was done, in a line.

    `event` is the payload of issue_comment as GitHub wrote it. What nobody may ask for is ignored, and said.
    """
    payload = _payload(event)
    asked = _REQUEST.fullmatch(payload["comment"]["body"].strip())
    if asked is None or "pull_request" not in payload["issue"] or payload.get("action") != "created":
        return "ignored: no /bench comment on a pull request"
    api = api or client(environment)
    repo = api.repository(repository)
    login, number = payload["comment"]["user"]["login"], payload["issue"]["number"]
    permission = api.read("read a permission", lambda: repo.get_collaborator_permission(login))
    if permission not in _MAY_ASK:
        return f"ignored: {login} may not write to {repository}"
    pull = api.read(f"read pull request {number}", lambda: repo.get_pull(number))
    commit = asked[1].lower() if asked[1] else pull.head.sha
    if pull.state != "open" or commit != pull.head.sha:
        return f"ignored: pull request #{number} is not open at {commit[:10]}; it stands at {pull.head.sha[:10]}"
    if asked[1] is None and _pushed_since(api, pull, payload["comment"]["created_at"]):
        return f"ignored: #{number} was pushed to after the comment; ask for one commit: /bench {commit}"
    default = repo.default_branch
    inputs = {"pull_request": str(number), "commit": commit}
    job = api.read(f"read workflow {workflow}", lambda: repo.get_workflow(workflow))
    started = api.write(f"start {workflow}", lambda: job.create_dispatch(default, inputs))
    if not started:
        raise FlowbenchError(
            f"GitHub did not start {workflow} on {default}; it needs workflow_dispatch with {list(inputs)}"
        )
    return f"started {workflow} for #{number} at {commit}"


def client(environment: Mapping[str, str]) -> Api:
    """The API as a job's environment names it: GITHUB_TOKEN and GITHUB_API_URL."""
    token = environment.get("GITHUB_TOKEN")
    if not token:
        raise FlowbenchError("GITHUB_TOKEN is not set: give the job's token (env: GITHUB_TOKEN: ${{ github.token }})")
    return Api(token, environment.get("GITHUB_API_URL", "https://api.github.com"))


def _check(api: Api, repository: str, subject: Subject, verdicts: ComparisonSet | None) -> None:
    """A check on the measured commit: failed where something is worse or a limit exceeded, neutral where nobody can tell."""
    # 1 and the exit codes of limits say that something is worse, 2 that nobody can tell.
    conclusion = {0: "success", 2: "neutral"}.get(verdicts.exit_code if verdicts else 2, "failure")
    repo = api.repository(repository)
    title = {"failure": "failed", "success": "passed"}.get(conclusion, "not judged")
    output = {"title": f"bench: {title}", "summary": f"see the comment on #{subject.number}"}
    api.write(
        "write the check",
        lambda: repo.create_check_run(
            "bench", subject.commit, status="completed", conclusion=conclusion, output=output
        ),
    )


def _pushed_since(api: Api, pull: Any, commented: str) -> bool:
    """Whether the branch was pushed to after the comment: the commit that its writer saw was another one then."""
    path = f"{pull.head.repo.url}/activity"
    asked = {"ref": f"refs/heads/{pull.head.ref}", "per_page": 30}
    _, entries = api.read("list the pushes", lambda: pull.requester.requestJsonAndCheck("GET", path, parameters=asked))
    return any(instant(entry["timestamp"]) >= instant(commented) for entry in entries)


def _payload(event: Path) -> dict[str, Any]:
    try:
        if event.stat().st_size > _MOST_EVENT_BYTES:
            raise FlowbenchError(f"{event}: larger than an event is, expected the payload of issue_comment")
        payload = json.loads(event.read_bytes())
        shape = payload["comment"]["body"], payload["comment"]["user"]["login"], payload["comment"]["created_at"]
        if not all(isinstance(text, str) for text in shape) or not isinstance(payload["issue"]["number"], int):
            raise TypeError("not of an event's types")
    except OSError as error:
        raise FlowbenchError(f"{event}: {error.strerror}, expected the payload of issue_comment") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FlowbenchError(f"{event}: expected the payload of issue_comment, as in GITHUB_EVENT_PATH") from None
    return payload


def _write_summary(body: str, environment: Mapping[str, str]) -> str:
    """Put the report into the job's summary; returns what became of it, in words."""
    path = environment.get("GITHUB_STEP_SUMMARY")
    if not path:
        return "the report is nowhere: the job has no summary, GITHUB_STEP_SUMMARY is not set"
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(body + "\n")
    except OSError as error:
        return f"the report is nowhere: the job's summary {path} cannot be written: {error.strerror or error}"
    return f"the report is in the job's summary ({path})"
