"""Exchanging small Python values between ranks, through the store: what JSON can hold, tuples come back as lists."""

from __future__ import annotations

import json
from typing import Any

from framework.distributed.groups import Group
from framework.distributed.world import chosen_group

# How long the values are kept for a rank that does not read them; one that has ended never will.
_READ_S = 5.0


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """The values of all ranks, in their order. Raises DistributedError that names those that do not come in time."""
    group = chosen_group(group)
    store = group.world.store
    key = _key(group)
    store.set(f"{key}/{group.rank}", _encode(value))
    values = store.gather(key, group.ranks, group.world.timeout_s)
    _forget(group, key, [f"{key}/{number}" for number in range(group.size)])
    return [json.loads(other) for other in values]


def broadcast_object(value: Any, src: int, group: Group | None = None) -> Any:
    """The value that rank `src` (its number in the world) gives; the other ranks' values are not looked at.

    Raises DistributedError where it does not come in time.
    """
    group = chosen_group(group)
    source = group.index(src)
    store = group.world.store
    key = _key(group)
    if group.rank == source:
        store.set(f"{key}/0", _encode(value))
    (sent,) = store.gather(key, (src,), group.world.timeout_s)
    _forget(group, key, [f"{key}/0"])
    return json.loads(sent)


def _key(group: Group) -> str:
    """A name, the same on every rank of the group, for what is exchanged next."""
    exchanges = group.world.exchanges
    exchanges[group.name] = exchanges.get(group.name, 0) + 1
    return f"{group.name}/exchange/{exchanges[group.name]}"


def _forget(group: Group, key: str, keys: list[str]) -> None:
    """Takes the values out of the store, which otherwise would grow, once all have read them.

    The rank that keeps the store waits for that: it may end after this call, and the store with it.
    """
    store, keeper = group.world.store, 0
    count = store.add(f"{key}/read", 1)
    if keeper in group.ranks:
        is_last = group.world.rank == keeper and store.wait_for_count(f"{key}/read", group.size, _READ_S)
    else:
        is_last = count == group.size
    if is_last:
        for name in [*keys, f"{key}/read"]:
            store.delete(name)


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as refused:
        raise TypeError(
            f"a value to exchange between ranks is made of numbers, text, lists and dictionaries; got {type(value).__name__}"
            f" ({refused})"
        ) from refused
