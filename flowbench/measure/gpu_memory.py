"""What the driver says this process holds on each GPU, also in a container, where it goes by another number there."""

from __future__ import annotations

from collections.abc import Sequence

from flowbench.nvml import Driver, Holders, open_driver, process_ids
from flowbench.record.gpu import GpuUse
from flowbench.record.sample import RankSample

# Less than this is no context: counters of the driver move by themselves.
_NOISE_BYTES = 2**20


class DriverMeter:
    """Looks before this process touches a GPU, and again later. `world_size` processes of one cell, of which it is `rank`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._driver = open_driver()
        self._before = _holders(self._driver) if isinstance(self._driver, Driver) else []

    def read(self) -> tuple[tuple[GpuUse, ...], str]:
        """What is held now on each GPU, and how this process was found there, or why it could not be."""
        if not isinstance(self._driver, Driver):
            return (), self._driver
        return own_use(self._before, _holders(self._driver), process_ids(), self._rank, self._world_size)


def foreign_memory(rank: RankSample) -> list[str]:
    """What a rank holds on GPUs that are not its own, in words: a context there costs some hundred MiB and helps nobody."""
    own = rank.device.partition(":")[2]
    if not own.isdigit():
        return [
            f"rank {rank.rank} trains on the CPU and holds {_mib(use)} on GPU {use.gpu}" for use in rank.memory.gpu_uses
        ]
    return [
        f"rank {rank.rank} holds {_mib(use)} on GPU {use.gpu}, its own is GPU {own}"
        for use in rank.memory.gpu_uses
        if use.gpu != int(own)
    ]


def _mib(use: GpuUse) -> str:
    return f"{use.held_bytes / 2**20:.0f} MiB"


def own_use(
    before: Sequence[Holders], after: Sequence[Holders], pids: frozenset[int], rank: int, world_size: int
) -> tuple[tuple[GpuUse, ...], str]:
    """What one process holds on each GPU `after`, and the words for how it was found among what was there `before`.

    `pids` are the numbers it knows itself by. Where the driver knows it by another (a container), it is the only process that
    came to the GPU of its rank since; where the driver lists none, the growth of the memory in use is what it took.
    """
    known = [{pid: size for pid, size in holders.processes.items() if pid in pids} for holders in after]
    if any(known):
        return _uses(known), "by its process id"
    if rank >= len(after):
        return (), f"not found: the driver lists {len(after)} GPUs, this is rank {rank}"
    came = {pid for pid in after[rank].processes if pid not in before[rank].processes}
    if len(came) == 1:
        (pid,) = came
        known = [{pid: holders.processes[pid]} if pid in holders.processes else {} for holders in after]
        return _uses(known), "as the only process that came to its GPU since (the driver knows it by another id)"
    if came:
        return (), f"not found: {len(came)} processes came to its GPU since, none under an id of its own"
    if world_size > 1:
        return (), "not found: the driver lists no process, and several ranks share what memory is in use"
    return _growth(before, after)


def _uses(known: Sequence[dict[int, int | None]]) -> tuple[GpuUse, ...]:
    """A process that the driver lists without a size is left out."""
    sizes = [[size for size in holders.values() if size is not None] for holders in known]
    return tuple(GpuUse(gpu, sum(held)) for gpu, held in enumerate(sizes) if held)


def _growth(before: Sequence[Holders], after: Sequence[Holders]) -> tuple[tuple[GpuUse, ...], str]:
    grown = [
        (gpu, now.used_bytes - then.used_bytes)
        for gpu, (then, now) in enumerate(zip(before, after, strict=True))
        if now.used_bytes is not None and then.used_bytes is not None
    ]
    uses = tuple(GpuUse(gpu, size) for gpu, size in grown if size >= _NOISE_BYTES)
    if not uses:
        return (), "not found: the driver lists no process, and no more memory is in use than before"
    return uses, "as the growth of the memory in use (the driver lists no process)"


def _holders(driver: Driver) -> list[Holders]:
    return [driver.holders(gpu) for gpu in range(len(driver))]
