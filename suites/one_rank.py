"""A process group of this process alone, whose collectives are sent like those of several ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_rank(flow: Any, device: str) -> Iterator[Any]:
    """A group of one rank that goes through NCCL on a GPU, and through shared memory on a CPU.

    Without a backend of its own a group of one rank sends nothing.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    flow.distributed.init_process_group()
    try:
        yield flow.distributed.new_group([0], backend="shm" if device == "cpu" else "nccl")
    finally:
        flow.distributed.destroy_process_group()
