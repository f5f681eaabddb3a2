"""The watchdog of a group whose collectives run on a device: a thread that sees when one does not end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from framework.distributed.board import Board
from framework.distributed.errors import CollectiveError, CollectiveTimeoutError, DistributedError, rank_list
from framework.distributed.peers import Peers

if TYPE_CHECKING:
    from framework.distributed.groups import Group

# Whoever looks takes the interpreter from the thread that trains.
_LOOK_S = 0.2
# How often what the ranks called is compared, and for how long after the last call.
_COMPARE_S = 1.0
_SETTLE_S = 3.0
# How long after a rank's end what it took part in may still be under way here.
_GONE_S = 1.0


class Event(Protocol):
    """A point in a device's work."""

    def has_passed(self) -> bool:
        """Whether all before it has run."""
        ...


class Communicator(Protocol):
    """What the watchdog asks of NCCL's communicator."""

    def check_async_error(self) -> None:
        """Raises RuntimeError where something went wrong since."""
        ...

    def abort(self) -> None:
        """Ends what is under way, without the other ranks."""
        ...


@dataclass(slots=True)
class Flight:
    """A collective under way: its number (None for one between two ranks), its words, and the event behind it."""

    sequence: int | None
    what: str
    event: Event
    since: float = field(default_factory=time.monotonic)


class Watchdog:
    """Looks at the collectives of a group until `stop`. After a failure the communicator is aborted, and `failure` says why.

    `prepare` is called first in the thread.
    """

    def __init__(self, group: Group, name: str, communicator: Communicator, prepare: Callable[[], None]) -> None:
        self.failure: CollectiveError | None = None
        self._name = name
        self._timeout_s = group.world.timeout_s
        self._communicator = communicator
        self._prepare = prepare
        self._board = Board(group.world.store, name, group.rank, group.ranks)
        self._global_ranks = group.ranks
        self._peers = Peers(group.neighbours())
        self._under_way: deque[Flight] = deque()
        self._busy = self._compared = 0.0
        self._gone_since: float | None = None
        self._work = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._look, name=f"flow-watchdog {name}", daemon=True)
        self._thread.start()

    def watch(self, flight: Flight) -> None:
        """Takes a collective that was just enqueued."""
        if flight.sequence is not None:
            self._board.note(flight.sequence, flight.what)
        self._under_way.append(flight)
        if not self._work.is_set():
            self._work.set()

    def compare(self) -> None:
        """Raises CollectiveError where the ranks, as far as they have said so on the board, called different collectives."""
        self._board.post()
        difference = self._board.difference()
        if difference is not None:
            raise CollectiveError(difference)

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._work.set()
        self._thread.join()
        self._peers.close()

    def _look(self) -> None:
        self._prepare()
        while not self._stopped and self.failure is None:
            if not self._under_way and time.monotonic() > self._busy + _SETTLE_S:
                # Nothing to look at, and the others have had time to say what they called: sleeps until there is.
                self._work.wait()
                self._work.clear()
                continue
            time.sleep(_LOOK_S)
            try:
                self._look_once()
            except CollectiveError as failure:
                self.failure = failure
                self._communicator.abort()
            except RuntimeError as error:
                self.failure = CollectiveError(f"{self._oldest()}: {error}")
                self._communicator.abort()

    def _look_once(self) -> None:
        """Raises CollectiveError where a collective will not end, RuntimeError where the device or NCCL says so."""
        now = time.monotonic()
        if self._under_way:
            self._busy = now
        for _ in range(self._count_passed()):
            self._under_way.popleft()
        if now - self._compared > _COMPARE_S:
            self._compared = now
            self._compare_if_possible()
        if not self._under_way:
            return
        self._communicator.check_async_error()
        gone = self._peers.gone()
        # One that has done its part may end a moment before this rank's event passes.
        self._gone_since = (self._gone_since or now) if gone else None
        if self._gone_since is not None and now - self._gone_since > _GONE_S:
            ended = rank_list([self._global_ranks[rank] for rank in gone])
            raise CollectiveError(f"{self._oldest()}: {ended} ended")
        flight = self._under_way[0]
        if now - flight.since > self._timeout_s:
            raise CollectiveTimeoutError(f"{self._missing(flight)} within {self._timeout_s:g} s")

    def _count_passed(self) -> int:
        """How many have ended. A communicator's collectives end in order, so few of their events need be asked."""
        passed, under_way = 0, len(self._under_way)
        ask = under_way - 1  # all of them, where the device is not behind
        while passed < under_way:
            if self._under_way[ask].event.has_passed():
                passed = ask + 1
            else:
                under_way = ask
            ask = (passed + under_way) // 2
        return passed

    def _compare_if_possible(self) -> None:
        try:
            self.compare()
        except CollectiveError:
            raise
        except DistributedError as gone:
            # Rank 0 has ended, and the store with it. That matters if something is still under way.
            if self._under_way:
                raise CollectiveError(f"{self._oldest()}: {gone}") from gone

    def _missing(self, flight: Flight) -> str:
        if flight.sequence is None:
            return f"{flight.what} of group {self._name}: it did not come"
        return self._board.missing(flight.sequence, flight.what)

    def _oldest(self) -> str:
        flight = self._under_way[0] if self._under_way else None
        return f"{flight.what if flight else 'a collective'} of group {self._name}"
