"""The README says what was measured, and its code runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flowbench.record.document import read_document
from flowbench.report import render

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("update", ROOT / "reports" / "update.py")
assert _spec is not None
assert _spec.loader is not None
update = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(update)
README = (ROOT / "README.md").read_text()
RUNS = sorted((ROOT / "reports").glob("cpu-2-cores/*.json"))
ON_GPU = min((ROOT / "reports").glob("h200/*.json"))  # one rank; later ones are of several


def test_what_is_made_from_run_documents_is_up_to_date():
    stale = [path for path, text in update.wanted(ROOT).items() if not path.exists() or path.read_text() != text]
    assert not stale, "run `python reports/update.py`"


def test_readme_has_a_table_for_every_folder_of_reports_and_the_other_way_round():
    named = {folder for _, folder, _, _ in update.MARKED.findall(README)}
    there = {path.parent.relative_to(ROOT).as_posix() for path in update.documents(ROOT / "reports")}
    assert there <= named
    assert "reports/h200" in named


def test_a_document_that_is_dropped_into_a_folder_gets_its_texts_and_its_table(tmp_path: Path):
    folder = tmp_path / "reports" / "box"
    folder.mkdir(parents=True)
    shutil.copy(ON_GPU, folder / "run.json")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- figures: reports/box -->\nold\n<!-- end of figures -->\nafter\n")
    made = update.wanted(tmp_path)
    assert set(made) == {folder / "run.txt", folder / "run.md", readme}
    lines = made[readme].splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    sizes = [cell.input_shape[0] for cell in read_document(ON_GPU).cells if cell.engine == "flow-eager"]
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == ["| N", *(f"| {n}" for n in sizes)]
    assert lines[-3].startswith("From [run](reports/box/run.json), ")


def test_a_run_on_a_gpu_shows_the_hosts_times_and_the_allocators_peaks():
    heads, _, first, *_ = update.table(read_document(ON_GPU))
    assert heads.startswith("| N | Flow, ms | host, ms | PyTorch, ms | relative speed (pairs) | ")
    assert heads.endswith("| peak allocated, MiB | peak reserved, MiB |")
    # As the run's own reports state them: 61.15 and 115.7 ms, 18 807 and 21 592 MiB, 23 076 and 27 252 MiB.
    assert first.startswith("| 256 | 61.1 | 16.3 / 22.4 | 116 | 1.89 (1.89 - 1.90) | ")
    assert first.endswith("| 18807 / 21592: 0.87 | 23076 / 27252: 0.85 |")


def test_the_quoted_report_is_that_of_the_document():
    (document,) = RUNS
    text = render(read_document(document), "speed-stats")
    (quoted,) = re.findall(r"```\n(CPU Name: .*?)```", README, re.DOTALL)
    assert quoted.strip() in text


@pytest.mark.parametrize(("document", "lines"), [("README.md", 3), ("framework/README.md", 1)])
def test_the_code_runs(document: str, lines: int):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == lines
