"""Whether the ranks of a group have the same model; where they do not, what is different, by name."""

from __future__ import annotations

from framework import distributed
from framework.nn.module import Module

# name, shape, element type, whether it is learned
Entry = tuple[str, list[int], str, bool]


def check_agreement(module: Module, group: distributed.Group) -> None:
    """Raises ValueError on every rank of the group unless all have the same parameters and buffers, in the same order."""
    parts = {
        "parameter": [_entry(name, p) for name, p in module.named_parameters()],
        "buffer": [_entry(name, b) for name, b in module.named_buffers()],
    }
    everyone = distributed.all_gather_object(parts, group)
    differences = []
    for rank, theirs in zip(group.ranks, everyone, strict=True):
        for kind in parts:
            difference = _difference(kind, [tuple(e) for e in everyone[0][kind]], [tuple(e) for e in theirs[kind]])
            if difference is not None:
                differences.append(f"rank {rank} {difference[0]}, rank {group.ranks[0]} {difference[1]}")
                break
    if differences:
        raise ValueError(
            f"the ranks have different models: {'; '.join(differences[:5])}. Build the same one on every rank"
        )


def _entry(name: str, held: object) -> Entry:
    return name, list(held.shape), held.dtype.name, held.requires_grad  # type: ignore[attr-defined]


def _difference(kind: str, first: list, other: list) -> tuple[str, str] | None:
    """What `other` has at the first place where they differ, and what `first` has there."""
    for number in range(max(len(first), len(other))):
        ours, theirs = (entries[number] if number < len(entries) else None for entries in (first, other))
        if ours != theirs:
            return _words(kind, number, theirs, len(other)), _words(kind, number, ours, len(first))
    return None


def _words(kind: str, number: int, entry: tuple | None, count: int) -> str:
    if entry is None:
        return f"has only {count} {kind}s"
    name, shape, dtype, learned = entry
    frozen = ", frozen" if kind == "parameter" and not learned else ""
    return f"has as {kind} {number} {name} {shape} of {dtype}{frozen}"
