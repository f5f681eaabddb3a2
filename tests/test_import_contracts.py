"""The rules between rooms: each import contract of pyproject.toml is broken in a copy, and lint has to say so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is not installed here")

STANDS_ALONE = "framework imports neither flowbench nor torch nor pandas"
ONE_SEAM = "flowbench imports framework, torch or cupy only in engines"
KERNELS = "kernels and vm know no autograd"
AUTOGRAD = "autograd knows no op"
OPS = "ops know no device"
PURE = "judge and report do no I/O"
FLOORS = "flowbench's rooms import those below alone"


def broken_contracts(root: Path) -> set[str]:
    """The names of the contracts that lint reports as broken in the checkout at `root`."""
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]
    answer = subprocess.run(lint, cwd=root, capture_output=True, text=True, check=False)
    broken = {line.partition(" BROKEN")[0].strip() for line in answer.stdout.splitlines() if " BROKEN" in line}
    assert bool(answer.returncode) == bool(broken), answer.stdout + answer.stderr
    return broken


@pytest.fixture(scope="module")
def copy(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of both packages and their contracts."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copy(repository / "pyproject.toml", root)
    for package in ("framework", "flowbench"):
        shutil.copytree(repository / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_the_packages_keep_every_rule(copy: Path) -> None:
    assert broken_contracts(copy) == set()


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("framework/tensor.py", "import flowbench", STANDS_ALONE),
        ("framework/nn/__init__.py", "def f():\n    import torch", STANDS_ALONE),
        ("framework/vm/allocator.py", "from pandas import DataFrame", STANDS_ALONE),
        ("flowbench/cell.py", "import framework", ONE_SEAM),
        ("flowbench/record/run.py", "def f():\n    from framework import nn", ONE_SEAM),
        ("flowbench/measure/session.py", "import torch", ONE_SEAM),
        ("flowbench/a_new_room.py", "import cupy", ONE_SEAM),
        ("framework/kernels/table.py", "import framework.autograd", KERNELS),
        ("framework/kernels/reference/a_new_kernel.py", "from framework.tensor import Tensor", KERNELS),
        ("framework/vm/runtime.py", "def f():\n    from framework import autograd", KERNELS),
        ("framework/autograd/__init__.py", "import framework.ops", AUTOGRAD),
        ("framework/ops/__init__.py", "from framework.kernels import reference", OPS),
        ("framework/ops/a_new_op.py", "import framework.kernels.onednn", OPS),
        ("framework/ops/a_new_op.py", "import cupy", OPS),
        ("flowbench/report/__init__.py", "import os", PURE),
        ("flowbench/report/facts.py", "from pathlib import Path", PURE),
        ("flowbench/judge/stats.py", "def f():\n    import time", PURE),
        ("flowbench/record/run.py", "def f():\n    from flowbench.judge import points", FLOORS),
        ("flowbench/measure/session.py", "from flowbench.report import facts", FLOORS),
        ("flowbench/commands/running.py", "import flowbench.cli", FLOORS),
    ],
)
def test_breaking_a_rule_is_found(copy: Path, file: str, line: str, contract: str) -> None:
    path = copy / file
    before = path.read_text() if path.exists() else None
    try:
        path.write_text(f"{before or ''}\n{line}\n")
        assert contract in broken_contracts(copy)
    finally:
        path.unlink() if before is None else path.write_text(before)


def test_engines_may_import_what_they_measure(copy: Path) -> None:
    path = copy / "flowbench" / "engines" / "a_new_engine.py"
    try:
        path.write_text("import cupy\nimport framework as flow\nimport torch\nfrom framework.nn import Module\n")
        assert broken_contracts(copy) == set()
    finally:
        path.unlink()
