"""Reports of each situation against whole golden texts, and what no situation may break."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowbench import report
from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import LimitResult, Verdict
from flowbench.record.document import document_text, parse_document
from flowbench.record.run import Finding, RunDocument
from flowbench.record.sample import Sample
from flowbench.report.facts import facts_of
from flowbench.report.headline import headline_of
from flowbench.report.templating import Templates
from flowbench.report.words import one_line

GOLDEN = Path(__file__).parents[2] / "golden" / "reports"
SUFFIX = {
    "console": "console.txt", "speed-stats": "speed_stats.txt", "markdown": "markdown.md", "html": "page.txt",
    "junit": "junit.xml", "openmetrics": "openmetrics.txt", "csv": "samples.csv",
}  # fmt: skip
# Single runs, and base against head.
RUNS = [
    "two_cells", "reference_failed", "no_reference", "nothing_measured", "interrupted", "killed", "same_names", "two_ranks",
    "disturbed", "no_cells", "no_gpu", "profiled", "with_history", "old_comments_only",
]  # fmt: skip
COMPARISONS = [
    "all_same", "slower", "faster", "memory_grew", "void", "failed", "hung", "no_baseline", "other_machine", "canary_flagged",
    "one_cell", "hostile_names", "stray_context", "lost", "unclear", "explained", "unexplained",
]  # fmt: skip
# What only the page shows.
PAGES_ALONE = ["profiled", "with_history", "old_comments_only"]
SITUATIONS = [*RUNS, *COMPARISONS]
GOLDENS = (
    [(situation, form) for situation in SITUATIONS if situation not in PAGES_ALONE for form in ("console", "markdown")]
    + [(situation, "speed-stats") for situation in (*RUNS, "hostile_names", "failed") if situation not in PAGES_ALONE]
    + [
        (situation, "html")
        for situation in ("two_cells", "slower", "stray_context", "hostile_names", "unexplained", *PAGES_ALONE)
    ]
    + [(situation, form) for situation in ("two_ranks", "slower", "failed") for form in ("junit", "openmetrics")]
    + [("failed", "csv")]
)
TEXTS = [*report.STYLED, *report.FORMATS]


def rendered(situation: Any, form: str, **more: Any) -> str:
    return report.render(situation.document, form, comparison=situation.comparison, history=situation.history, **more)


@pytest.mark.parametrize(("situation", "form"), GOLDENS)
def test_the_report_is_the_golden_one(situations: dict[str, Any], situation: str, form: str, tmp_path: Path) -> None:
    text = rendered(situations[situation], form)
    if form == "html":  # its words, line by line; how it looks is tested in a browser
        text = words_of(text)
    golden = GOLDEN / f"{situation}.{SUFFIX[form]}"
    actual = tmp_path / golden.name
    actual.write_text(text, encoding="utf-8")
    expected = golden.read_text(encoding="utf-8") if golden.exists() else ""
    assert text == expected, f"if the change is meant: cp {actual} {golden}"


def test_no_golden_text_is_left_over() -> None:
    known = {f"{situation}.{SUFFIX[form]}" for situation, form in GOLDENS} | {"five_hundred_cells.markdown.json"}
    assert {path.name for path in GOLDEN.iterdir()} == known


def test_five_hundred_cells_keep_their_verdict_and_fit_into_a_comment(
    situations: dict[str, Any], tmp_path: Path
) -> None:
    text = rendered(situations["five_hundred_cells"], "markdown")
    found = {
        "characters": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "begins": text.splitlines()[:12],
        "says what is cut": [line for line in text.splitlines() if " more, cut to fit" in line],
    }
    golden = GOLDEN / "five_hundred_cells.markdown.json"
    actual = tmp_path / golden.name
    actual.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    expected = golden.read_text(encoding="utf-8") if golden.exists() else ""
    assert actual.read_text(encoding="utf-8") == expected, f"if the change is meant: cp {actual} {golden}"


@pytest.mark.parametrize("verdict", [Verdict.SLOWER, Verdict.SAME])
def test_of_thousands_of_cells_only_those_that_may_fit_are_written(
    situations: dict[str, Any], monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    time = situations["slower"].comparison.comparisons[0]
    sizes = range(1, 3001)
    comparisons = tuple(
        dataclasses.replace(
            time, case=dataclasses.replace(time.case, input_shape=(size,)), label=f"[{size}]", verdict=verdict
        )
        for size in sizes
    )
    comparison = dataclasses.replace(situations["slower"].comparison, comparisons=comparisons)
    written: list[int] = []
    fill = Templates.fill

    def counted(self: Templates, name: str, values: dict[str, Any]) -> str:
        written.append(len(values["changed"]) + min(values["most"], len(sizes)))
        return fill(self, name, values)

    monkeypatch.setattr(Templates, "fill", counted)
    text = rendered(dataclasses.replace(situations["slower"], comparison=comparison), "markdown")
    assert 54_000 < len(text) <= 60_000
    assert sum(written) < len(sizes)
    assert "3000 of 3000 cells slower than main" in text or "All 3000 cells as fast as main" in text


class _Words(HTMLParser):
    """Gathers what a page says, and the labels that only a screen reader says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = [""]
        self.hidden = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("style", "script", "title"):
            self.hidden = tag
        if tag in (
            "p",
            "li",
            "tr",
            "h1",
            "h2",
            "h3",
            "figcaption",
            "dt",
            "details",
            "summary",
            "pre",
            "svg",
            "label",
            "footer",
        ):
            self.lines.append("")
        self.lines[-1] += f" [{label}] " if (label := dict(attrs).get("aria-label")) else " "

    def handle_endtag(self, tag: str) -> None:
        self.hidden = "" if tag == self.hidden else self.hidden

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            first, *more = data.split("\n")
            self.lines[-1] += first
            self.lines += more


