"""What bounds the choice of a convolution's algorithm, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.gpu
def test_a_search_leaves_no_more_memory_reserved_than_what_it_found_needs(tmp_path) -> None:
    program = (
        "import framework as flow\n"
        "model = flow.models.resnet18().to('cuda')\n"
        "for _ in range(3):\n"
        "    model(flow.zeros(8, 3, 224, 224, device='cuda')).sum().backward()\n"
        "print(flow.cuda.memory_reserved())\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    searching, knowing = (
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert searching.stdout == knowing.stdout
