"""What bounds the choice of a convolution's algorithm: no device is needed to say so."""

from __future__ import annotations

import pytest

from framework.kernels.cuda.plans import FORWARD, Problem, Settings, workspace_limit

MIB = 1 << 20


@pytest.mark.parametrize(
    ("batch", "dtype", "allowed", "limit"),
    [
        (1, "float32", 256 * MIB, 16 * MIB),  # small: any convolution may use so much
        (16, "float32", 256 * MIB, 2 * 4 * (2 * 16 * 64 * 56 * 56 + 64 * 64 * 9)),
        (16, "bfloat16", 256 * MIB, 2 * 2 * (2 * 16 * 64 * 56 * 56 + 64 * 64 * 9)),
        (256, "float32", 256 * MIB, 256 * MIB),
        (256, "float32", 2 * MIB, 2 * MIB),
        (1, "float32", 2 * MIB, 2 * MIB),
    ],
)
def test_scratch_memory_is_bounded_by_operands_and_by_the_setting(batch, dtype, allowed, limit):
    images = (batch, 64, 56, 56)
    problem = Problem(FORWARD, dtype, images, (64, 64, 3, 3), images, (1, 1), (1, 1), (1, 1))
    assert workspace_limit(problem, Settings(True, False, allowed, 8)) == limit