def words_of(page: str) -> str:
    """The words of a page, one block a line."""
    parser = _Words()
    parser.feed(page)
    lines = (" ".join(line.split()) for line in parser.lines)
    return "\n".join(line for line in lines if line) + "\n"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_same_document_gives_the_same_text_also_from_a_file(situations: dict[str, Any], situation: str) -> None:
    again = dataclasses.replace(
        situations[situation], document=parse_document(document_text(situations[situation].document))
    )
    for form in TEXTS:
        assert rendered(again, form) == rendered(situations[situation], form)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_json_is_json_with_the_figures(situations: dict[str, Any], situation: str) -> None:
    tree = json.loads(rendered(situations[situation], "json"), parse_constant=pytest.fail)
    assert (tree["changes"] is not None) == (situation in COMPARISONS)
    assert (tree["schema"], tree["schema_version"]) == ("flowbench.report", 1)
    for comparison in tree["comparisons"]:
        assert (comparison["ratio"] is None) == (comparison["no_ratio"] is not None)
        if comparison["ratio"]:
            assert comparison["relative_speed"] == comparison["ratio"]["geometric_mean"]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_speed_stats_are_read_back(situations: dict[str, Any], situation: str) -> None:
    document = situations[situation].document
    facts = facts_of(document)
    parsed, warnings = report.parse(report.render(document, "speed-stats"))
    assert warnings == []
    entries = parsed["entries"]
    expected = []
    for comparison in facts.comparisons:
        for side in (comparison.reference, comparison.subject):
            if side and side.times:
                expected.append((f"{side.times.mean_ms:.1f}", f"{side.times.total_ms:.1f}", side.times.count))
        if comparison.relative_speed:
            expected.append(f"{comparison.relative_speed:.2f}")
    shown = [entry for entry in entries if entry["kind"] != "memory"]
    assert [
        (f"{entry['mean']:.1f}", f"{entry['total']:.1f}", entry["times"])
        if entry["kind"] == "time"
        else f"{entry['value']:.2f}"
        for entry in shown
    ] == expected
    peaks = [entry["mib"] for entry in entries if entry["kind"] == "memory"]
    assert all(peak > 0 for peak in peaks)
    assert bool(peaks) == any(entry["kind"] == "time" for entry in shown)


