"""The README says what was measured, and its code runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.cell import Case, Cell
from flowbench.record import run
from flowbench.record.document import document_text
from flowbench.record.sample import Memory, RankSample, Sample
from tests.flowbench.judge.sittings import sitting

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("update", ROOT / "reports" / "update.py")
assert _spec is not None
assert _spec.loader is not None
update = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(update)
README = (ROOT / "README.md").read_text()
MIB = 2**20
CASE = Case("resnet50", (8, 3, 224, 224), "float32", "eager", 1, False, True, True, 2, "cuda")
ENGINES = (
    run.Engine("flow-eager", "Flow", "framework", "0.1.0"),
    run.Engine("torch-eager", "PyTorch", "torch", "2.14.0"),
)


def sample(cell: Cell, pair: int) -> Sample:
    """Three steps of one rank on a GPU, whose times, host times and peaks are easy to follow."""
    slower, larger = (2 + pair / 10, 2) if cell.engine == "torch-eager" else (1, 1)
    steps_ms = tuple(slower * (60 + 2 * pair + step) for step in (2, 0, 1))
    memory = Memory(larger * 600 * MIB, larger * 900 * MIB, 2**31, 2**30)
    rank = RankSample(0, 2, "cuda:0", (), steps_ms, (6.9,) * 3, memory, (slower * 5.0, slower * 5.5, slower * 9.0))
    return Sample(cell.key, pair, 0, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, (rank,))


@pytest.fixture
def document() -> run.RunDocument:
    """A run on a GPU at two sizes, in two pairs; no measurement that is published changes it."""
    cases = (CASE, replace(CASE, input_shape=(4, 3, 224, 224)))
    cells = tuple(Cell.of(case, engine.name) for case in cases for engine in ENGINES)
    machine = run.Machine("A CPU", "x86_64", 2, 2, 2, 2**34, (run.Gpu("A GPU", 2**37),), "580.1", "Linux 6", "3.11.9")
    return run.RunDocument(
        "20261129-100000-abcdef", "2026-11-29T10:00:00Z", "0.1.0", ("flowbench", "run"), "gpu", "torch-eager", ENGINES,
        run.Protocol(3, 0, 2, 2, "mirrored", 0, 1e-4, 0.9, 2e-5, None, None), None, machine, {}, cells,
        tuple(sample(cell, pair) for pair in range(2) for cell in cells), (), (), run.Ending("complete", None, None),
    )  # fmt: skip


def test_what_is_made_from_run_documents_is_up_to_date():
    stale = [path for path, text in update.wanted(ROOT).items() if not path.exists() or path.read_text() != text]
    assert not stale, "run `python reports/update.py`"


def test_readme_leads_to_every_run_document_of_reports():
    """By a table of its folder, or by a page of figures that names it."""
    folders = {folder for _, folder, _, _ in update.MARKED.findall(README)}
    pages = [ROOT / page for page in re.findall(r"\]\((reports/\S+\.md)\)", README)]
    linked = {page.parent / name for page in pages for name in re.findall(r"\]\((\S+\.json)\)", page.read_text())}
    for path in update.documents(ROOT / "reports"):
        assert path.parent.relative_to(ROOT).as_posix() in folders or path in linked, path
    assert all(path.exists() for path in linked)
    assert {"reports/h200", "reports/cpu-2-cores"} <= folders
    assert len(linked) >= 4


def test_a_document_that_is_dropped_into_a_folder_gets_its_texts_its_table_and_its_quotation(
    tmp_path: Path, document: run.RunDocument
):
    folder = tmp_path / "reports" / "box"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(document_text(document))
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- figures: reports/box -->\nold\n<!-- end of figures -->\n"
        "between\n<!-- speed stats: reports/box -->\nold\n<!-- end of speed stats -->\nafter\n"
    )
    made = update.wanted(tmp_path)
    assert set(made) == {folder / "run.txt", folder / "run.md", readme}
    assert "old" not in made[readme]
    before, figures, rest = re.split(r"<!-- (?:end of )?figures.*-->\n", made[readme])
    between, quotation, after = re.split(r"<!-- (?:end of )?speed stats.*-->\n", rest)
    assert (before, between, after) == ("before\n", "between\n", "after\n")
    lines = figures.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == ["| N", "| 8", "| 4"]
    assert lines[-1] == "From [run](reports/box/run.json), A GPU, driver 580.1."
    quoted = quotation.removeprefix("```\n").removesuffix("```\n")
    assert made[folder / "run.txt"].startswith(quoted)
    assert quoted.count("Relative speed: ") == 1


def test_the_texts_of_a_comparison_have_its_verdicts(tmp_path: Path):
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "compared.json").write_text(document_text(sitting({"head": 1.1})))
    (tmp_path / "README.md").write_text("")
    made = update.wanted(tmp_path)
    headline = made[tmp_path / "reports" / "compared.md"].splitlines()[0]
    assert headline.startswith("**1 of 2 cells slower"), headline


def test_a_run_on_a_gpu_shows_the_hosts_times_and_the_allocators_peaks(document: run.RunDocument):
    heads, _, first, *_ = update.table(document)
    assert heads.startswith(
        "| N | Flow, ms | host, ms: Flow / PyTorch | PyTorch, ms | speed relative to PyTorch (pairs) | "
    )
    assert heads.endswith("| peak allocated, MiB: Flow / PyTorch | peak reserved, MiB: Flow / PyTorch |")
    # Medians 61 and 63, PyTorch's 122 and 132.3 ms; the host's 5.5 and 5.5, PyTorch's 11 and 11.55 ms.
    assert first.startswith("| 8 | 62.0 | 5.50 / 11.3 | 127 | 2.05 (2.00 - 2.10) | ")
    assert first.endswith("| 600 / 1200: 0.50 | 900 / 1800: 0.50 |")


def test_no_two_columns_have_one_heading(document: run.RunDocument):
    best = run.Engine("torch-best", "PyTorch-NHWC", "torch", "2.14.0")
    heads = next(update.table(replace(document, engines=(*document.engines, best))))
    assert "| PyTorch-NHWC, ms | speed relative to PyTorch-NHWC (pairs) |" in heads
    names = heads.strip("| ").split(" | ")
    assert len(set(names)) == len(names)
    others = tuple(replace(cell, world_size=2, ddp=True) for cell in document.cells)
    first = next(update.table(replace(document, cells=(*document.cells, *others)))).split(" | ")[0]
    assert (names[0], first) == ("N", "| case")


def test_a_speed_of_too_few_pairs_is_marked(document: run.RunDocument):
    first = replace(document, samples=tuple(one for one in document.samples if one.pair == 0))
    assert "| 2.00 (one pair only) |" in list(update.table(first))[2]
    slow = tuple(replace(rank, steps_ms=(9.0,) * 3) for rank in document.samples[-1].ranks)
    uneven = replace(document, samples=(*document.samples[:-1], replace(document.samples[-1], ranks=slow)))
    assert ", too few pairs) |" in list(update.table(uneven))[3]


def test_the_readme_quotes_a_run():
    assert [folder for _, folder, _, _ in update.QUOTED.findall(README)] == ["reports/cpu-2-cores"]


@pytest.mark.parametrize(("document", "lines"), [("README.md", 3), ("framework/README.md", 1)])
def test_the_code_runs(document: str, lines: int):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == lines
