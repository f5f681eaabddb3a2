"""A plain installation, with neither oneDNN nor torch: Flow is measured all the same, and the report says what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def environment(tmp_path: Path, repository: Path) -> dict[str, str]:
    """The environment of a Python that finds no oneDNN and no torch, whatever is installed."""
    site = tmp_path / "site"
    info = site / "onednn_cpu_gomp-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onednn-cpu-gomp\nVersion: 0\n")
    (info / "RECORD").write_text("")
    hide = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'torchvision']))\n"
    (site / "sitecustomize.py").write_text(hide)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(repository)])}


def flowbench(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowbench", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_flow_alone_is_measured(environment: dict[str, str], tmp_path: Path) -> None:
    size = ["--model", "resnet18", "--input-shape", "3x32x32", "--batch-size", "2"]
    few = ["--warmup=1", "--steps=1", "--pairs=1"]
    answer = flowbench(environment, tmp_path, "run", *size, *few, "--threads=2", "--out=out")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (path,) = tmp_path.glob("out/*.json")
    document = json.loads(path.read_text())
    assert [sample["status"] for sample in document["samples"]] == ["ok"]
    assert document["reference"] is None
    assert "torch is not installed" in answer.stdout
    assert "no reference" in answer.stdout


def test_doctor_says_so(environment: dict[str, str], tmp_path: Path) -> None:
    said = flowbench(environment, tmp_path, "doctor").stdout
    assert "engine flow-eager: runs on NumPy alone" in said
    assert "torch-eager is missing" in said
