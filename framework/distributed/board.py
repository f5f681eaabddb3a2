"""The notice board of a group whose backend cannot tell who came: ranks that wait write there what they wait in."""

from __future__ import annotations

import json

from framework.distributed.errors import DistributedError, rank_list
from framework.distributed.store import Store


class Board:
    """Notes in the store, one for each rank of a group: the latest collective that the rank has come to."""

    def __init__(self, store: Store, name: str, rank: int, global_ranks: tuple[int, ...]) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._global_ranks = global_ranks

    def post(self, sequence: int, what: str) -> None:
        """Notes that this rank waits in its collective number `sequence`."""
        self._store.set(f"{self._name}/board/{self._rank}", json.dumps([sequence, what]).encode())

    def missing(self, sequence: int, what: str) -> str:
        """Who came to the collective, and who did not, in words."""
        try:
            notes = self._notes()
        except DistributedError as gone:
            return f"{what}, number {sequence} of group {self._name}: rank 0 has probably ended ({gone})"
        here = [rank for rank, (number, _) in notes.items() if number >= sequence]
        absent = [rank for rank in range(len(self._global_ranks)) if rank not in here]
        words = f"{what}, number {sequence} of group {self._name}"
        if not absent:
            return f"{words}: all came, but it did not end"
        return f"{words}: {self._words(here)} came, {self._words(absent)} did not"

    def difference(self, sequence: int, what: str) -> str | None:
        """What the ranks call instead of one collective, where they wait in different ones of this number; None otherwise."""
        calls = {rank: text for rank, (number, text) in self._notes().items() if number == sequence}
        if all(text == what for text in calls.values()):
            return None
        said = "; ".join(f"rank {self._global_ranks[rank]} calls {text}" for rank, text in calls.items())
        return f"the ranks of group {self._name} do not call the same collective, number {sequence}: {said}"

    def _notes(self) -> dict[int, tuple[int, str]]:
        found = {}
        for rank in range(len(self._global_ranks)):
            note = self._store.get(f"{self._name}/board/{rank}")
            if note is not None:
                number, text = json.loads(note)
                found[rank] = (number, text)
        return found

    def _words(self, ranks: list[int]) -> str:
        return rank_list([self._global_ranks[rank] for rank in ranks])
