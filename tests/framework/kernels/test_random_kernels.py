"""Random numbers: Philox gives the published words, and what is made of them is distributed as it should be."""

from __future__ import annotations

import numpy as np
import pytest

from framework.device import cpu
from framework.dtype import float32, float64
from framework.kernels.reference import random
from framework.vm import runtime

# The known answers that the authors of Philox4x32-10 publish: counter, key, result; as 32-bit words.
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def philox_by_its_definition(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds over a 128-bit counter, in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ k, second & 0xFFFFFFFF, (first >> 32) ^ d ^ m, first & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_definition_gives_the_published_words(counter: list[int], key: list[int], words: str) -> None:
    assert philox_by_its_definition(counter, key) == [int(word, 16) for word in words.split()]


@pytest.mark.parametrize("counter", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x243F6A8885A308D3])
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x299F31D0A4093822])
def test_the_kernel_gives_the_definitions_words(counter: int, seed: int) -> None:
    # Its counter has 64 bits, the upper half of the generator's 128 is 0.
    got = random.philox(np.array([counter], np.uint64), seed)[0].tolist()
    assert got == philox_by_its_definition([counter & 0xFFFFFFFF, counter >> 32, 0, 0], [seed & 0xFFFFFFFF, seed >> 32])


def test_the_kernel_gives_the_published_words_where_it_can_reach_them() -> None:
    assert random.philox(np.zeros(1, np.uint64), 0)[0].tolist() == [int(word, 16) for word in KNOWN[0][2].split()]


def draw(kernel, count: int, dtype=float32, seed: int = 3, offset: int = 0, **attributes: float) -> np.ndarray:
    out = runtime(cpu).empty((count,), dtype)
    kernel(out, seed=seed, offset=offset, **attributes)
    return out.ndarray.copy()


UNIFORM = {"low": 0.0, "high": 1.0}
NORMAL = {"mean": 0.0, "std": 1.0}
BOTH = [(random.random_uniform, UNIFORM), (random.random_normal, NORMAL)]


def test_uniform_numbers_are_the_words_upper_24_bits() -> None:
    words = [word for counter in (7, 8) for word in philox_by_its_definition([counter, 0, 0, 0], [3, 0])]
    got = draw(random.random_uniform, 8, offset=7, **UNIFORM)
    assert got.tolist() == [(word >> 8) / 2**24 for word in words]


@pytest.mark.parametrize(("kernel", "attributes"), BOTH)
def test_an_element_depends_on_seed_and_place_alone(kernel, attributes: dict[str, float]) -> None:
    whole = draw(kernel, 70_001, **attributes)  # more than is drawn at a time
    assert np.array_equal(whole[:5], draw(kernel, 5, **attributes))
    assert np.array_equal(whole[4 * 16384 :], draw(kernel, 70_001 - 4 * 16384, offset=16384, **attributes))
    assert not np.array_equal(whole[:5], draw(kernel, 5, seed=4, **attributes))
    assert np.array_equal(whole, draw(kernel, 70_001, dtype=float64, **attributes).astype(np.float32))


def test_uniform_numbers_are_uniform() -> None:
    values = draw(random.random_uniform, 200_000, low=-2.0, high=3.0)
    assert values.min() >= -2
    assert values.max() < 3
    # 100 bins of 2,000 ± 44.5: χ² with 99 degrees of freedom has its 0.1 % points at 61 and 149.
    counts = np.histogram(values, bins=100, range=(-2, 3))[0]
    assert 61 < np.sum(np.square(counts - 2000) / 2000) < 149
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(len(values))


def test_normal_numbers_are_normal() -> None:
    count = 200_000
    values = draw(random.random_normal, count, mean=1.5, std=2.0)
    z = (values.astype(np.float64) - 1.5) / 2
    assert np.all(np.isfinite(z))
    # Four standard errors of each moment.
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(z**power) - moment) < 4 * np.sqrt(variance / count), f"moment {power}"
    # The pairs of one radius must not hang together.
    assert abs(np.corrcoef(z[0::2], z[1::2])[0, 1]) < 4 / np.sqrt(count / 2)
    assert abs(np.corrcoef(np.square(z[0::2]), np.square(z[1::2]))[0, 1]) < 4 / np.sqrt(count / 2)
