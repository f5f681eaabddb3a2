"""Whether operations are recorded for backward, per thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any


class _Mode(threading.local):
    recording = True

    def __init__(self) -> None:
        # What it was before each block that this thread is in.
        self.outer: list[bool] = []


mode = _Mode()
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


class _Recording:
    """Switches recording on or off within a `with` block or a decorated function."""

    _recording: bool

    def __new__(cls, function: Callable | None = None) -> Any:
        """Makes one; as a decorator without brackets it decorates."""
        made = super().__new__(cls)
        return made if function is None else made(function)

    def __enter__(self) -> None:
        # Kept by the thread: one object may be entered again within its own block, and by other threads.
        mode.outer.append(mode.recording)
        mode.recording = self._recording

    def __exit__(self, *_: object) -> None:
        mode.recording = mode.outer.pop()

    def __call__(self, function: Callable) -> Callable:
        if any(runs_later(function) for runs_later in _RUN_LATER):
            raise TypeError(
                f"{type(self).__name__} decorates functions that run when they are called, which {function.__qualname__}, a"
                f" generator or coroutine, does not: write `with flow.{type(self).__name__}():` within it"
            )

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with type(self)():
                return function(*args, **kwargs)

        return wrapped


class no_grad(_Recording):
    """Within it, results require no gradient and nothing is kept for backward."""

    _recording = False


class enable_grad(_Recording):
    """Within it, operations are recorded again, inside a `no_grad` block."""

    _recording = True


def is_grad_enabled() -> bool:
    """Whether operations are recorded for backward."""
    return mode.recording
