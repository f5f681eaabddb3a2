"""What lies where in the memory that the ranks of a group share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from framework.distributed.segment import Counters

# Small enough to stay in the processor's caches between being written by one rank and read by another.
SLOT_BYTES = 1024 * 1024
# What is shown at a step has been read by whoever has raised its counter this many times since, in every collective. A slot is
# written anew after `_SLOTS` steps; what lies between lets a rank be ahead of the others.
READ_WITHIN = 3
_SLOTS = 6
PIPE_BYTES = 128 * 1024
TEXT_BYTES = 256
_ALIGNMENT = 4096


class Pipe:
    """Where what one rank sends to another lies: two counters and two slots."""

    def __init__(self, first_counter: int, offset: int) -> None:
        self.written, self.read = first_counter, first_counter + 1
        self._offset = offset

    def slot(self, piece: int) -> int:
        return self._offset + piece % 2 * PIPE_BYTES


class Layout:
    """What lies where in the segment of `size` ranks; memory that is never touched costs nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.counters = 3 * size + 2 * size * size
        self._texts = _aligned(self.counters * Counters.STEP_BYTES)
        self._slots = _aligned(self._texts + 2 * size * TEXT_BYTES)
        self._pipes = self._slots + _SLOTS * size * SLOT_BYTES
        self.nbytes = self._pipes + 2 * size * size * PIPE_BYTES

    def entered(self, rank: int) -> int:
        """The counter of the collectives that a rank has come to."""
        return rank

    def step(self, rank: int) -> int:
        """The counter of the steps for which a rank's slot is ready."""
        return self._size + rank

    def gave_up(self, rank: int) -> int:
        """The counter that is not 0 once a rank has failed."""
        return 2 * self._size + rank

    def text(self, rank: int, sequence: int) -> int:
        """Where a rank says which collective it came to. Two in turn are enough: all meet in each."""
        return self._texts + (2 * rank + sequence % 2) * TEXT_BYTES

    def slot(self, rank: int, step: int) -> int:
        return self._slots + (_SLOTS * rank + step % _SLOTS) * SLOT_BYTES

    def pipe(self, src: int, dst: int) -> Pipe:
        number = src * self._size + dst
        return Pipe(3 * self._size + 2 * number, self._pipes + 2 * number * PIPE_BYTES)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def chunks(values: np.ndarray, nbytes: int) -> Iterator[np.ndarray]:
    """Views of a flat array, of `nbytes` at most; an empty one for an empty array, since every collective has a step."""
    return (chunk for _, chunk in places(values, nbytes))


def places(values: np.ndarray, nbytes: int) -> Iterator[tuple[int, np.ndarray]]:
    """As `chunks`, each with the place of its first element."""
    length = nbytes // values.itemsize
    for start in range(0, max(values.size, 1), length):
        yield start, values[start : start + length]


def write_text(room: np.ndarray, text: str) -> None:
    """Puts a text, cut to what fits, at the start of a piece of memory."""
    encoded = text.encode()[: TEXT_BYTES - 2]
    room[:2].view(np.uint16)[0] = len(encoded)
    room[2 : 2 + len(encoded)] = np.frombuffer(encoded, np.uint8)


def read_text(room: np.ndarray) -> str:
    """The text that `write_text` put there."""
    length = min(int(room[:2].view(np.uint16)[0]), TEXT_BYTES - 2)
    return room[2 : 2 + length].tobytes().decode(errors="replace")
