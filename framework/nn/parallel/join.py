"""Uneven inputs: ranks that have no data left take part in the collectives of those that have."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from framework import distributed
from framework.creation import tensor
from framework.dtype import int64

if TYPE_CHECKING:
    from framework.nn.parallel.data_parallel import DistributedDataParallel

# What a rank is about to do together with all others.
NOTHING_MORE, BUFFERS, GRADIENTS, BUCKETS = 0, 1, 2, 3
_WORDS = {
    NOTHING_MORE: "has no data left",
    BUFFERS: "begins a forward",
    GRADIENTS: "averages gradients",
    BUCKETS: "begins a forward with parameters that were converted, frozen or unfrozen",
}


class Join:
    """The context of `DistributedDataParallel.join()`.

    Every rank says what comes next before each collective of the training. One that leaves the context goes on saying that
    it has nothing more, and does what the others say, until nobody has. Then all take the parameters and buffers of the last.
    """

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._parallel = parallel
        self._last = -1

    def __enter__(self) -> Join:
        self._join(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self._follow()
        finally:
            self._join(None)

    def _join(self, join: Join | None) -> None:
        self._parallel.joining = self._parallel.reducer.joining = join

    def announce(self, what: int) -> int:
        """Says what this rank does next; returns the rank, of those with data, whose buffers count."""
        said, leader = self._say(what, self._parallel.group.rank)
        if said != what:
            raise RuntimeError(
                f"this rank {_WORDS[what]}, another {_WORDS[said]}: all ranks with data do the same steps"
            )
        return leader

    def _follow(self) -> None:
        while True:
            said, leader = self._say(NOTHING_MORE, -1)
            if said == NOTHING_MORE:
                break
            if said == BUFFERS:
                self._parallel.broadcast_buffers_from(leader)
            elif said == BUCKETS:
                self._parallel.make_buckets_again()
            else:
                self._parallel.reducer.send_zeros()
        if self._last >= 0:
            self._parallel.broadcast_all_from(self._last)

    def _say(self, what: int, rank: int) -> tuple[int, int]:
        """What the ranks do next, and the last of those with data (its number in the world)."""
        group = self._parallel.group
        said = tensor([what, rank], dtype=int64, device=self._parallel.device)
        distributed.all_reduce(said, "max", group)
        next_, last = said.tolist()
        if last >= 0:
            self._last = group.ranks[last]
        return next_, self._last
