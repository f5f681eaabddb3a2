"""The notice board of a group whose backend compares nothing: ranks write there what they called, and read what others did."""

from __future__ import annotations

import json
import zlib
from collections import deque

from framework.distributed.errors import DistributedError, rank_list
from framework.distributed.store import Store

# So many of a rank's latest calls stand on the board; ranks are seldom further apart.
_RECENT = 32


class Board:
    """Notes in the store, one for each rank of a group: the latest collectives that the rank has come to.

    Beside each stands a checksum of all up to it, so that a difference shows however long ago it was.
    """

    def __init__(self, store: Store, name: str, rank: int, global_ranks: tuple[int, ...]) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._global_ranks = global_ranks
        self._recent: deque[tuple[int, str, int]] = deque(maxlen=_RECENT)
        self._checksum = 0
        self._posted = 0

    def note(self, sequence: int, what: str) -> None:
        """Remembers that this rank called its collective number `sequence`; costs next to nothing."""
        self._checksum = zlib.crc32(what.encode(), self._checksum)
        self._recent.append((sequence, what, self._checksum))

    def post(self) -> None:
        """Puts what is remembered on the board."""
        recent = list(self._recent)
        if recent and recent[-1][0] != self._posted:
            self._posted = recent[-1][0]
            self._store.set(f"{self._name}/board/{self._rank}", json.dumps(recent).encode())

    def difference(self) -> str | None:
        """What the ranks called in place of one collective; None where, as far as can be seen, all called the same."""
        calls = {rank: {number: (what, sum_) for number, what, sum_ in notes} for rank, notes in self._notes().items()}
        mine = {number: (what, sum_) for number, what, sum_ in list(self._recent)}
        for number in sorted(mine):
            others = {rank: found[number] for rank, found in calls.items() if number in found}
            if all(found == mine[number] for found in others.values()):
                continue
            here = others | {self._rank: mine[number]}
            said = "; ".join(f"rank {self._global_ranks[rank]} calls {here[rank][0]}" for rank in sorted(here))
            when = f"number {number}"
            if len({what for what, _ in here.values()}) == 1:
                when = f"some time before number {number}"
            return f"the ranks of group {self._name} do not call the same collective, {when}: {said}"
        return None

    def missing(self, sequence: int, what: str) -> str:
        """Who came to the collective, and who did not, in words."""
        words = f"{what}, number {sequence} of group {self._name}"
        try:
            notes = self._notes()
        except DistributedError as gone:
            return f"{words}: rank 0 has probably ended ({gone})"
        here = [rank for rank, calls in notes.items() if calls[-1][0] >= sequence]
        absent = [rank for rank in range(len(self._global_ranks)) if rank not in here]
        if not absent:
            return f"{words}: all came, but it did not end"
        return f"{words}: {self._words(here)} came, {self._words(absent)} did not"

    def _notes(self) -> dict[int, list[tuple[int, str, int]]]:
        found = {}
        for rank in range(len(self._global_ranks)):
            note = self._store.get(f"{self._name}/board/{rank}")
            if note is not None:
                found[rank] = [(number, what, checksum) for number, what, checksum in json.loads(note)]
        return found

    def _words(self, ranks: list[int]) -> str:
        return rank_list([self._global_ranks[rank] for rank in ranks])
