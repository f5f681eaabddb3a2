"""Named grids of cells, for the command line and for suites."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowbench.cell import Case, Cell, Device
from flowbench.errors import unknown_name

REFERENCE = "torch-eager"
ALL_ENGINES = ("flow-eager", "torch-channels-last", REFERENCE)


@dataclass(frozen=True)
class RankGrid:
    """Cells of several ranks that train together, beside a preset's others: its models and image shapes, by some engines."""

    world_size: int
    batch_sizes: tuple[int, ...]
    engines: tuple[str, ...]


@dataclass(frozen=True)
class Preset:
    """A grid: every model on every image shape [C, H, W] at every batch size, by every engine; and how often.

    That is on each number of ranks in `world_sizes`: several train together (`ddp`), one does so where `ddp` is set.
    `rank_grids` come behind. After `wall_cap_s` no further round is begun, unless a number of pairs was asked for. Without a
    `device` it is for GPUs where there are some, else for the CPU.
    """

    summary: str
    engines: tuple[str, ...]
    models: tuple[str, ...]
    image_shapes: tuple[tuple[int, int, int], ...]
    batch_sizes: tuple[int, ...]
    steps: int
    warmup: int
    pairs: int
    reference: str | None = REFERENCE
    wall_cap_s: float | None = None
    device: Device | None = None
    world_sizes: tuple[int, ...] = (1,)
    ddp: bool = False
    broadcast_buffers: bool = True
    rank_grids: tuple[RankGrid, ...] = ()

    @property
    def all_engines(self) -> tuple[str, ...]:
        """The engines of all cells, each once."""
        return tuple(dict.fromkeys([*self.engines, *(name for grid in self.rank_grids for name in grid.engines)]))

    def cells(self, threads: int, *, shared: bool = False) -> Iterator[Cell]:
        """The cells, case by case; each rank has `threads`, or on a CPU its part of them where they are `shared`."""
        for world_size in self.world_sizes:
            yield from self._cells(RankGrid(world_size, self.batch_sizes, self.engines), threads, shared)
        for grid in self.rank_grids:
            yield from self._cells(grid, threads, shared)

    def _cells(self, grid: RankGrid, threads: int, shared: bool) -> Iterator[Cell]:
        if shared and self.device != "cuda":
            threads = max(1, threads // grid.world_size)
        for model, image_shape, batch_size in itertools.product(self.models, self.image_shapes, grid.batch_sizes):
            case = Case(
                model=model,
                input_shape=(batch_size, *image_shape),
                precision="float32",
                mode="eager",
                world_size=grid.world_size,
                ddp=self.ddp or grid.world_size > 1,
                broadcast_buffers=self.broadcast_buffers,
                backward=True,
                threads=threads,
                device=self.device or "cpu",
            )
            yield from (Cell.of(case, engine) for engine in grid.engines)


IMAGE = (3, 224, 224)
_DDP_ENGINES = ("flow-eager", REFERENCE)

PRESETS = {
    "smoke": Preset(
        "a minute: shows that everything works, proves nothing about speed",
        ALL_ENGINES, ("resnet18",), ((3, 64, 64),), (4, 1), steps=5, warmup=2, pairs=2,
    ),
    "cpu": Preset(
        "the default without a GPU: ResNet50 training, N = 4, 2, 1, and 2, 1 on two ranks, in six minutes at most",
        ALL_ENGINES, ("resnet50",), (IMAGE,), (4, 2, 1), steps=4, warmup=3, pairs=3, wall_cap_s=330, device="cpu",
        rank_grids=(RankGrid(2, (2, 1), _DDP_ENGINES),),
    ),
    "gpu": Preset(
        "the default with a GPU: ResNet50 training, N = 1 to 256, and 1 to 16 on two GPUs, in ten minutes at most",
        ALL_ENGINES, ("resnet50",), (IMAGE,), (256, 128, 64, 32, 16, 8, 4, 2, 1),
        # As many before: CUDA graphs of what comes again are made in the first 16 steps or so.
        steps=20, warmup=20, pairs=2, wall_cap_s=570, device="cuda",
        rank_grids=(RankGrid(2, (16, 8, 4, 2, 1), (*_DDP_ENGINES, "torch-channels-last-static")),),
    ),
    "seed": Preset(
        "the classic setting: ResNet50, 50 steps, N = 16, 8, 4, 2, 1, on one rank and on two",
        ("flow-eager", REFERENCE), ("resnet50",), (IMAGE,), (16, 8, 4, 2, 1), steps=50, warmup=5, pairs=2,
        rank_grids=(RankGrid(2, (16, 8, 4, 2, 1), _DDP_ENGINES),),
    ),
    "full": Preset(
        "hours: all depths of ResNet, N = 16 to 1, ten pairs",
        ALL_ENGINES, ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), (IMAGE,), (16, 8, 4, 2, 1),
        steps=10, warmup=2, pairs=10,
    ),
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """The preset `name`; raises FlowbenchError for an unknown one."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def default_preset(gpus: Sequence[object]) -> str:
    """The preset for a machine with these GPUs."""
    return "gpu" if gpus else "cpu"
