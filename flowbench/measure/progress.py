"""How a sitting's progress is shown: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from flowbench.measure.schedule import Turn
from flowbench.measure.session import Watcher
from flowbench.record.run import Protocol, RunDocument
from flowbench.record.sample import Sample

# A terminal of fewer columns shows a shorter bar, and of a comparison not how many pairs may follow to confirm.
_WIDE = 100

# What the columns of the live line are kept for, beside the text: the longest time left, and the spaces between.
_LEFT_WIDTH = len("about 59 min 59 s left") + 2
_SHORTEST_LABEL = 12


class ProgressDisplay(Watcher):
    """Shows the cell (of a comparison the case, whose engines take turns), the pair and the time left, on standard error.

    `prefix` opens every line, in place of the number of the turn. Where there is no terminal, no two rounds within `every_s`
    seconds are both told.
    """

    def __init__(
        self,
        document: RunDocument,
        *,
        prefix: str = "",
        every_s: float = 0.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._document, self._prefix, self._every_s, self._clock = document, prefix, every_s, clock
        self._steps = _steps_of(document.protocol)
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._bar_width = 20 if self._console.width >= _WIDE else 10
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=self._bar_width),
            _TimeLeft(),
            console=self._console,
            disable=not self._live,
            transient=True,
            get_time=clock,
        )
        self._task = self._bar.add_task("", total=1, ends=0.0, most="about")
        self._number, self._pair = "", ""
        self._done = 0.0
        self._told, self._last_told = True, -math.inf

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
        self._number, self._pair = self._prefix or f"[{number}/{turns}] ", f", {self._pair_words(turn.pair)}"
        together = self._document.comparison is not None
        label = turn.cell.case.label if together else turn.cell.label
        most = "up to" if together else "about"  # a comparison ends when it knows enough
        room = self._console.width - len(self._number + self._pair) - self._bar_width - _LEFT_WIDTH
        room = max(room, _SHORTEST_LABEL)
        cut = label if len(label) <= room else f"{label[: room - 1]}…"
        self._bar.update(
            self._task,
            description=escape(f"{self._number}{cut}{self._pair}"),
            total=turns,
            completed=self._done,
            ends=self._clock() + left_s,
            most=most,
        )
        self._told = self._clock() - self._last_told >= self._every_s
        if not self._live and self._told:
            self._last_told = self._clock()
            self._print(f"{self._number}{label}{self._pair}, {most} {duration(left_s)} left")

    def step(self, step: int) -> None:
        self._bar.update(self._task, completed=self._done + (step + 1) / self._steps)

    def sample(self, sample: Sample) -> None:
        if sample.status != "ok":
            what = f"{sample.status}: {sample.error}"
        else:
            what = f"{statistics.median(sample.steps_ms):.1f} ms per step (median of {len(sample.steps_ms)})"
        cell = self._document.by_key[sample.cell]
        if self._live:
            self._print(f"{self._number}{cell.label}{self._pair}: {what}")
        elif self._told:
            self._print(f"    {cell.engine}: {what}" if self._document.comparison is not None else f"    {what}")

    def _pair_words(self, pair: int) -> str:
        """`pair 1 of 2`; of a comparison the pairs that may follow to confirm are told apart."""
        pairs, plan = self._document.protocol.pairs, self._document.comparison
        if plan is None:
            return f"pair {pair + 1} of {pairs}"
        sampling = pairs - plan.confirmation_pairs
        if pair >= sampling:
            return f"pair {pair - sampling + 1} of {plan.confirmation_pairs} to confirm"
        told = f" (and up to {plan.confirmation_pairs} to confirm)"
        return f"pair {pair + 1} of {sampling}{told if not self._live or self._console.width >= _WIDE else ''}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


class _TimeLeft(ProgressColumn):
    """The time until the task's field `ends`, on the clock of the progress; it goes down between the turns too."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left_s = task.fields["ends"] - task.get_time()
        return Text(f"{task.fields['most']} {duration(left_s)} left" if left_s >= 1 else "longer than thought")


def _steps_of(protocol: Protocol) -> int:
    """All steps of one process, those that do not count too."""
    turns = math.ceil(protocol.steps / (protocol.steps_per_turn or protocol.steps))
    return protocol.warmup + protocol.steps + turns * protocol.untimed_per_turn


def duration(seconds: float) -> str:
    """A duration for people: `45 s`, `4 min 10 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
