"""Work: a collective on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from framework.distributed.errors import CollectiveTimeoutError
from framework.vm.stream import Mark

_LOOK_S = 0.0005


class Work:
    """A collective that was issued to a stream: to be asked about, or waited for.

    A failure is kept until somebody waits, since the stream may run in another thread.
    """

    def __init__(self, what: str, on_device: bool) -> None:
        self._what = what
        self._on_device = on_device
        self._called = threading.Event()
        self._error: BaseException | None = None
        self._mark: Mark | None = None
        self._check: Callable[[], None] = lambda: None

    def perform(self, call: Callable[[], None]) -> None:
        """Calls the process group; for the stream."""
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        finally:
            self._called.set()

    def issued(self, mark: Mark, check: Callable[[], None]) -> None:
        """Notes where in its stream it is, and who knows whether the group has failed since."""
        self._mark, self._check = mark, check

    def is_completed(self) -> bool:
        """Whether it is done, without waiting. Raises what it failed of."""
        if not self._called.is_set():
            return False
        self._raise()
        return not self._on_device or self._mark is None or self._mark.stream.is_done(self._mark)

    def wait(self, timeout: float | None = None) -> None:
        """Lets what comes after see the result. Raises CollectiveError where it failed.

        On the CPU this returns when it is done. On a CUDA device the host goes on, since instructions that read the result
        wait there; only with a `timeout`, in seconds, the host waits too. Raises CollectiveTimeoutError where it was not done
        by then; it stays under way.
        """
        if not self._called.wait(timeout):
            raise CollectiveTimeoutError(f"{self._what} was not done within {timeout:g} s; it is still under way")
        self._raise()
        if self._on_device and timeout is not None:
            deadline = time.monotonic() + timeout
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(
                        f"{self._what} was not done within {timeout:g} s; it is still under way"
                    )
                time.sleep(_LOOK_S)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._on_device:
            self._check()

    def __repr__(self) -> str:
        return f"Work({self._what})"