def test_speed_stats_are_written_as_the_format_says(documents: dict[str, RunDocument]) -> None:
    lines = report.render(documents["two_ranks"], "speed-stats").splitlines()
    labels = "input_shape=[16, 3, 224, 224], backward is enabled, ddp, ddp_broadcast_buffers is disabled, world size=2"
    assert lines[:8] == [
        "Speed stats:",
        "GPU Name: NVIDIA H200",
        "",
        f"PyTorch resnet50 time: 2838.1ms (= 11352.4ms / 4, {labels})",
        f"Flow resnet50 time: 2040.2ms (= 8160.8ms / 4, {labels})",
        "Relative speed: 1.39 (= 2838.1ms / 2040.2ms)",
        "",
        lines[7],
    ]
    (entry,) = report.parse(lines[4])[0]["entries"]
    assert (entry["ddp"], entry["broadcast_buffers"], entry["world_size"]) == (True, False, 2)


def test_memory_lines_say_engine_kind_and_rank(documents: dict[str, RunDocument]) -> None:
    entries = report.parse(report.render(documents["two_cells"], "speed-stats"))[0]["entries"]
    memory = [entry for entry in entries if entry["kind"] == "memory"]
    assert memory[0] == {
        "kind": "memory", "framework": "PyTorch", "rank": 0, "mib": 1700.0, "estimated": False,
        "what": "peak resident", "mark": None,
    }  # fmt: skip
    assert {(entry["framework"], entry["what"]) for entry in memory} >= {
        ("Flow", "peak allocated"),
        ("Flow", "peak reserved"),
        ("PyTorch", "peak resident above start"),
    }


def test_engines_of_one_display_name_stay_apart(documents: dict[str, RunDocument]) -> None:
    parsed, _ = report.parse(report.render(documents["same_names"], "speed-stats"))
    lines = {line for line in report.render(documents["same_names"], "speed-stats").splitlines() if " time: " in line}
    assert {e["framework"] for e in parsed["entries"] if e["kind"] == "time"} == {
        "flow-eager",
        "flow-graph",
        "flow-old",
        "PyTorch",
    }
    assert len(lines) == 8
    labels = {comparison.label for comparison in facts_of(documents["same_names"]).comparisons}
    assert len(labels) == 2


def test_a_void_or_failed_cell_has_no_figures(documents: dict[str, RunDocument]) -> None:
    for situation in ("void", "failed"):
        first, second = facts_of(documents[situation]).comparisons
        assert first.ratio is None
        assert first.subject.times is None
        assert first.no_ratio == f"Flow {situation}"
        assert second.ratio is not None
        (overall,) = facts_of(documents[situation]).overall
        assert (overall.good, overall.cells) == (1, 2)


def test_only_rounds_with_both_sides_count(documents: dict[str, RunDocument]) -> None:
    half = next(c for c in facts_of(documents["interrupted"]).comparisons if c.case.input_shape[0] == 2)
    assert half.ratio is not None
    assert half.ratio.pairs == 1
    assert half.subject.times is not None
    assert half.subject.times.processes == 1


def test_what_was_not_measured_is_in_every_report(documents: dict[str, RunDocument]) -> None:
    for situation in (
        "void",
        "failed",
        "reference_failed",
        "no_reference",
        "nothing_measured",
        "interrupted",
        "killed",
    ):
        for missing in facts_of(documents[situation]).left_out:
            for form in TEXTS:
                if form in ("csv", "openmetrics"):
                    continue  # tables of what there is
                text = html.unescape(report.render(documents[situation], form))
                assert missing.reason.split("\n")[0].split(",")[0].replace("'", "") in text.replace("'", "")
    for form in ("console", "markdown", "speed-stats", "json"):
        assert "no reference" in report.render(documents["no_reference"], form)


def test_one_pair_alone_gives_no_speed(documents: dict[str, RunDocument]) -> None:
    whole = documents["two_cells"]
    first = tuple(sample for sample in whole.samples if sample.pair == 0)
    alone = dataclasses.replace(whole, samples=first, protocol=dataclasses.replace(whole.protocol, pairs=1))
    text = report.render(alone)
    assert (
        "Flow: too few pairs to give a speed beside PyTorch's (geometric mean of 2 of 2 cells, 1 pair each, from 1.4"
        in text
    )
    assert "times PyTorch's speed" not in text
    assert "1 pair of fresh processes, " in text
    assert "one pair only" in text
    assert "one pair only" not in report.render(whole)


