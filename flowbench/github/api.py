"""GitHub's API, asked with patience: what is temporary is asked again, as long as Retry-After says and within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from flowbench.errors import FlowbenchError

TIMEOUT_S = 10
MOST_TRIES = 5
# Who is told to come back later than this gives up: a job on a hosted runner is paid by the minute.
LONGEST_WAIT_S = 120.0
_TEMPORARY = (429, 500, 502, 503, 504)

Answer = TypeVar("Answer")


class ApiError(FlowbenchError):
    """GitHub said no, in a way that asking again does not change; `status` is None where it never answered."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """A PyGithub client that neither retries nor paces by itself: here it is known which calls may be repeated."""

    def __init__(
        self,
        token: str | None,
        address: str = "https://api.github.com",
        sleep: Callable[[float], None] = time.sleep,
        timeout_s: int = TIMEOUT_S,
    ) -> None:
        github = _library()
        auth = github.Auth.Token(token) if token else None
        self._client = github.Github(
            auth=auth, base_url=address.rstrip("/"), timeout=timeout_s, retry=None, per_page=100,
            seconds_between_requests=0, seconds_between_writes=0, user_agent="flowbench",
        )  # fmt: skip
        self._sleep = sleep
        self._repositories: dict[str, Any] = {}

    def repository(self, name: str) -> Any:
        """The repository `OWNER/NAME`; it is asked for once."""
        if name not in self._repositories:
            self._repositories[name] = self.read(f"read {name}", lambda: self._client.get_repo(name))
        return self._repositories[name]

    def read(self, what: str, call: Callable[[], Answer]) -> Answer:
        """What `call` gives, asked again where the failure is temporary. `what` names it in errors."""
        for attempt in range(MOST_TRIES):
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - what is not GitHub's or the network's is raised again
                wait_s = _wait_s(error, attempt)
                if wait_s is None or attempt == MOST_TRIES - 1:
                    raise _explained(what, error) from None
                self._sleep(wait_s)
        raise AssertionError("unreachable")

    def write(self, what: str, call: Callable[[], Answer]) -> Answer:
        """As `call`, once: whether a write that failed was done has to be looked at before it is repeated."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - as above
            raise _explained(what, error) from None

    def pause(self, error: Exception, attempt: int) -> bool:
        """Wait as a temporary `error` asks; False where it is none, or asks for too long."""
        wait_s = _wait_s(error.__cause__ or error.__context__ or error, attempt)
        if wait_s is None or attempt >= MOST_TRIES - 1:
            return False
        self._sleep(wait_s)
        return True


def _wait_s(error: BaseException, attempt: int) -> float | None:
    """How long to wait before asking again; None where that does not help."""
    github = _library()
    backoff_s = float(2**attempt)
    if isinstance(error, github.GithubException):
        headers = {str(name).lower(): str(value) for name, value in (error.headers or {}).items()}
        limited = "retry-after" in headers or headers.get("x-ratelimit-remaining") == "0"
        if error.status not in _TEMPORARY and not (error.status == 403 and limited):
            return None
        wait_s = _asked_for_s(headers)
        return backoff_s if wait_s is None else wait_s if wait_s <= LONGEST_WAIT_S else None
    return backoff_s if isinstance(error, _network_errors()) else None


def _asked_for_s(headers: dict[str, str]) -> float | None:
    if headers.get("retry-after", "").isdigit():
        return float(headers["retry-after"])
    if headers.get("x-ratelimit-remaining") == "0" and headers.get("x-ratelimit-reset", "").isdigit():
        return max(1.0, float(headers["x-ratelimit-reset"]) - time.time())
    return None


def _explained(what: str, error: Exception) -> Exception:
    github = _library()
    if isinstance(error, github.GithubException):
        said = error.data.get("message") if isinstance(error.data, dict) else error.data
        hint = {
            401: "; the token is not valid",
            403: "; the token may not do this",
            404: "; is the token allowed to see it?",
        }
        text = f"GitHub refused to {what}: {error.status} {str(said or '')[:200]}{hint.get(error.status, '')}"
        return ApiError(text, error.status)
    if isinstance(error, _network_errors()):
        return ApiError(f"GitHub did not answer when asked to {what}: {type(error).__name__}", None)
    return error


def _library() -> Any:
    try:
        import github
    except ImportError:
        raise FlowbenchError("PyGithub is not installed: python -m pip install 'flowbench[github]'") from None
    return github


def _network_errors() -> tuple[type[Exception], ...]:
    import requests

    return (requests.exceptions.ConnectionError, requests.exceptions.Timeout)
