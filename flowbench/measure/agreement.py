"""Whether ranks that trained together hold the same weights at the end, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

from flowbench.measure.wire import RankState

# On GPUs ranks may choose their kernels by timing them, each for itself: the same weights then give losses that are this near.
LOSS_TOLERANCE = 1e-4


def compare_states(states: Mapping[int, RankState], *, exact: bool) -> str | None:
    """Where the ranks' states differ, by the first parameter; None where they do not, or fewer than two are known.

    The loss is that on one batch which all see: the same bits where `exact`, else within LOSS_TOLERANCE of rank 0's.
    """
    if len(states) < 2:
        return None
    (first, ours), *others = sorted(states.items())
    for rank, theirs in others:
        for name in dict.fromkeys([*ours.parameters, *theirs.parameters]):
            if ours.parameters.get(name) != theirs.parameters.get(name):
                differing = sum(ours.parameters.get(n) != theirs.parameters.get(n) for n in ours.parameters)
                more = f" and {differing - 1} more" if differing > 1 else ""
                return f"the ranks disagree: {name}{more} of rank {rank} is not that of rank {first}, bit for bit"
        if not _alike(ours.loss, theirs.loss, exact):
            here, there = f"{theirs.loss} on rank {rank}", f"{ours.loss} on rank {first}"
            return f"the ranks disagree: on the same batch the loss is {here}, {there}"
    return None


def _alike(ours: float | None, theirs: float | None, exact: bool) -> bool:
    if ours is None or theirs is None or exact:
        return ours == theirs
    return abs(ours - theirs) <= LOSS_TOLERANCE * abs(ours)