@pytest.mark.parametrize("form", ["console", "markdown", "html"])
def test_where_pairs_differ_too_much_neither_speed_nor_interval_is_given(
    documents: dict[str, RunDocument], form: str
) -> None:
    whole = documents["two_cells"]

    def held_up(sample: Sample) -> Sample:
        """Flow's second process of each cell takes four times as long."""
        if sample.pair == 0 or not sample.cell.startswith("flow-eager/"):
            return sample
        slowed = [
            dataclasses.replace(rank, steps_ms=tuple(4 * time for time in rank.steps_ms)) for rank in sample.ranks
        ]
        return dataclasses.replace(sample, ranks=tuple(slowed))

    document = dataclasses.replace(whole, samples=tuple(map(held_up, whole.samples)))
    ratio = next(one.ratio for one in facts_of(document).comparisons if one.subject.engine == "flow-eager")
    assert ratio is not None
    assert ratio.interval is not None
    assert ratio.telling_interval is None
    text = html.unescape(re.sub("<[^>]*>", "", report.render(document, form)))
    assert (
        "Flow: too few pairs to give a speed beside PyTorch's (geometric mean of 2 of 2 cells, 2 pairs each, from 0.3"
        in text
    )
    assert "PyTorch-NHWC: 1.27 times PyTorch's speed" in text
    assert "too few pairs" in text.replace("too few pairs to give", "")
    assert f"{ratio.interval[1]:.3f}" not in text
    assert ("hollow dots of too few pairs" in text) == (form == "html")
    assert ("Of too few pairs to tell: batch size 1, 4." in text) == (form == "markdown")


@pytest.mark.parametrize("form", ["console", "markdown", "html"])
@pytest.mark.parametrize(
    ("base", "head", "about", "said"),
    [
        ((1.36, 1.44), (1.29, 1.37), "", "1.290 - 1.370"),
        ((1.36, 1.44), (0.7, 2.9), "", "too few pairs"),
        ((0.7, 2.9), (1.29, 1.37), "≈", "1.290 - 1.370"),
        ((1.36, 1.44), None, "", "one pair only"),
        (None, (1.29, 1.37), "≈", "1.290 - 1.370"),
        (None, (0.7, 2.9), "≈", "too few pairs"),
    ],
)
def test_a_relative_speed_of_a_changed_cell_has_the_interval_of_head(
    situations: dict[str, Any],
    form: str,
    base: tuple[float, float] | None,
    head: tuple[float, float] | None,
    about: str,
    said: str,
) -> None:
    comparison = situations["one_cell"].comparison
    time, memory = comparison.comparisons
    time = dataclasses.replace(time, base_relative_interval=base, head_relative_interval=head)
    changed = dataclasses.replace(comparison, comparisons=(time, memory))
    text = rendered(dataclasses.replace(situations["one_cell"], comparison=changed), form)
    assert re.search(rf"(?<!≈){about}1\.40 → 1\.33 \(?{said}", words_of(text) if form == "html" else text)
    assert ("≈: base had too few pairs" in text) == bool(about)


@pytest.mark.parametrize("form", ["console", "markdown", "html"])
def test_a_change_of_one_pair_is_marked(situations: dict[str, Any], form: str) -> None:
    comparison = situations["one_cell"].comparison
    time, memory = comparison.comparisons
    time = dataclasses.replace(time, change=dataclasses.replace(time.change, low=None, high=None))
    changed = dataclasses.replace(comparison, comparisons=(time, memory))
    text = rendered(dataclasses.replace(situations["one_cell"], comparison=changed), form)
    found = re.findall(rf"{time.change.ratio:.3f} \(?one pair only", words_of(text) if form == "html" else text)
    assert len(found) == (1 if form == "console" else 2)


