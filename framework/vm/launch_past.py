"""What was launched on a stream one by one, and where it repeats what came earlier: `launch_groups` makes groups of that."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

# Launches that are remembered at most.
_MOST_NOTED = 16384

Run = Callable[[int, Any], None]


class Launch(NamedTuple):
    """`run(stream, key)` launches it; launches of the same function and key are the same."""

    run: Run
    key: Hashable


class LaunchPast:
    """What was launched one by one, and how much of it the latest launches repeat. None stands for whatever lay in between."""

    def __init__(self) -> None:
        self._noted: list[Launch | None] = [None]
        self._last: dict[Launch, int] = {}
        # How many of the latest repeat earlier ones, and where the launch stands that would go on with it.
        self.repeated = 0
        self._next = 0

    def goes_on_with(self, launch: Launch) -> bool:
        """Whether with this launch, too, the latest ones repeat earlier ones; they need not be any."""
        return self._noted[self._next] == launch

    def note(self, launch: Launch) -> None:
        """Adds a launch, which goes on with what is repeated or is the first of something else."""
        goes_on = self.goes_on_with(launch)
        # First of all: what is to be compared next is there, also where a signal ends this in the middle.
        self._noted.append(launch)
        if goes_on:
            self.repeated += 1
            self._next += 1
        else:
            self._next = self._last.get(launch, -1) + 1
            self.repeated = int(self._next > 0)
        self._last[launch] = len(self._noted) - 1

    def take(self) -> tuple[Launch, ...]:
        """The latest launches that repeat earlier ones; what is repeated from now on is counted anew."""
        taken = tuple(self._noted[len(self._noted) - self.repeated :])
        self.repeated = 0
        return taken  # type: ignore[return-value]

    @property
    def is_full(self) -> bool:
        """Whether no more should be added before `interrupt`."""
        return len(self._noted) > _MOST_NOTED

    def interrupt(self) -> None:
        """Nothing that is repeated goes on across this point."""
        self.repeated = self._next = 0
        if self._noted[-1] is not None:
            self._noted.append(None)
        if self.is_full:
            self._last.clear()
            self._noted[1:] = []
