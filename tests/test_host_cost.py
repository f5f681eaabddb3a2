"""The script that says what a step costs the host: its figures from times given by hand, a run on the CPU, what it refuses."""

from __future__ import annotations

import re

import pytest

from suites import host_cost
from suites.host_cost import Cost


def test_the_time_of_an_instruction_is_the_steps_over_their_number() -> None:
    # Observed, two steps of three instructions: 50 us within them, in a step of 0.2 ms.
    cost = Cost([0.12, 0.09, 0.15], [0.2, 0.2], {"add": [10.0, 20.0, 10.0, 20.0], "relu": [20.0, 20.0]})
    first, _, _, _, add, relu, between, _, observed = host_cost.text(cost).splitlines()
    assert (
        first
        == "3 instructions in a step, which the host issues in 0.12 ms (lowest 0.09): 40.0 us for each (lowest 30.0)"
    )
    assert add == "| add | 2 | 15.0 (10.0) | 0.030 |"
    assert relu == "| relu | 1 | 20.0 (20.0) | 0.020 |"
    assert between == "| between instructions | | | 0.150 |"
    assert observed == "A step whose instructions are observed takes longer: 0.20 ms."


def test_a_run_counts_every_instruction_of_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("framework")
    monkeypatch.setattr(host_cost, "_WARMUP_STEPS", 1)
    host_cost.main("--device cpu --model resnet18 --image-size 64 --steps 2".split())
    first, _, _, _, *rows = capsys.readouterr().out.splitlines()
    counts = {name: int(count) for name, count in re.findall(r"^\| (\w+) \| (\d+) \|", "\n".join(rows), re.MULTILINE)}
    # 17 in a row and 3 of shortcuts; no gradient of the images.
    assert [counts[f"conv2d{which}"] for which in ("", "_backward_weight", "_backward_input")] == [20, 20, 19]
    assert [counts[name] for name in ("linear", "cross_entropy", "sgd_step")] == [1, 1, 1]
    assert first.startswith(f"resnet18 [1, 3, 64, 64] on cpu: {sum(counts.values())} instructions in a step, ")
    assert rows[-3].startswith("| between instructions |")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--steps 0", "start at 1"),
        ("--batch-size 0", "start at 1"),
        ("--device tpu", "--device"),
        ("--device cpu --model resnet", "resnet cannot be trained on images [1, 3, 224, 224]: there are resnet18, "),
        (
            "--device cpu --model resnet18 --image-size 1",
            "resnet18 cannot be trained on images [1, 3, 1, 1]: batch_norm",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(setting: str, words: str, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("framework")
    with pytest.raises(SystemExit) as refused:
        host_cost.main(setting.split())
    assert refused.value.code == 2
    assert words in capsys.readouterr().err
