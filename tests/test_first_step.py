"""The script that times a process's first step: what its processes find on disk, a run on the CPU, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suites import first_step


def test_the_first_process_finds_nothing_and_those_behind_it_what_it_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    found: list[list[bool]] = []

    def child(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        places = [Path(env[name]) for name in ("XDG_CACHE_HOME", "CUDA_CACHE_PATH")]
        found.append([place.exists() for place in places])
        for place in places:
            place.mkdir(exist_ok=True)
        return SimpleNamespace(returncode=0, stdout=json.dumps([float(len(found)), 2.5, 0.25]))

    monkeypatch.setattr(first_step.subprocess, "run", child)
    assert first_step.main(["--device", "cpu", "--repeats", "2"]) == 0
    assert found == [[False, False], [True, True], [True, True]]
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| empty | 1.00 | 2.50 | 0.25 |",
        "| kept | 2.00 | 2.50 | 0.25 |",
        "| kept | 3.00 | 2.50 | 0.25 |",
    ]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(first_step.ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, first_step.__file__, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_run_has_a_line_for_each_process() -> None:
    pytest.importorskip("framework")
    ended = run(*"--device cpu --model resnet18 --image-size 32 --batch-size 2 --repeats 1".split())
    assert ended.returncode == 0, ended.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines] == ["caches", "---", "empty", "kept"]
    for _, first, whole, second in lines[2:]:
        assert float(second) > 0
        assert 0 < float(first) < float(whole)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("--repeats 0", "start at 1"),
        (
            "--device cpu --model resnet --batch-size 2",
            "resnet cannot be trained on images [2, 3, 224, 224]: there are ",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(setting: str, words: str) -> None:
    pytest.importorskip("framework")
    ended = run(*setting.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert words in ended.stderr.splitlines()[-1]
