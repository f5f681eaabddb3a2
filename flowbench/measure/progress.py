"""How a sitting's progress is shown: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from flowbench.measure.schedule import Turn
from flowbench.measure.session import Watcher
from flowbench.record.run import RunDocument
from flowbench.record.sample import Sample


class ProgressDisplay(Watcher):
    """Shows the cell, the pair, the step and the time left, on standard error."""

    def __init__(self, document: RunDocument) -> None:
        self._pairs = document.protocol.pairs
        self._steps = document.protocol.steps + document.protocol.warmup
        self._console = Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=not self._live,
            transient=True,
        )
        self._task = self._bar.add_task("", total=1, left="")
        self._where = ""
        self._done = 0.0

    def __enter__(self) -> Self:
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:  # rich before 15 ends even a disabled bar with an empty line
            self._bar.stop()

    def turn(self, turn: Turn, number: int, turns: int, left_s: float) -> None:
        self._done = number - 1
        self._where = f"[{number}/{turns}] {turn.cell.label}, pair {turn.pair + 1} of {self._pairs}"
        left = f"about {duration(left_s)} left"
        self._bar.update(self._task, description=escape(self._where), total=turns, completed=self._done, left=left)
        if not self._live:
            self._console.print(f"{self._where}, {left}", markup=False, soft_wrap=True)

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=self._done + (step + 1) / self._steps)

    def sample(self, sample: Sample) -> None:
        if sample.status != "ok":
            what = f"{sample.status}: {sample.error}"
        else:
            what = f"{statistics.median(sample.steps_ms):.1f} ms per step (median of {len(sample.steps_ms)})"
        text = f"{self._where}: {what}" if self._live else f"    {what}"
        self._console.print(text, markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A duration for people: `45 s`, `4 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
