"""What an artifact belongs to, by the API's word: the workflow run, its commit, and the pull request; never by its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from flowbench.errors import FlowbenchError
from flowbench.github.api import Api
from flowbench.record.run import RunDocument

# The name that bench.yml of the default branch gives to a run that was asked for by a comment.
_ASKED_FOR = re.compile(r"bench #(\d{1,9}) at ([0-9a-f]{40})")


class TrustError(FlowbenchError):
    """The artifact cannot be shown to belong to a pull request."""


@dataclass(frozen=True)
class Subject:
    """A pull request and the commit of it that a run measured. `head` is where the pull request stands now."""

    pull_request: Any
    number: int
    commit: str
    head: str
    run_id: int

    @property
    def is_stale(self) -> bool:
        """Whether the pull request has moved on since."""
        return self.head != self.commit


def subject_of(api: Api, repository: str, run_id: int, document: RunDocument) -> Subject:
    """The pull request that run `run_id` measured; raises TrustError where the document is of another commit than it."""
    repo = api.repository(repository)
    run = api.read(f"read run {run_id}", lambda: repo.get_workflow_run(run_id))
    if run.event == "pull_request":
        commit, pull = run.head_sha, _pull_of_branch(api, repo, run)
    elif run.event == "workflow_dispatch":
        commit, pull = _pull_asked_for(api, repo, run)
    else:
        raise TrustError(
            f"run {run_id} was started by {run.event!r}, expected pull_request, or workflow_dispatch on the default branch"
        )
    measured = _measured_commit(document)
    if measured != commit:
        raise TrustError(
            f"refused: the artifact is of commit {(measured or 'none')[:10]}, run {run_id} was of {commit[:10]}: nothing is"
            " posted for somebody else's numbers"
        )
    return Subject(pull, pull.number, commit, pull.head.sha, run_id)


def _pull_of_branch(api: Api, repo: Any, run: Any) -> Any:
    """The open pull request from the run's own branch; of a fork the API lists none with the run."""
    owner = run.head_repository.owner.login
    asked = {"state": "open", "head": f"{owner}:{run.head_branch}"}
    pulls = api.read("find the pull request", lambda: list(repo.get_pulls(**asked)))
    mine = [
        pull
        for pull in pulls
        if pull.head.ref == run.head_branch and pull.head.repo and pull.head.repo.id == run.head_repository.id
    ]
    if len(mine) != 1:
        raise TrustError(
            f"{len(mine)} open pull requests come from {owner}:{run.head_branch}, expected one; nothing is posted"
        )
    return mine[0]


def _pull_asked_for(api: Api, repo: Any, run: Any) -> tuple[str, Any]:
    """Of a run that was dispatched: its name was given by the workflow file of the default branch, which can be trusted."""
    default = repo.default_branch
    match = _ASKED_FOR.fullmatch(run.display_title or "")
    if run.head_branch != default or match is None:
        raise TrustError(
            f"run {run.id} was dispatched, but not for a pull request on {default}: expected a name like 'bench #12 at SHA'"
        )
    return match[2], api.read(f"read pull request {match[1]}", lambda: repo.get_pull(int(match[1])))


def _measured_commit(document: RunDocument) -> str | None:
    git = document.comparison.head.git if document.comparison is not None else document.git
    return None if git is None or git.dirty else git.commit
