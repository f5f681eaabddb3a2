"""What ends the ranks where the launcher was killed: a process that outlives it, this file run by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

# The last word of a launcher that has ended its ranks itself.
_DONE = b"done\n"


class Guard:
    """A process that outlives the launcher: where that is killed, it ends the ranks."""

    def __enter__(self) -> Guard:
        nothing = subprocess.DEVNULL
        # This file by itself, with the standard library alone: it is up in no time.
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, start_new_session=True
        )
        return self

    def add(self, group: int) -> None:
        """Tells it of a rank."""
        self._tell(b"%d\n" % group)

    def __exit__(self, *_: object) -> None:
        self._tell(_DONE)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # Without a guard, because somebody ended it, the ranks are still ended here.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), line)


def signal_group(group: int, number: int) -> None:
    """Sends a signal to a process group; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _guard() -> None:
    """What the guard does: when its input ends without the last word, it ends every rank it was told of."""
    said = sys.stdin.buffer.read().splitlines(keepends=True)
    if _DONE not in said:
        for line in said:
            signal_group(int(line), signal.SIGKILL)


if __name__ == "__main__":
    _guard()
