"""Exchanging small Python values between ranks, through the store: what JSON can hold, tuples come back as lists."""

from __future__ import annotations

import json
from typing import Any

from framework.distributed.errors import DistributedError
from framework.distributed.world import Group, exchange_key, gather_values, world


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """The values of all ranks, in their order."""
    group = group or world().everyone
    return [json.loads(other) for other in gather_values(group, _encode(value), group.world.timeout_s)]


def broadcast_object(value: Any, src: int, group: Group | None = None) -> Any:
    """The value that rank `src` (its number in the world) gives; the other ranks' values are not looked at."""
    group = group or world().everyone
    source = group.index(src)
    current = group.world
    key = exchange_key(group, current)
    if group.rank == source:
        encoded = _encode(value)
        current.store.set(key, encoded)
        return json.loads(encoded)
    sent = current.store.get(key, current.timeout_s)
    if sent is None:
        raise DistributedError(f"rank {src} did not come to broadcast_object within {current.timeout_s:g} s")
    return json.loads(sent)


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as refused:
        raise TypeError(
            f"a value to exchange between ranks is made of numbers, text, lists and dictionaries; got {type(value).__name__}"
            f" ({refused})"
        ) from refused
