"""What bounds the choice of a convolution's algorithm, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from framework.device import Device
from framework.kernels.cuda import plans
from framework.kernels.cuda.plans import FORWARD, Problem, Settings, workspace_limit
from framework.vm import OutOfMemoryError

MIB = 1 << 20
PROBLEM = Problem(FORWARD, "float32", (1, 8, 4, 4), (8, 8, 3, 3), (1, 8, 4, 4), (1, 1), (1, 1), (1, 1))


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


@pytest.mark.parametrize(("free", "found"), [(300, "fast"), (256, "fast"), (255, "small"), (63, "slow")])
def test_near_the_end_of_memory_the_search_is_among_what_fits(free, found, monkeypatch) -> None:
    lent: list[int] = []

    @contextmanager
    def borrowed(device, nbytes):
        if nbytes > free:
            raise OutOfMemoryError("out of memory")
        lent.append(nbytes)
        yield 4096

    _fake_search(monkeypatch, [_Plan("small", 64, 2.0), _Plan("slow", 0, 3.0), _Plan("fast", 256, 1.0)])
    monkeypatch.setattr(plans, "borrowed", borrowed)
    written: list[bytes] = []
    monkeypatch.setattr(plans.disk, "write", lambda kind, key, value: written.append(value))
    choice = plans.choose(PROBLEM, Settings(True, False, 256 * MIB, 8), Device("cuda"), (0, 0, 0))
    assert (choice.plan.name, lent) == (found, [{"fast": 256, "small": 64, "slow": 0}[found]])
    # What only a lack of memory made the best is no word for later processes.
    assert [json.loads(value)["plan"] for value in written] == (["fast"] if found == "fast" else [])


def test_a_search_without_room_for_any_is_out_of_memory(monkeypatch) -> None:
    @contextmanager
    def refused(device, nbytes):
        raise OutOfMemoryError(f"asked for {nbytes}")
        yield

    _fake_search(monkeypatch, [_Plan("fast", 256, 1.0), _Plan("small", 64, 2.0)])
    monkeypatch.setattr(plans, "borrowed", refused)
    with pytest.raises(OutOfMemoryError, match="asked for 64"):
        plans.choose(PROBLEM, Settings(True, False, 256 * MIB, 8), Device("cuda"), (0, 0, 0))


class _Plan(NamedTuple):
    """What stands for a plan of cuDNN, and the milliseconds that it takes."""

    name: str
    workspace_bytes: int
    milliseconds: float

    def text(self) -> bytes:
        return self.name.encode()


def _fake_search(monkeypatch, suggested: list[_Plan]) -> None:
    """Lets a search find these, without a device."""
    monkeypatch.setattr(plans.cudnn, "handle", lambda device: None)
    monkeypatch.setattr(plans, "_key", lambda *given: "key")
    monkeypatch.setattr(plans, "_from_disk", lambda handle, key: None)
    monkeypatch.setattr(plans.cuda, "is_capturing", lambda device: False)
    monkeypatch.setattr(plans, "_suggestions", lambda handle, problem, wanted: (suggested, True))
    monkeypatch.setattr(plans, "_time", lambda plan, addresses, scratch: plan.milliseconds)


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
