"""Outlives a parent that was killed: when the pipe from it closes, ends every process of its sitting.

Started as `python -m flowbench.measure.guard MARK` with the pipe as standard input.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Self

from flowbench.measure.processes import child_environment, end_marked


class Guard:
    """The guard process of a sitting, as the parent sees it: a context around everything that starts processes."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "flowbench.measure.guard", self._mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # the guard ends what is left, then itself
        self._process.wait()


def main(mark: str) -> None:
    """Wait for the end of the pipe, then end what carries `mark`."""
    sys.stdin.buffer.read()
    end_marked(mark)


if __name__ == "__main__":
    main(sys.argv[1])
