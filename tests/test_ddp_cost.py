"""The script that measures what DDP adds to a step: a real run on the CPU, its figures from times given by hand, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from suites import ddp_cost
from suites.ddp_cost import ALONE, AS_IT_COMES, SENDING

SCRIPT = Path(ddp_cost.__file__)


def test_a_cost_is_the_median_over_turns_of_the_ratio_within_each() -> None:
    # The machine is twice as slow in the last turns: that is in both times of a turn.
    alone = [4.0, 4.0, 8.0, 8.0]
    measured = {ALONE: alone, SENDING: [4.4, 4.2, 8.0, 8.4], AS_IT_COMES: [3.6, 3.6, 7.2, 7.2]}
    assert ddp_cost.row(16, measured) == (
        "| 16 | 6.000 | 6.200 | +5.0 % (+3.8 to +6.3) | 5.400 | -10.0 % (-10.0 to -10.0) |"
    )


def test_a_run_has_a_line_for_each_batch_size() -> None:
    pytest.importorskip("framework")
    setting = "--model resnet18 --image-size 64 --batch-size 1 2 --pairs 2 --steps 1".split()
    ended = subprocess.run([sys.executable, SCRIPT, *setting], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    head, rule, *rows = ended.stdout.splitlines()
    assert [len(line.split("|")) for line in (head, rule, *rows)] == [8] * 4
    assert [row.split("|")[1].strip() for row in rows] == ["1", "2"]


@pytest.mark.parametrize("setting", ["--pairs 1", "--steps 0", "--batch-size 4 0", "--image-size 0", "--device tpu"])
def test_what_cannot_be_measured_is_refused(setting: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refused:
        ddp_cost.main(setting.split())
    assert refused.value.code == 2
    assert setting.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("--model ResNet", "--model is one of resnet18, .*; got 'ResNet'"),
        (
            "--model resnet18 --batch-size 1 --image-size 1",
            r"resnet18 cannot be trained on images \[1, 3, 1, 1\]: batch_norm",
        ),
        ("--batch-size 1000000 --image-size 1000000", r"resnet50 cannot .* 1000000\]: out of memory"),
    ],
)
def test_what_cannot_be_trained_is_named_in_a_line(setting: str, named: str) -> None:
    pytest.importorskip("framework")
    ended = subprocess.run([sys.executable, SCRIPT, *setting.split()], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert re.match(f"ddp_cost.py: error: {named}", ended.stderr.splitlines()[-1])


def test_the_one_that_sends_goes_through_its_groups_backend() -> None:
    """What the script compares is what it says: the collectives of the second are issued, the third has none."""
    code = """
import json
from collections import Counter
import framework as flow
from framework.vm import machine
from suites import ddp_cost
from suites.one_rank import one_rank

seen = Counter()
def block(flow, step, device, steps):
    with machine.observed(lambda instruction, run: (seen.update([instruction.kernel.__name__]), run())):
        step()
    per_side.append({name: count for name, count in seen.items() if name in ("_all_reduce", "_broadcast")})
    seen.clear()
    return 1.0

per_side = []
ddp_cost._block = block
with one_rank(flow, "cpu") as group:
    ddp_cost.measure(flow, "resnet18", (1, 3, 64, 64), "cpu", group, pairs=0, steps=1)
print(json.dumps(per_side))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    alone, sending, as_it_comes = json.loads(ended.stdout)
    assert alone == as_it_comes == {}
    assert sending["_broadcast"] == 1
    assert sending["_all_reduce"] > 1
