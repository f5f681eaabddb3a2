"""Work: a collective on its way."""

from __future__ import annotations

import time
from collections.abc import Callable

from framework.distributed.errors import CollectiveTimeoutError
from framework.vm.machine import machine
from framework.vm.stream import Mark

_LOOK_S = 0.0005


class Work:
    """A collective that was issued to a stream: to be asked about, or waited for.

    `check` raises if the collective's group has failed; `what` gives the collective's words, should they be needed.
    """

    def __init__(self, what: Callable[[], str], mark: Mark, check: Callable[[], None]) -> None:
        self._what = what
        self._mark = mark
        self._check = check

    def is_completed(self) -> bool:
        """Whether it is done, without waiting. Raises what it failed of."""
        if not self._mark.stream.is_done(self._mark):
            return False
        machine.join(self._mark)
        self._check()
        return True

    def wait(self, timeout: float | None = None) -> None:
        """Lets what comes after see the result. Raises CollectiveError where it failed.

        On the CPU this returns when it is done. On a CUDA device the host goes on, since instructions that read the result
        wait there; only with a `timeout`, in seconds, the host waits too. Raises CollectiveTimeoutError where it was not done
        by then; it stays under way.
        """
        if timeout is not None:
            deadline = time.monotonic() + timeout
            while not self.is_completed():
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(f"{self._what()} is still under way after {timeout:g} s")
                time.sleep(_LOOK_S)
        machine.join(self._mark)
        self._check()

    def __repr__(self) -> str:
        return f"Work({self._what()})"
