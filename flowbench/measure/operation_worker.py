"""One side of a comparison of operations, in a process of its own: prepares, calls and times what it is told to.

Started as `python -m flowbench.measure.operation_worker COMMANDS ANSWERS` with two inherited file descriptors; each command
and each answer is a line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from flowbench.measure.processes import die_with_parent, offer_to_memory_killer
from flowbench.operation import Prepared

# Of larger results every k-th value is compared: the same ones on both sides.
_MOST_VALUES = 1 << 20


class Side:
    """The operations of one side, one at a time."""

    def __init__(self) -> None:
        self._operations: Any = None
        self._prepared: Prepared | None = None

    def start(self, source: str, device: str, threads: int) -> None:
        """Imports `module` or `module:name` and lets it choose its device and its threads."""
        module, _, name = source.partition(":")
        self._operations = importlib.import_module(module)
        if name:
            self._operations = getattr(self._operations, name)
        self._operations.start(device, threads)

    def prepare(self, operation: str, arguments: dict[str, Any], results: str) -> None:
        """Prepares an operation, calls it once, and writes what came out to the file `results`."""
        self.drop()
        self._prepared = prepared = getattr(self._operations, operation)(**arguments)
        prepared.run()
        prepared.synchronize()
        arrays = [np.asarray(array, np.float64).reshape(-1) for array in prepared.results()]
        np.savez(Path(results), *[array[:: 1 + array.size // _MOST_VALUES] for array in arrays])

    def time(self, calls: int) -> float:
        """Milliseconds of one of `calls` calls on end, the device done before and after."""
        assert self._prepared is not None, "prepare comes before time"
        run, synchronize = self._prepared.run, self._prepared.synchronize
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        synchronize()
        return (time.perf_counter_ns() - start) / 1e6 / calls

    def drop(self) -> None:
        """Lets go of the operation and its memory."""
        self._prepared = None
        gc.collect()


def main(commands: int, answers: int) -> None:
    """Do what the lines of `commands` say until there are no more."""
    side = Side()
    with os.fdopen(commands, "r") as lines, os.fdopen(answers, "w", buffering=1) as out:
        for line in lines:
            name, arguments = json.loads(line)
            try:
                answer: dict[str, Any] = {"value": getattr(side, name)(**arguments)}
            except Exception as error:  # noqa: BLE001 - whatever an operation raises goes to the parent
                side.drop()
                answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:2000]}
            out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    die_with_parent()
    offer_to_memory_killer()
    main(int(sys.argv[1]), int(sys.argv[2]))
