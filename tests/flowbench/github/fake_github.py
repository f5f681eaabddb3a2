"""A server that behaves like the part of GitHub's API that the bot uses: pages, rate limits, errors and lost answers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

BOT = "github-actions[bot]"
LARGEST_PAGE = 3  # GitHub's is 100; the smaller one shows whether all pages are read


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that fit: before anything is done, or `after` it was."""

    method: str
    path: str
    status: int | None
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    message: str = "as the test wants it"


@dataclass
class FakeGitHub:
    """One repository `o/r` with its runs, pull requests and comments; `log` has every request."""

    address: str = ""
    runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    pulls: dict[int, dict[str, Any]] = field(default_factory=dict)
    comments: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    permissions: dict[str, str] = field(default_factory=dict)
    activity: list[dict[str, Any]] = field(default_factory=list)
    dispatched: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    log: list[tuple[str, str]] = field(default_factory=list)
    login: str = BOT
    before_write: Callable[[str], None] = lambda body: None
    lock: threading.RLock = field(default_factory=threading.RLock)
    next_id: int = 1000

    def add_pull(self, number: int, sha: str, owner: str = "fork", branch: str = "topic", repo_id: int = 2) -> None:
        repo = {"id": repo_id, "name": "r", "full_name": f"{owner}/r", "url": f"{self.address}/repos/{owner}/r",
                "owner": {"login": owner}}  # fmt: skip
        self.pulls[number] = {
            "number": number, "id": number, "state": "open", "url": f"{self.address}/repos/o/r/pulls/{number}",
            "issue_url": f"{self.address}/repos/o/r/issues/{number}",
            "head": {"ref": branch, "sha": sha, "repo": repo, "label": f"{owner}:{branch}"},
        }  # fmt: skip
        self.comments.setdefault(number, [])

    def add_run(self, run_id: int, sha: str, owner: str = "fork", branch: str = "topic", **changes: Any) -> None:
        self.runs[run_id] = {
            "id": run_id, "head_sha": sha, "head_branch": branch, "event": "pull_request", "display_title": "A title",
            "workflow_id": 7, "updated_at": "2026-11-29T10:00:00Z", "url": f"{self.address}/repos/o/r/actions/runs/{run_id}",
            "head_repository": {"id": 2, "name": "r", "owner": {"login": owner}}, **changes,
        }  # fmt: skip

    def add_comment(self, number: int, body: str, login: str = BOT) -> dict[str, Any]:
        with self.lock:
            self.next_id += 1
            made = {
                "id": self.next_id, "body": body, "user": {"login": login, "id": 1},
                "url": f"{self.address}/repos/o/r/issues/comments/{self.next_id}",
                "html_url": f"https://github.com/o/r/pull/{number}#issuecomment-{self.next_id}",
            }  # fmt: skip
            self.comments[number].append(made)
            return made

    def bodies(self, number: int) -> list[str]:
        return [comment["body"] for comment in self.comments[number]]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        """The answer to one request."""
        for pattern, reply in self.routes.items():
            verb, _, shape = pattern.partition(" ")
            match = re.fullmatch(shape, path)
            if verb == method and match:
                return reply(self, match, query, body)
        return 404, {"message": "Not Found"}

    def _repo(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 200, {"id": 1, "full_name": "o/r", "default_branch": "main", "url": f"{self.address}/repos/o/r"}

    def _run(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        run = self.runs.get(int(match[1]))
        return (200, run) if run else (404, {"message": "Not Found"})

    def _workflow(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 200, {"id": 7, "url": f"{self.address}/repos/o/r/actions/workflows/7"}

    def _runs(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        found = [run for run in self.runs.values() if [run["head_branch"]] == query["branch"]]
        return 200, {"total_count": len(found), "workflow_runs": found}

    def _pull(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        pull = self.pulls.get(int(match[1]))
        return (200, pull) if pull else (404, {"message": "Not Found"})

    def _pulls(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        head = query.get("head", [None])[0]
        return 200, [pull for pull in self.pulls.values() if pull["head"]["label"] == head and pull["state"] == "open"]

    def _comments(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 200, list(self.comments[int(match[1])])

    def _comment(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 201, self.add_comment(int(match[1]), body["body"], self.login)

    def _edit(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        for comments in self.comments.values():
            for comment in comments:
                if comment["id"] == int(match[1]):
                    comment["body"] = body["body"]
                    return 200, comment
        return 404, {"message": "Not Found"}

    def _delete(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        for comments in self.comments.values():
            for comment in comments:
                if comment["id"] == int(match[1]):
                    comments.remove(comment)
                    return 204, None
        return 404, {"message": "Not Found"}

    def _permission(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 200, {"permission": self.permissions.get(match[1], "read")}

    def _dispatch(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        self.dispatched.append(body)
        return 204, None

    def _check(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        self.checks.append(body)
        return 201, {"id": 1, **body, "output": {}}

    def _activity(self, match: re.Match[str], query: dict, body: Any) -> tuple[int, Any]:
        return 200, self.activity

    routes = {
        "GET /repos/o/r": _repo,
        r"GET /repos/o/r/actions/runs/(\d+)": _run,
        r"GET /repos/o/r/actions/workflows/([\w.]+)": _workflow,
        r"GET /repos/o/r/actions/workflows/7/runs": _runs,
        r"POST /repos/o/r/actions/workflows/7/dispatches": _dispatch,
        r"GET /repos/o/r/pulls/(\d+)": _pull,
        r"GET /repos/o/r/pulls": _pulls,
        r"GET /repos/o/r/issues/(\d+)/comments": _comments,
        r"POST /repos/o/r/issues/(\d+)/comments": _comment,
        r"PATCH /repos/o/r/issues/comments/(\d+)": _edit,
        r"DELETE /repos/o/r/issues/comments/(\d+)": _delete,
        r"GET /repos/o/r/collaborators/([\w-]+)/permission": _permission,
        r"POST /repos/o/r/check-runs": _check,
        r"GET /repos/fork/r/activity": _activity,
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    github: FakeGitHub

    def _handle(self) -> None:
        github, parts = self.github, urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        with github.lock:
            github.log.append((self.command, parts.path))
            fault = next(
                (f for f in github.faults if f.times and f.method == self.command and re.search(f.path, parts.path)),
                None,
            )
            if fault:
                fault.times -= 1
        if self.command in ("POST", "PATCH"):
            github.before_write(str(body.get("body")))
        if fault and not fault.after:
            self._fail(fault)
            return
        with github.lock:
            status, answer = github.answer(self.command, parts.path, parse_qs(parts.query), body)
            if isinstance(answer, list):
                answer, headers = self._page(answer, parts.path, parse_qs(parts.query))
            else:
                headers = {}
            content = b"" if answer is None else json.dumps(answer).encode()
        if fault:
            self._fail(fault)
            return
        self._send(status, content, headers)

    def _page(self, rows: list[Any], path: str, query: dict[str, list[str]]) -> tuple[list[Any], dict[str, str]]:
        size = min(LARGEST_PAGE, int(query.get("per_page", ["30"])[0]))
        page = int(query.get("page", ["1"])[0])
        more = len(rows) > page * size
        link = f'<{self.github.address}{path}?page={page + 1}&per_page={size}>; rel="next"'
        return rows[(page - 1) * size : page * size], {"Link": link} if more else {}

    def _fail(self, fault: Fault) -> None:
        if fault.status is None:  # the answer is lost
            self.close_connection = True
            self.connection.close()
            return
        self._send(fault.status, json.dumps({"message": fault.message}).encode(), fault.headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _handle

    def log_message(self, *arguments: object) -> None:
        """Nothing: the log is a list."""


@contextmanager
def serving() -> Iterator[FakeGitHub]:
    """A server on a free port of this machine."""
    github = FakeGitHub()
    handler = type("Handler", (_Handler,), {"github": github})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    github.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield github
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def stall(seconds: float) -> None:
    """As long as a slow network takes."""
    time.sleep(seconds)
