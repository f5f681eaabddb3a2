"""The scripts in the workflows: what a job comes to for each exit code of flowbench."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

CODES = [
    (0, "warn", 0, None), (1, "warn", 0, "::notice"), (75, "warn", 0, "::warning"), (75, "fail", 1, "::warning"),
    (2, "warn", 2, "::error"), (3, "warn", 3, "::error"), (130, "fail", 130, "::error"),
]  # fmt: skip


def run_script(
    text: str, tmp_path: Path, exits: int, writes: bool = True, **environment: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the one script of `text` that starts Python, as a job does, with a Python that exits so; also what that was asked for."""
    (script,) = [block for block in _scripts(text) if " -s compare" in block or "python3 -m flowbench" in block]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "bench").mkdir()
    write = f"touch {tmp_path}/bench/run.json;" if writes else ""
    for name, does in {"python3": f'{write} echo "$@" > {tmp_path}/asked; exit {exits}', "git": "echo 0123abc"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    variables = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        **environment,
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    return done, (tmp_path / "asked").read_text().strip()


def _scripts(text: str) -> list[str]:
    blocks = text.split("run: |\n")[1:]
    scripts = []
    for block in blocks:
        indent = len(block) - len(block.lstrip(" "))
        lines = block.splitlines()
        end = next(
            (n for n, line in enumerate(lines) if line.strip() and not line.startswith(" " * indent)), len(lines)
        )
        scripts.append(textwrap.dedent("\n".join(lines[:end])))
    return scripts


@pytest.mark.parametrize(("exits", "if_unclear", "job", "annotation"), CODES)
def test_the_bench_tells_worse_unclear_and_unmeasured_apart(
    exits: int, if_unclear: str, job: int, annotation: str | None, tmp_path: Path, repository: Path
) -> None:
    text = (repository / ".github/workflows/bench.yml").read_text()
    done, asked = run_script(text, tmp_path, exits, BASE="origin/main", IF_UNCLEAR=if_unclear)
    assert asked == f"-m nox -s compare -- 0123abc HEAD --out {tmp_path}/bench --unclear-exit-code 75"
    assert done.returncode == job, done.stderr
    assert done.stdout.startswith(annotation) if annotation else not done.stdout


@pytest.mark.parametrize("exits", [0, 1, 75])
def test_a_bench_that_left_no_document_has_failed(exits: int, tmp_path: Path, repository: Path) -> None:
    text = (repository / ".github/workflows/bench.yml").read_text()
    done, _ = run_script(text, tmp_path, exits, writes=False, BASE="origin/main", IF_UNCLEAR="warn")
    assert (done.returncode, done.stdout.startswith("::error")) == (2, True)


@pytest.mark.parametrize(("exits", "if_unclear", "job", "annotation"), CODES)
def test_the_action_does_so_too(
    exits: int, if_unclear: str, job: int, annotation: str | None, tmp_path: Path, repository: Path
) -> None:
    text = (repository / ".github/actions/measure/action.yml").read_text()
    words = {"COMMAND": "compare", "ARGUMENTS": "main\n\n--pairs\n6\n", "OUT": "out", "IF_UNCLEAR": if_unclear}
    done, asked = run_script(text, tmp_path, exits, GITHUB_OUTPUT=str(tmp_path / "output"), **words)
    assert asked == "-m flowbench compare main --pairs 6 --unclear-exit-code 75 --out out"
    assert (tmp_path / "output").read_text() == f"status={exits}\n"
    assert (done.returncode == 0) == (job == 0), done.stderr
    assert ("::warning" in done.stdout) == (annotation == "::warning" and if_unclear == "warn")