def test_a_speed_of_one_cell_is_given_with_its_interval(documents: dict[str, RunDocument]) -> None:
    overall = facts_of(documents["two_cells"]).overall[0]
    one = dataclasses.replace(
        overall, good=1, cells=1, fewest_pairs=3, most_pairs=3, all_pairs=3, interval=(1.2, 1.5), geometric_mean=1.3
    )
    facts = dataclasses.replace(facts_of(documents["two_cells"]), overall=(one,))
    verdict = "".join(headline_of(facts).verdict)
    assert verdict == "Flow: 1.30 times PyTorch's speed (3 pairs, 95 % interval 1.200 - 1.500)."


def test_console_fits_forty_lines(situations: dict[str, Any]) -> None:
    for situation in situations.values():
        lines = rendered(situation, "console").splitlines()
        assert len(lines) <= 40
        assert all(line.isprintable() for line in lines)


def test_what_the_console_cuts_is_counted_and_cut_after_a_word(situations: dict[str, Any]) -> None:
    made = situations["slower"]
    limits = tuple(LimitResult("*", "max_step_ms", "", 2.0, 1.0, False, 1, f"limit {number}") for number in range(4))
    text = (
        "resnet18 [1, 3, 64, 64]: its last batch norm sees 4 values per channel, fewer than 8: "
        + "losses are chaotic " * 9
    )
    document = dataclasses.replace(made.document, findings=(Finding("few values", text, None, None),))
    comparison = dataclasses.replace(made.comparison, limits=limits)
    lines = report.render(document, comparison=comparison).splitlines()
    assert "  … and 1 more note" in lines, "four limits and the speed"
    (told,) = [line for line in lines if line.startswith("  few values: ")]
    assert 130 < len(told) <= 150
    assert told.endswith((" losses…", " are…", " chaotic…"))
    words = "one two " * 12
    assert [one_line(words, most) for most in (96, 90, 88, 87)] == [
        words.strip(), words[:87] + "…", words[:87] + "…", words[:83] + "…",
    ]  # fmt: skip
    assert one_line("resnet18, world size=2", 20) == "resnet18, world siz…", "a name"
    assert one_line("at " + "a" * 200, 90) == "at " + "a" * 86 + "…", "a word that is most of the line"


def test_a_busy_box_does_not_hide_what_a_gpu_did(documents: dict[str, RunDocument]) -> None:
    busy = tuple(Finding("other load", f"other processes used 1.{tenth} of 2 cores", None, None) for tenth in range(9))
    machines = [
        Finding(kind, f"it was {kind}", None, None) for kind in ("swapping", "stolen time", "sleep", "clock", "threads")
    ]
    slowed = Finding("GPU slowed down", "GPU 0: thermal slowdown in 100% of 3 readings", None, None)
    stray = Finding("memory on another's GPU", "rank 1 holds 312 MiB on GPU 0, its own is GPU 1", None, None)
    document = dataclasses.replace(documents["two_cells"], findings=(*busy, *machines, slowed, stray))
    lines = report.render(document, "console").splitlines()
    first = lines.index("Disturbed by:") + 1
    assert [line.split(":")[0].strip() for line in lines[first : first + 3]] == [stray.kind, slowed.kind, "other load"]
    assert lines[first + 2] == "  other load: other processes used 1.0 of 2 cores, and 8 more like it"
    assert lines[first + 6] == "  … and 2 more kinds"
    text = report.render(document, "markdown")
    listed = text.partition("What disturbed the measurement (16 findings)</summary>")[2].strip().splitlines()
    assert [line.split(":")[0].strip("- `") for line in listed[:3]] == [
        stray.kind,
        slowed.kind,
        "other load",
    ]
    assert listed[2].endswith("; other processes used 1.2 of 2 cores; and 6 more like it")
    assert len(listed[:8]) == len([line for line in listed[:8] if line.startswith("- ")]) == 8
    page = words_of(report.render(document, "html"))
    assert "other load: other processes used 1.0 of 2 cores, and 8 more like it\n" in page
    assert all(html.escape(one.message, quote=False) in page for one in document.findings)


