"""The recipes of CONTRIBUTING.md, followed to the letter in a copy: what they add is found, tested and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Where a recipe puts its code: the first line of each block.
PLACE = re.compile(r"# (?P<file>[\w/]+\.py)(?:, (?:at the end|below `(?P<anchor>[^`]+)`))?")


@pytest.fixture(scope="module")
def copy(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which every Python block of CONTRIBUTING.md was put where it says."""
    root = tmp_path_factory.mktemp("contribution")
    shutil.copy(repository / "pyproject.toml", root)
    for folder in ("framework", "flowbench", "tests"):
        shutil.copytree(repository / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    blocks = re.findall(r"```python\n(.*?)```", (repository / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 9
    for block in blocks:
        first, _, code = block.partition("\n")
        place = PLACE.fullmatch(first)
        assert place, f"a block says where it goes in its first line, not {first!r}"
        insert(root / place["file"], place["anchor"], code)
    (root / "engines-1.dist-info").mkdir()
    (root / "engines-1.dist-info" / "METADATA").write_text("Name: engines\nVersion: 1\n")
    (root / "engines-1.dist-info" / "entry_points.txt").write_text(
        "[flowbench.engines]\nnothing = my_engine:NothingEngine\n"
    )
    return root


def insert(path: Path, anchor: str | None, code: str) -> None:
    """Puts `code` below the line `anchor` of a file, or at its end."""
    before = path.read_text() if path.exists() else ""
    if anchor is None:
        path.write_text(f"{before}\n\n{code}" if before else code)
        return
    assert before.count(f"{anchor}\n") == 1, f"{path.name} has no line {anchor!r} any more, or several"
    path.write_text(before.replace(f"{anchor}\n", f"{anchor}\n{code}"))


def run(copy: Path, *arguments: str) -> str:
    answer = subprocess.run(
        [sys.executable, *arguments],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_each_recipe_names_three_files_at_most(repository: Path) -> None:
    recipes = (repository / "CONTRIBUTING.md").read_text().split("## Recipe: ")[1:]
    assert [recipe.split("\n")[0] for recipe in recipes] == [
        "a kernel",
        "an operation",
        "an engine",
        "a suite",
        "a report",
    ]
    for recipe in recipes:
        files = set(re.findall(r"[\w/]+\.(?:py|toml)\b", recipe))
        assert len(files) <= 3, files


def test_the_kernel_and_the_operation_are_tested(copy: Path) -> None:
    said = run(
        copy, "-m", "pytest", "-q", "-k", "tanh", "tests/framework/kernels/test_reference.py", "tests/framework/ops"
    )
    passed = int(re.search(r"(\d+) passed", said)[1])
    assert passed >= 8
    assert "failed" not in said


def test_the_engine_is_measured_and_the_report_written(copy: Path) -> None:
    size = ["--model", "linear", "--input-shape", "3x4x4", "--batch-size", "2"]
    few = ["--steps", "2", "--pairs", "1", "--threads", "1", "--out", "out"]
    said = run(copy, "-m", "flowbench", "run", "--engine", "nothing", "--reference", "none", *size, *few)
    assert "Nothing" in said
    (document,) = copy.glob("out/*.json")
    code = "import sys; from flowbench import report; from flowbench.record.document import read_document as read"
    text = run(copy, "-c", f"{code}; sys.stdout.write(report.render(read({str(document)!r}), 'tabs'))")
    assert text == "linear [2, 3, 4, 4]\tNothing\t\n"


def test_the_operation_is_compared(copy: Path) -> None:
    options = ["-q", "-p", "flowbench.pytest_plugin", "--flowbench-out=out", "--flowbench-pairs=1"]
    said = run(copy, "-m", "pytest", *options, "-k", "total", "my_suite.py")
    assert re.search(r"^total +[\d.]+ +[\d.]+ +[\d.]+ ", said, re.MULTILINE), said


def test_the_suite_is_collected(copy: Path) -> None:
    said = run(copy, "-m", "pytest", "-q", "-p", "flowbench.pytest_plugin", "--collect-only", "my_suite.py")
    assert "test_training_step[resnet18-2x3x64x64-flow-eager]" in said
