"""What `several_gpus.py` measures on a device, and until when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from suites.several_gpus_figures import BEST, FLOW, PYTORCH

TIME_IS_UP = "the time (--minutes) is up"


@dataclass(frozen=True)
class Setting:
    """What is measured on a device. Each group of batch sizes is a sitting; the first is the one whose scaling counts.

    `turn_s` is about what a fresh process group of each engine takes with all its steps, `others_s` each other part.
    """

    device: str
    model: str
    image_shape: tuple[int, int, int]
    world_sizes: tuple[int, ...]
    ranks: int
    batch_sizes: tuple[tuple[int, ...], ...]
    agreeing_batch_size: int
    turn_s: dict[str, float]
    others_s: float
    memory_kinds: tuple[str, ...]
    all_reduce_bytes: tuple[int, ...]
    steps: int
    warmup: int
    pairs: int | None = None
    out: Path = Path()

    @property
    def reached(self) -> tuple[int, ...]:
        """The world sizes for which there are GPUs; flowbench lists the others with the reason."""
        return tuple(size for size in self.world_sizes if size <= self.ranks)

    @property
    def round_s(self) -> float:
        """About how long one batch size takes at one world size: every engine once."""
        return sum(self.turn_s.values())


# The times of process groups are the medians in the documents of reports/h200.
GPU = Setting(
    "cuda", "resnet50", (3, 224, 224), (8, 4, 2, 1), 8, ((64,), (16,), (8, 4, 2, 1)), 16,
    {FLOW: 5.5, PYTORCH: 13.5, BEST: 13.5}, 20.0, ("peak allocated", "GPU used"),
    (1_000_000, 25_000_000, 100_000_000, 400_000_000), steps=20, warmup=10,
)  # fmt: skip
CPU = Setting(
    "cpu", "resnet18", (3, 64, 64), (2, 1), 2, ((4,), (2,)), 2,
    {FLOW: 3.0, PYTORCH: 6.0}, 10.0, ("peak resident",), (1_000_000, 25_000_000), steps=5, warmup=2, pairs=1,
)  # fmt: skip


@dataclass(frozen=True)
class Deadline:
    """A time of the monotonic clock; `words` say what it means that it has come."""

    at: float
    words: str = TIME_IS_UP

    @property
    def left_s(self) -> float:
        """The seconds until then; below 0 where it has passed."""
        return self.at - time.monotonic()

    def or_after(self, seconds: float) -> Deadline:
        """This one, or so many seconds from now where that is sooner."""
        own = Deadline(time.monotonic() + seconds, f"it had not ended after {seconds:g} s")
        return min(self, own, key=lambda deadline: deadline.at)
