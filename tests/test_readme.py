"""The README says what was measured, and its code runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flowbench.record.document import read_document
from flowbench.report import render

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RUNS = sorted((ROOT / "reports").glob("cpu-2-cores/*.json"))


def test_the_table_is_that_of_the_document():
    (document,) = RUNS
    facts = json.loads(render(read_document(document), "json"))
    rows = []
    for found in facts["comparisons"]:
        if found["subject"]["engine"] != "flow-eager":
            continue
        own, other, ratio = found["subject"], found["reference"], found["ratio"]
        mib, others_mib = (side["memory"][0]["peaks"]["peak resident"] / 2**20 for side in (own, other))
        rows.append(
            (
                str(found["case"]["input_shape"][0]),
                f"{own['times']['median_ms']:.0f}",
                f"{other['times']['median_ms']:.0f}",
                f"{ratio['geometric_mean']:.2f} ({ratio['lowest']:.2f} - {ratio['highest']:.2f})",
                f"{mib:.0f}",
                f"{others_mib:.0f}: {mib / others_mib:.2f}",
            )
        )
    told = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (.*?) \| (\d+) (?:MiB )?against (.*?) \|$", README, re.MULTILINE)
    assert told == rows


def test_the_quoted_report_is_that_of_the_document():
    (document,) = RUNS
    text = render(read_document(document), "speed-stats")
    (quoted,) = re.findall(r"```\n(CPU Name: .*?)```", README, re.DOTALL)
    assert quoted.strip() in text


@pytest.mark.parametrize("document", RUNS, ids=lambda path: path.parent.name)
@pytest.mark.parametrize(("ending", "form"), [(".txt", "speed-stats"), (".md", "markdown")])
def test_the_texts_beside_a_document_are_made_from_it(document: Path, ending: str, form: str):
    made = render(read_document(document), form)
    assert document.with_suffix(ending).read_text().rstrip() == made.rstrip()


def test_the_code_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 3
