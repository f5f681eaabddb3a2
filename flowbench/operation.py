"""What a suite of single operations gives: functions that prepare one, in a process of their own side's.

A side is a `module`, or a `module:name` in it. Its `start(device, threads)` is called once, with `cpu` or `cuda`; each of its
other functions, called with the arguments of a comparison, prepares the operation of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prepared:
    """An operation that can be called again and again.

    `run` may return before the device is done; `synchronize` waits for it. `results` are the values of the last call, to be
    compared with the other side's.
    """

    run: Callable[[], object]
    results: Callable[[], Sequence[np.ndarray | float]]
    synchronize: Callable[[], object] = lambda: None
