"""`flowbench store` and `flowbench history` on the command line: words out, exit codes, one line for what goes wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "Flow: 38.0ms\n"


def test_a_run_goes_into_the_store_to_a_branch_and_into_a_history(
    flowbench: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    small = (
        "--model",
        "linear",
        "--input-shape",
        "3x4x4",
        "--reference",
        "none",
        "--engine",
        "toy",
        "--batch-size",
        "2",
    )
    status, _, err = flowbench("run", *small, "--steps", "2", "--pairs", "1", "--threads", "1")
    assert status == 0, err
    (document,) = (tmp_path / "reports/out").glob("*.json")
    assert flowbench("store", "add", str(document)) == (0, "1 run added to reports/store\n", "")
    assert flowbench("store", "add", str(document))[1] == "0 runs added to reports/store, 1 there already\n"
    subprocess.run(["git", "init", "-q", "--bare", "remote.git"], cwd=tmp_path, check=True)
    place = ("--repository", "remote.git", "--remote", str(tmp_path / "remote.git"), "--branch", "runs")
    assert flowbench("store", "push", *place)[:2] == (0, f"1 file pushed to runs of {tmp_path}/remote.git\n")
    assert flowbench("store", "pull", *place, "--store", "other")[0] == 0
    assert flowbench("store", "reindex", "--store", "other")[1] == "1 run and 0 imported points in other\n"
    status, out, err = flowbench("history", "--cell", "linear", "--store", "other")
    assert (status, err) == (0, "")
    assert out.startswith("linear [2, 3, 4, 4] toy\n")
    status, out, _ = flowbench("store", "prune", "--older-than", "0", "--store", "other", "--referred-in", "remote.git")
    assert (status, out.splitlines()[-1]) == (0, "1 run removed")


def test_comments_are_imported(flowbench: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text(TEXT)
    status, out, err = flowbench("history", "import", "--store", "reports/store", "old.txt")
    assert (status, out) == (0, "old.txt: 1 point of 1 cell from 1 text\n")
    assert err.startswith("flowbench: old.txt: 1 point without a date: give it with --date")
    status, out, err = flowbench("history", "--format", "csv")
    assert (status, err) == (0, "")
    assert "imported,unnamed model Flow" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("history",), "reports/store holds no run"),
        (("history", "import", "none.txt"), "none.txt: No such file or directory, expected Speed stats comments"),
        (("store", "push"), "reports/store: no such folder"),
        (("store", "add", "none.json"), "none.json: No such file or directory"),
        (("store", "prune"), "Missing option '--older-than'"),
        (("store", "prune", "--older-than", "nan"), "'nan' is no number of days, expected 0 to 36500"),
        (("store", "pull", "--repository", "."), "git rev-parse failed in ."),
    ],
)
def test_what_cannot_be_is_one_line(
    flowbench: Callable[..., tuple[int, str, str]], arguments: tuple[str, ...], said: str
) -> None:
    status, out, err = flowbench(*arguments)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err
