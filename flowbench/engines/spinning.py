"""A kernel that keeps a GPU busy for a given time and does nothing else: a slowdown of known size."""

from __future__ import annotations

import functools
from typing import Any

# %globaltimer counts nanoseconds (PTX ISA, "Special Registers"), in ticks of about a microsecond on recent GPUs.
_SOURCE = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


def spin(stream: int, milliseconds: float) -> None:
    """Start the kernel on the CUDA stream `stream` (its handle as a number) of the current device; one thread spins."""
    import cupy

    with cupy.cuda.ExternalStream(stream):
        _kernel()((1,), (1,), (cupy.uint64(round(milliseconds * 1e6)),))


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(_SOURCE, "spin")
