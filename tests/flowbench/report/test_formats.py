"""Formats for other programs, read back as those read them: JUnit XML, OpenMetrics, CSV, Parquet; and Markdown's limit."""

from __future__ import annotations

import dataclasses
import io
import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from flowbench import report
from flowbench.report.facts import facts_of

pandas = pytest.importorskip("pandas", reason="pandas is not installed: python -m pip install 'flowbench[report]'")


def rendered(situation: Any, form: str) -> str:
    return report.render(situation.document, form, comparison=situation.comparison, history=situation.history)


def test_junit_counts_what_it_lists(situations: dict[str, Any]) -> None:
    for situation in situations.values():
        root = ET.fromstring(rendered(situation, "junit"))
        (suite,) = root
        cases = suite.findall("testcase")
        for what, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.get(what)) == int(root.get(what)) == sum(case.find(tag) is not None for case in cases)
        assert int(suite.get("tests")) == len(cases)
        assert all(case.get("name") and case.get("classname") for case in cases)
        assert all(float(case.get("time", "0")) >= 0 for case in cases)


@pytest.mark.parametrize(
    ("situation", "failures", "errors"),
    [
        ("all_same", 0, 0), ("slower", 2, 0), ("faster", 0, 0), ("memory_grew", 1, 0), ("void", 0, 1), ("failed", 0, 1), ("hung", 0, 1),
        ("lost", 0, 1), ("canary_flagged", 0, 1), ("no_baseline", 0, 0), ("other_machine", 0, 0), ("two_cells", 0, 0),
    ],
)  # fmt: skip
def test_junit_fails_where_something_got_worse(
    situations: dict[str, Any], situation: str, failures: int, errors: int
) -> None:
    suite = ET.fromstring(rendered(situations[situation], "junit"))[0]
    assert (int(suite.get("failures")), int(suite.get("errors"))) == (failures, errors)


def test_junit_says_why(situations: dict[str, Any]) -> None:
    suite = ET.fromstring(rendered(situations["slower"], "junit"))[0]
    failure = suite.find("testcase[@name='resnet50 [16, 3, 224, 224]']/failure")
    assert failure.get("type") == "slower"
    assert failure.get("message") == "slower, head / base 1.052: the interval lies beyond 1 %, and 10 new pairs agree"
    unclear = suite.find("testcase[@name='resnet50 [1, 3, 224, 224]']/skipped")
    assert unclear.get("message").startswith("unclear, head / base 1.020: ")


def test_openmetrics_are_read_by_prometheus(situations: dict[str, Any]) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus-client is not installed")
    for situation in situations.values():
        families = {
            family.name: family for family in parser.text_string_to_metric_families(rendered(situation, "openmetrics"))
        }
        facts = facts_of(situation.document, situation.comparison)
        for family in families.values():
            labels = [tuple(sorted(sample.labels.items())) for sample in family.samples]
            assert len(set(labels)) == len(labels), f"{family.name} has one series twice"
        times = sorted({one.value for one in families["flowbench_step_time_seconds"].samples})
        sides = [side for one in facts.comparisons for side in (one.subject, one.reference) if side and side.times]
        assert times == pytest.approx(sorted({side.times.median_ms / 1000 for side in sides}))
        assert ("flowbench_verdict" in families) == (situation.comparison is not None)


@pytest.mark.parametrize(
    "situation", ["two_cells", "two_ranks", "failed", "nothing_measured", "hostile_names", "stray_context"]
)
def test_tables_have_a_row_per_step_of_each_rank(situations: dict[str, Any], situation: str) -> None:
    document = situations[situation].document
    table = pandas.read_csv(io.StringIO(report.render(document, "csv")))
    ranks = [rank for one in document.samples for rank in one.ranks]
    steps = sum(len(rank.warmup_ms) + len(rank.steps_ms) + len(rank.host_ms or ()) for rank in ranks)
    assert len(table) == steps + sum(not one.ranks for one in document.samples)
    timed = table[table["phase"] == "timed"]
    assert timed["time_ms"].sum() == pytest.approx(
        sum(sum(rank.steps_ms) for one in document.samples for rank in one.ranks)
    )
    assert set(table["cell"]) == {one.cell for one in document.samples}
    assert set(table["status"]) == {one.status for one in document.samples}
    if len(timed):
        assert timed["loss"].tolist()[:2] == [6.8, 6.7]


def test_parquet_has_the_same_with_its_types(situations: dict[str, Any]) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: python -m pip install 'flowbench[report]'")
    for name in ("two_ranks", "failed", "nothing_measured"):
        document = situations[name].document
        table = pandas.read_parquet(io.BytesIO(report.render_bytes(document, "parquet")))
        assert table.to_csv(index=False, lineterminator="\n") == report.render(document, "csv")
        assert str(table["rank"].dtype) == "Int64"
        assert str(table["time_ms"].dtype) == "Float64"


@pytest.mark.parametrize("changed", [0, 20, 250])
def test_markdown_fits_into_a_comment_and_keeps_the_changed_cells(situations: dict[str, Any], changed: int) -> None:
    made = situations["five_hundred_cells"]
    slower = situations["slower"].comparison.times[0]
    cells = [one.case for one in made.comparison.times]
    worse = tuple(
        dataclasses.replace(slower, case=case, label=case.label) if place < changed else one
        for place, (case, one) in enumerate(zip(cells, made.comparison.times, strict=True))
    )
    comparison = dataclasses.replace(made.comparison, comparisons=worse)
    text = report.render(made.document, "markdown", comparison=comparison)
    assert len(text) <= 60_000
    assert len(text) > 50_000, "there was room for more"
    count = max(changed, 1)  # one is slower anyway
    assert text.startswith(f"**{count} of 250 cells slower than main, memory not compared.**")
    above = text.partition("<details>")[0]
    assert len(re.findall(r"^\| ! \|", above, re.MULTILINE)) == count
    assert "cut to fit into a comment" in text


def test_markdown_of_a_thousand_changed_cells_says_how_many_are_left_out(situations: dict[str, Any]) -> None:
    made = situations["one_cell"]
    (slower,) = made.comparison.times
    many = tuple(
        dataclasses.replace(
            slower, case=dataclasses.replace(slower.case, threads=place + 1), label=f"{'long ' * 30}{place}"
        )
        for place in range(1000)
    )
    text = report.render(made.document, "markdown", comparison=dataclasses.replace(made.comparison, comparisons=many))
    assert len(text) <= 60_000
    shown = len(re.findall(r"^\| ! \|", text, re.MULTILINE))
    assert shown >= 300
    assert f"… and {1000 - shown} more changed cells: too many for a comment" in text
    assert text.startswith("**1000 of 1000 cells slower than main")
