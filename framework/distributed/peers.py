"""The other ranks' processes on this machine: whether they still run."""

from __future__ import annotations

import os
import select


class Peers:
    """Watches processes, given by the ranks' numbers in a group; costs nothing while nobody asks.

    Where the system cannot watch other processes, none is ever found gone, and timeouts have to do.
    """

    def __init__(self, pids: dict[int, int]) -> None:
        self._descriptors: dict[int, int] = {}
        for rank, pid in pids.items():
            try:
                self._descriptors[rank] = os.pidfd_open(pid)
            except (AttributeError, OSError):
                # Not on Linux; or it is in another container, or has ended already, which its collectives will show.
                continue

    def is_gone(self, rank: int) -> bool:
        """Whether the rank's process has ended."""
        descriptor = self._descriptors.get(rank)
        return descriptor is not None and bool(select.select([descriptor], [], [], 0)[0])

    def gone(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank in self._descriptors if self.is_gone(rank)]

    def close(self) -> None:
        """Stops watching."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
