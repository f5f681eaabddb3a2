"""Two sides measured in turn, operation by operation: each in one process, which idles while the other one works."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowbench.errors import FlowbenchError
from flowbench.measure.guard import Guard
from flowbench.measure.processes import end_marked, last_words, measuring_environment
from flowbench.record.operations import Comparison

# Without an answer for this long a side hangs: plans are made and timed when a shape is met first.
SILENCE_S = 300.0
# A turn is as many calls as take about this long.
TURN_MS = 30.0
_MOST_CALLS = 1000


class Sides:
    """A subject and a reference: the names shown to people, and where the operations of each are (`flowbench.operation`).

    Their processes start with the first comparison, and with the next one after one of them was lost.
    """

    def __init__(self, sources: Mapping[str, str], device: str, threads: int, mark: str) -> None:
        if len(sources) != 2:
            raise FlowbenchError(f"{', '.join(sources)} given, expected two sides: the subject, then the reference")
        self.device, self.threads = device, threads
        self._sources, self._mark = dict(sources), mark
        self._open = contextlib.ExitStack()
        self._processes: dict[str, _Process] = {}

    def compare(
        self,
        operation: str,
        arguments: Mapping[str, Any],
        *,
        tolerance: float,
        rounds: int,
        title: str | None = None,
        label: str = "",
        uses: int = 0,
    ) -> Comparison:
        """Times both sides in turn. Raises FlowbenchError where one fails, or where their results differ by more than allowed.

        People read `title` for the operation, and `label` for what it is done to.
        """
        name = f"{title or operation} {label}".rstrip()
        if not self._processes:
            self._start()
        try:
            difference = self._prepare(operation, arguments)
            if not difference <= tolerance:
                subject, reference = self._sources
                raise FlowbenchError(
                    f"{name}: the results of {subject} and {reference} differ by {difference:.1e} of their norm,"
                    f" allowed is {tolerance:.0e}; a wrong result has no speed"
                )
            times = self._time(rounds)
        except _LostError as lost:
            self.close()
            raise FlowbenchError(f"{name}: {lost}") from None
        subject, reference = self._sources
        return Comparison(
            title or operation, label, uses, self.device, self.threads, subject, reference,
            tuple(times[subject]), tuple(times[reference]), difference,
        )  # fmt: skip

    def close(self) -> None:
        """Ends both processes, and whatever they started."""
        self._processes = {}
        self._open.close()
        end_marked(self._mark)

    def _start(self) -> None:
        self._open = contextlib.ExitStack()
        self._open.enter_context(Guard(self._mark))
        for name, source in self._sources.items():
            process = self._processes[name] = _Process(name, self.threads, self._mark)
            self._open.callback(process.close)
            try:
                process.ask("start", source=source, device=self.device, threads=self.threads)
            except (FlowbenchError, _LostError) as error:
                self.close()
                raise FlowbenchError(str(error)) from None

    def _prepare(self, operation: str, arguments: Mapping[str, Any]) -> float:
        """Prepares both, and returns how far apart their results are."""
        with tempfile.TemporaryDirectory(prefix="flowbench-") as folder:
            results = []
            for number, process in enumerate(self._processes.values()):
                file = str(Path(folder, f"{number}.npz"))
                process.ask("prepare", operation=operation, arguments=dict(arguments), results=file)
                with np.load(file) as arrays:
                    results.append([arrays[key] for key in arrays.files])
        return _difference(*results)

    def _time(self, rounds: int) -> dict[str, list[float]]:
        """Milliseconds a call of each side in each round; every other round has the sides reversed."""
        calls = {}
        for name, process in self._processes.items():
            process.ask("time", calls=1)
            calls[name] = max(1, min(_MOST_CALLS, round(TURN_MS / process.ask("time", calls=2))))
        times: dict[str, list[float]] = {name: [] for name in self._processes}
        for number in range(rounds):
            order = list(self._processes.items())
            for name, process in order if number % 2 == 0 else reversed(order):
                process.ask("time", calls=1)  # wakes its threads, which have slept
                times[name].append(process.ask("time", calls=calls[name]))
        for process in self._processes.values():
            process.ask("drop")
        return times


class _LostError(Exception):
    """A side's process has ended or hangs."""


class _Process:
    """A side's process as its parent sees it."""

    def __init__(self, name: str, threads: int, mark: str) -> None:
        self._name = name
        command_read, self._commands = os.pipe()
        self._answers, answer_write = os.pipe()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has died
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowbench.measure.operation_worker", str(command_read), str(answer_write)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(command_read, answer_write),
            env=measuring_environment(mark, threads),
            start_new_session=True,
        )
        os.close(command_read)
        os.close(answer_write)

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer to a command. Raises FlowbenchError for what failed there, _LostError where no answer comes."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, json.dumps([command, arguments]).encode() + b"\n")
        line = b"".join(self._line())
        if not line.endswith(b"\n"):
            raise _LostError(f"{self._name}: its process ended with status {self._process.wait()}{self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise FlowbenchError(f"{self._name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)
        self._errors.close()

    def _line(self) -> Iterator[bytes]:
        while True:
            if not select.select([self._answers], [], [], SILENCE_S)[0]:
                raise _LostError(f"{self._name}: hangs: no answer for {SILENCE_S:g} s")
            chunk = os.read(self._answers, 65536)
            yield chunk
            if not chunk or chunk.endswith(b"\n"):
                return

    def _last_words(self) -> str:
        self._errors.seek(0)
        return last_words(self._errors.read())


def _difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest relative distance between results; infinite where they are of different number, size, or not finite."""
    if len(ours) != len(theirs) or any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return float("inf")
    distances = [float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)) for a, b in zip(ours, theirs, strict=True)]
    return max((d if np.isfinite(d) else float("inf") for d in distances), default=0.0)
