"""Recording: what is issued to a CUDA stream becomes a graph in place of being run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def captured(api: Any, stream: int, issue: Callable[[], object]) -> Iterator[int]:
    """The graph of what `issue` launches on a stream, which is given back at the end. `api` has the calls of CuPy's runtime."""
    graph = 0
    try:
        try:
            # Within the `try`, for a signal handler that raises behind it: the stream would be recorded for ever.
            api.streamBeginCapture(stream, api.streamCaptureModeRelaxed)
            issue()
        finally:
            graph = api.streamEndCapture(stream)
        yield graph
    finally:
        if graph:
            api.graphDestroy(graph)
