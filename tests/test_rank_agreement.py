"""The script that compares ranks after every step: a run on the CPU, and what it says where a rank goes its own way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from suites import rank_agreement
from tests.framework.distributed.ranks import finish, start

JOB = {"device": "cpu", "model": "resnet18", "shape": [2, 3, 32, 32], "steps": 3, "float64_steps": 2}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(rank_agreement.ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(Path(rank_agreement.__file__)), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_ranks_that_are_alike_have_a_line_for_each_part() -> None:
    pytest.importorskip("framework")
    ended = run(*"--model resnet18 --image-size 32 --batch-size 2 --steps 3 --float64-steps 2".split())
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.splitlines()
    where = "2 ranks, resnet18 [2, 3, 32, 32] each on cpu"
    assert first == f"{where}, float32: after each of 3 steps all 62 parameters are alike bit for bit"
    apart = re.fullmatch(
        re.escape(
            f"{where}, float64, SyncBatchNorm: the losses of 2 steps are those of one rank with [4, 3, 32, 32], within "
        )
        + r"(\S+) \(bar: 1e-05\)",
        second,
    )
    assert apart is not None, second
    assert float(apart[1]) < 1e-10


def test_a_rank_that_drifts_by_one_bit_is_told_with_the_step_and_the_parameter() -> None:
    pytest.importorskip("framework")
    ended = finish(
        start(
            f"""
            from suites import rank_agreement

            plain, steps = flow.optim.SGD.step, []
            def drifting(optimizer):
                plain(optimizer)
                steps.append(1)
                if os.environ["RANK"] == "1" and len(steps) == 2:
                    weight = kept[0].module.layer1[0].conv1.weight
                    weight.detach().numpy().view(np.int32)[0, 0, 0, 0] ^= 1
            kept = []
            parallel = flow.nn.parallel.DistributedDataParallel
            flow.nn.parallel.DistributedDataParallel = lambda module: kept.append(parallel(module)) or kept[-1]
            flow.optim.SGD.step = drifting
            rank_agreement.run_rank({JOB!r})
            """,
            2,
        ),
        timeout_s=300,
    )
    assert [one.status for one in ended] == [1, 1]
    said = "DisagreementError: after step 2 module.layer1.0.conv1.weight of rank {} is not that of rank {}"
    assert said.format(1, 0) in ended[0].text
    assert said.format(0, 1) in ended[1].text


def test_ranks_that_do_not_train_as_one_are_told_with_both_losses() -> None:
    pytest.importorskip("framework")
    zero, _ = finish(
        start(
            f"""
            from suites import rank_agreement

            flow.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module: module
            flow.distributed.init_process_group()
            rank_agreement.train_as_one(flow, {JOB!r})
            """,
            2,
        ),
        timeout_s=300,
    )
    assert zero.status == 1
    assert re.search(r"DisagreementError: step 1: the ranks' mean loss is [\d.]+, one rank's [\d.]+", zero.text), (
        zero.text
    )


@pytest.mark.parametrize("setting", ["--ranks 0", "--steps 0", "--float64-steps 0", "--device tpu"])
def test_what_cannot_be_tried_is_refused(setting: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as refused:
        rank_agreement.main(setting.split())
    assert refused.value.code == 2
    assert setting.split()[0] in capsys.readouterr().err
