"""What can go wrong between ranks, each kind with a class of its own."""

from __future__ import annotations


class DistributedError(RuntimeError):
    """Ranks could not be brought together, or not kept together."""


class CollectiveError(DistributedError):
    """A collective could not be done: ranks called different ones, a rank is gone, or the group failed before."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A rank did not come to a collective in time. The message names those that came and those that did not."""


def rank_list(ranks: list[int]) -> str:
    """`rank 3` or `ranks 0, 2, 3`, for messages."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks)) or 'none'}"