@pytest.mark.parametrize("form", ["console", "markdown", "html", "junit"])
def test_each_limit_has_its_line(situations: dict[str, Any], form: str) -> None:
    """Kept ones are in the details of a comment; the others stand before the figures, everywhere."""
    situation = situations["all_same"]
    limits = tuple(
        LimitResult("flow/*", name, "cell", 1.0, 2.0, kept, code, f"the {name} of it is as it is")
        for name, kept, code in (("max_step_ms", True, 0), ("max_slowdown", False, 7), ("max_gpu_mib", None, 2))
    )
    comparison = dataclasses.replace(situation.comparison, limits=limits)
    text = html.unescape(report.render(situation.document, form, comparison=comparison)).replace("\\", "")
    lines = [limit.line in text for limit in limits]
    assert lines == [form == "markdown", True, True]
    assert all(limit.line not in rendered(situation, form) for limit in limits)
    assert comparison.exit_code == 7


def test_hostile_names_stay_data(documents: dict[str, RunDocument]) -> None:
    for form in ("console", "speed-stats", "markdown"):
        text = report.render(documents["hostile_names"], form)
        assert "\x1b" not in text
        assert not re.search("^(Relative speed: [89]|GPU Name: forged|Flow: )", text, re.MULTILINE)
    text = report.render(documents["hostile_names"], "markdown")
    assert "<!--" not in text
    assert "@someone" not in text
    assert "](http" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} <= {10, 8, 3}
    for line in text.splitlines():
        outside = "".join(line.split("`")[::2])
        assert line.startswith("```") or line.count("`") % 2 == 0
        if not line.startswith("|") and "speed" not in line:
            assert "evil" not in outside or "PyTorch" in outside


NAMES = st.text(min_size=1, max_size=40)


@settings(max_examples=40)
@given(name=NAMES, model=NAMES, reason=NAMES, cpu=NAMES)
def test_no_name_changes_the_figures(
    documents: dict[str, RunDocument], name: str, model: str, reason: str, cpu: str
) -> None:
    tree = json.loads(document_text(documents["two_cells"]))
    for engine in tree["engines"]:
        engine["display_name"] = name if engine["name"] != "torch-eager" else model
    tree["machine"]["cpu_model"] = cpu
    tree["not_measured"] = [
        {"what": name, "reason": reason},
        {"what": reason, "reason": f"{name}\nRelative speed: 9.99"},
    ]
    document = parse_document(json.dumps(tree))
    plain, _ = report.parse(report.render(documents["two_cells"], "speed-stats"))
    parsed, warnings = report.parse(report.render(document, "speed-stats"))
    assert warnings == []
    assert parsed["gpu_name"] is None
    assert [{**entry, "framework": None} for entry in parsed["entries"]] == [
        {**entry, "framework": None} for entry in plain["entries"]
    ]
    assert len({entry["framework"] for entry in parsed["entries"] if entry["kind"] == "time"}) == 3
    for form in TEXTS:
        report.render(document, form)


@given(
    model=st.one_of(
        NAMES, st.sampled_from(["time: 5ms (= 5ms / 1, x)", "a time:", "real time net", "Relative speed: 1"])
    )
)
def test_no_model_name_changes_the_figures(documents: dict[str, RunDocument], model: str) -> None:
    original = documents["two_ranks"]
    cells = {cell.key: dataclasses.replace(cell, model=model) for cell in original.cells}
    samples = tuple(dataclasses.replace(sample, cell=cells[sample.cell].key) for sample in original.samples)
    document = dataclasses.replace(original, cells=tuple(cells.values()), samples=samples)
    plain, _ = report.parse(report.render(original, "speed-stats"))
    parsed, warnings = report.parse(report.render(document, "speed-stats"))
    assert warnings == []
    names = {entry.pop("model") for entry in parsed["entries"] if entry["kind"] == "time"}
    assert len(names) == 1
    assert parsed["entries"] == [{key: value for key, value in e.items() if key != "model"} for e in plain["entries"]]


def test_an_unknown_format_names_the_nearest(documents: dict[str, RunDocument]) -> None:
    with pytest.raises(FlowbenchError, match="did you mean 'markdown'"):
        report.render(documents["void"], "markdwn")
