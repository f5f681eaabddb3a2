"""Whether operations are recorded for backward, per thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Mode(threading.local):
    recording = True


mode = _Mode()


class _Recording:
    """Switches recording on or off within a `with` block or a decorated function."""

    _recording: bool

    def __new__(cls, function: Callable | None = None) -> Any:
        """Makes one; as a decorator without brackets it decorates."""
        made = super().__new__(cls)
        return made if function is None else made(function)

    def __enter__(self) -> None:
        self._before = mode.recording
        mode.recording = self._recording

    def __exit__(self, *_: object) -> None:
        mode.recording = self._before

    def __call__(self, function: Callable) -> Callable:
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
