"""Random numbers from Philox4x32-10, a counter-based generator: element i depends on seed and offset + i alone.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011.
"""

from __future__ import annotations

import numpy as np

from framework.kernels.table import kernel
from framework.vm.array import Array

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)
_ROUNDS = 10
# Counters drawn at a time, so that the working set stays in the cache.
_CHUNK = 1 << 14


@kernel(outputs=1)
def random_uniform(out: Array, *, seed: int, offset: int, low: float, high: float) -> None:
    """out ~ U[low, high), from 24 random bits each; `offset` counts the blocks of four numbers drawn before."""
    _draw(out, seed, offset, lambda bits: low + (high - low) * _unit(bits))


@kernel(outputs=1)
def random_normal(out: Array, *, seed: int, offset: int, mean: float, std: float) -> None:
    """out ~ N(mean, std²), by Box and Muller from pairs of uniform numbers; `offset` as for random_uniform."""

    def normal(bits: np.ndarray) -> np.ndarray:
        # 1 - u lies in (0, 1], where the logarithm is finite.
        radius = np.sqrt(-2 * np.log(1 - _unit(bits[:, 0::2])))
        angle = 2 * np.pi * _unit(bits[:, 1::2])
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=2)
        return mean + std * pairs.reshape(bits.shape)

    _draw(out, seed, offset, normal)


def philox(counters: np.ndarray, seed: int) -> np.ndarray:
    """Four random 32-bit words for each 64-bit counter: [n] -> [n, 4], of type uint64 with the upper half 0."""
    c0, c1 = counters & _LOW, counters >> _HIGH_SHIFT
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _HIGH_SHIFT) ^ c1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HIGH_SHIFT) ^ c3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1)


def _draw(out: Array, seed: int, offset: int, transform) -> None:
    count = out.size
    dense = out.ndarray if out.is_contiguous else np.empty(out.shape, out.dtype.numpy)
    flat = dense.reshape(-1)
    for start in range(0, -(-count // 4), _CHUNK):
        stop = min(start + _CHUNK, -(-count // 4))
        bits = philox(np.arange(offset + start, offset + stop, dtype=np.uint64), seed)
        flat[4 * start : 4 * stop] = transform(bits).reshape(-1)[: count - 4 * start]
    if dense is not out.ndarray:
        out.ndarray[...] = dense


def _unit(bits: np.ndarray) -> np.ndarray:
    """Words as numbers in [0, 1), a multiple of 2⁻²⁴ each, which float32 holds exactly."""
    return (bits >> np.uint64(8)) * 2.0**-24
