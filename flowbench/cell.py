"""What is measured: a cell is one engine at one case, and a case is everything engines are compared on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Annotated, Literal
from urllib.parse import quote

from flowbench.codec import Limit

Precision = Literal["float32", "bfloat16", "float64"]
Mode = Literal["eager", "graph"]
Device = Literal["cpu", "cuda"]
Name = Annotated[str, Limit(max_length=200)]
Count = Annotated[int, Limit(minimum=1)]


@dataclass(frozen=True)
class Case:
    """What compared engines share. The input shape is [N, C, H, W] per rank, the threads are per rank."""

    model: Name
    input_shape: tuple[Count, ...]
    precision: Precision
    mode: Mode
    world_size: Count
    ddp: bool
    broadcast_buffers: bool
    backward: bool
    threads: Count
    device: Device = "cpu"

    @functools.cached_property
    def key(self) -> str:
        """One text per case: two different cases never share it. On the CPU it is what it was before there were devices."""
        parts = [
            self.model,
            "x".join(map(str, self.input_shape)),
            self.precision,
            self.mode,
            f"world{self.world_size}",
            "ddp" if self.ddp else "single",
            "buffers" if self.broadcast_buffers else "nobuffers",
            "backward" if self.backward else "forward",
            f"threads{self.threads}",
            *([self.device] if self.device != "cpu" else []),
        ]
        return "/".join(quote(part, safe="") for part in parts)

    @functools.cached_property
    def label(self) -> str:
        """A short text for people: what is always so is left out."""
        words = [f"{self.model} [{', '.join(map(str, self.input_shape))}]"]
        words += [self.precision] if self.precision != "float32" else []
        words += [self.mode] if self.mode != "eager" else []
        words += [f"ddp, world size={self.world_size}"] if self.ddp else []
        words += ["buffers not broadcast"] if not self.broadcast_buffers else []
        words += ["forward only"] if not self.backward else []
        words += [self.device] if self.device != "cpu" else []
        return ", ".join(words)


def cell_name(engine: str, case: Case) -> str:
    """`ENGINE/CASE`, which limits' patterns are matched with and a machine's noise is kept by; a document has `Cell.key`."""
    return f"{engine}/{case.key}"


@dataclass(frozen=True)
class Cell:
    """One engine at one case; it is named by all of its fields."""

    engine: Name
    model: Name
    input_shape: tuple[Count, ...]
    precision: Precision
    mode: Mode
    world_size: Count
    ddp: bool
    broadcast_buffers: bool
    backward: bool
    threads: Count
    device: Device = "cpu"

    # Reports and verdicts ask for these many times over, of thousands of cells.
    @functools.cached_property
    def case(self) -> Case:
        """This cell without its engine: cells of one case are compared."""
        return Case(**{field.name: getattr(self, field.name) for field in fields(Case)})

    @functools.cached_property
    def key(self) -> str:
        """One text per cell: two different cells never share it."""
        return f"{quote(self.engine, safe='')}/{self.case.key}"

    @property
    def label(self) -> str:
        """A short text for people."""
        return f"{self.case.label} {self.engine}"

    @staticmethod
    def of(case: Case, engine: str) -> Cell:
        """The cell of `engine` at `case`."""
        return Cell(engine=engine, **{field.name: getattr(case, field.name) for field in fields(Case)})
