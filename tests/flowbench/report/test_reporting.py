"""`flowbench report`: where it writes, what a terminal is given, and templates of a user's own."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench import cli, report
from flowbench.commands import comparing, reporting, running
from flowbench.commands.comparing import with_false_alarms
from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import SideName, Verdict
from flowbench.measure.plan import Request
from flowbench.record.document import document_text, read_document
from flowbench.record.noise import NoiseFloor, keep_floor
from flowbench.record.run import RunDocument
from flowbench.report.changes import SIGNS
from flowbench.report.style import Style
from flowbench.report.words import memory_ratio, sizes

ROOT = Path(__file__).parents[3]
MIB = 2**20


@pytest.fixture(scope="module")
def run_file(documents: dict, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run document on disk whose figures no later measurement changes."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    path.write_text(document_text(documents["two_cells"]))
    return path


@pytest.fixture
def flowbench(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, run_file: Path
) -> Callable:
    """Reports on the run document in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["report", str(run_file), *arguments])
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return call


@pytest.mark.parametrize(
    ("place", "way_out"), [("nowhere/x.md", "No such file or directory"), ("/proc/x.md", "cannot write /proc/x.md: ")]
)
def test_a_file_that_cannot_be_written_is_one_line(flowbench: Callable, place: str, way_out: str) -> None:
    status, out, err = flowbench("--format", "markdown", "-o", place)
    assert (status, out) == (2, "")
    assert err.startswith("flowbench: cannot write ")
    assert way_out in err
    assert len(err.splitlines()) == 1


def test_a_device_is_written_to_and_not_replaced(flowbench: Callable) -> None:
    status, _, err = flowbench("-o", "/dev/full")
    assert status == 2
    assert err == "flowbench: cannot write /dev/full: No space left on device; choose another file with --out\n"
    assert not Path("/dev/full").is_file()


def test_a_file_that_is_there_is_replaced_whole(flowbench: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("old")
    assert flowbench("--format", "html", "-o", "x.html") == (0, "", "")
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["x.html"]


def test_a_link_leads_to_the_file_that_is_written(flowbench: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.html").write_text("old")
    (tmp_path / "link").symlink_to("x.html")
    assert flowbench("--format", "html", "-o", "link") == (0, "", "")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("spelling", ["d.json", "x/../d.json", "soft", "hard", "x/folder/d.json"])
@pytest.mark.parametrize("role", ["document", "base", "linked document"])
def test_a_report_never_takes_the_place_of_a_document_it_is_made_of(
    spelling: str, role: str, run_file: Path, tmp_path: Path, flowbench: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = run_file.read_text()
    (tmp_path / "x").mkdir()
    (tmp_path / "d.json").write_text(whole)
    (tmp_path / "soft").symlink_to("d.json")
    os.link(tmp_path / "d.json", tmp_path / "hard")
    (tmp_path / "x" / "folder").symlink_to(tmp_path)
    documents = {"document": ["d.json"], "base": [str(run_file), "d.json"], "linked document": ["soft"]}[role]
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", *documents, "--format", "html", "-o", spelling])
    assert stop.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    read = "is read" if spelling == documents[-1] else f"is {documents[-1]}, which is read"
    assert line == f"flowbench: {spelling} {read} for the report and would be lost: choose another file with --out"
    assert (tmp_path / spelling).read_text() == (tmp_path / "d.json").read_text() == whole
    assert (tmp_path / "soft").is_symlink()


@pytest.mark.parametrize("place", ["t/page.html.j2", "kept/runs/1.json", "kept/index.json", "flowbench/noise.json"])
def test_nor_of_a_template_a_store_or_the_noise_floors(
    place: str, flowbench: Callable, tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("it")
    status, _, err = flowbench(str(run_file), "--templates", "t", "--store", "kept", "--format", "html", "-o", place)
    assert status == 2
    assert f"{place} is " in err
    assert err.endswith("is read for the report and would be lost: choose another file with --out\n")
    assert (tmp_path / place).read_text() == "it"


def test_reports_of_a_document_of_any_name_lie_beside_it(run_file: Path, tmp_path: Path) -> None:
    whole = run_file.read_text()
    for name in ("d.json", "d.txt", "d.md", "d.html", "d", "d.v1"):
        (tmp_path / "out").mkdir(exist_ok=True)
        path = tmp_path / "out" / name
        path.write_text(whole)
        text = running.write_reports(path, read_document(path))
        beside = [f"{'d' if name == 'd.json' else name}{suffix}" for suffix in (".txt", ".md", ".html")]
        assert text.splitlines()[-1] == "written: " + ", ".join(str(path.with_name(one)) for one in (name, *beside))
        assert path.read_text() == whole
        assert {one.name for one in path.parent.iterdir()} == {name, *beside}
        path.parent.rename(tmp_path / f"seen {name}")


class TestTemplates:
    """A folder of the user's in place of our templates."""

    def render(
        self, flowbench: Callable, folder: Path, form: str = "markdown", **templates: str
    ) -> tuple[int, str, str]:
        folder.mkdir()
        for name, text in templates.items():
            (folder / name.replace("_", ".")).write_text(text)
        return flowbench("--format", form, "--templates", str(folder))

    def test_a_template_is_replaced_as_a_whole(self, flowbench: Callable, tmp_path: Path) -> None:
        text = "{{ verdict }} {% for one in facts.comparisons %}{{ one.label }}={{ one.subject.times.median_ms | ms }};{% endfor %}"
        status, out, err = self.render(flowbench, tmp_path / "mine", report_md_j2=text)
        assert (status, err) == (0, "")
        assert out.startswith(  # 707 / 507.5 ms, the medians of 500, 510, 505, 515.1 and of twice 700, 714
            "Flow: 1.39 times PyTorch's speed (geometric mean of 2 of 2 cells, 2 pairs each, from 1.39 to 1.40 times). `resnet50 [4, 3, 224, 224]`=507.5;"
        )

    def test_a_block_is_replaced_and_the_rest_stays(self, flowbench: Callable, tmp_path: Path) -> None:
        text = '{% extends "own/page.html.j2" %}{% block footer %}Our team{% endblock %}'
        status, out, err = self.render(flowbench, tmp_path / "mine", "html", page_html_j2=text)
        assert (status, err) == (0, "")
        assert "<footer>Our team</footer>" in out
        assert "This file loads nothing" not in out
        assert '<h2 id="cells">Cells</h2>' in out

    def test_the_looks_alone_can_be_replaced_too(self, flowbench: Callable, tmp_path: Path) -> None:
        status, out, _ = self.render(flowbench, tmp_path / "mine", "html", page_css=":root { --paper: hotpink; }")
        assert status == 0
        assert ":root { --paper: hotpink; }" in out
        assert "tabular-nums" not in out

    def test_what_a_template_writes_from_data_is_escaped_by_itself(self, situations_hostile: tuple[str, str]) -> None:
        markdown, page = situations_hostile
        assert "<!--" not in markdown
        assert "@someone" not in markdown
        assert "<br>" not in page

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("a\n{{ nothing }}", "template report.md.j2: 'nothing' is undefined"),
            ("{% for %}", "template report.md.j2, line 1: "),
            ("{{ facts.document.cells | sum }}", "template report.md.j2: unsupported operand"),
            ("{{ 1 // 0 }}", "template report.md.j2: integer division or modulo by zero"),
            ("{% include 'other' %}", "template other: "),
        ],
    )
    def test_a_mistake_is_one_line_that_names_the_template(
        self, flowbench: Callable, tmp_path: Path, text: str, said: str
    ) -> None:
        status, out, err = self.render(flowbench, tmp_path / "mine", report_md_j2=text)
        assert (status, out) == (2, "")
        assert err.startswith(f"flowbench: {said}")
        assert len(err.splitlines()) == 1

    def test_a_folder_without_templates_is_one_line(self, flowbench: Callable, tmp_path: Path) -> None:
        status, _, err = self.render(flowbench, tmp_path / "mine", markdown_j2="x")
        assert status == 2
        assert "has none of the templates report.md.j2, page.html.j2, page.css, page.js" in err
        status, _, err = flowbench("--format", "html", "--templates", "nowhere")
        assert err == "flowbench: nowhere: No such file or directory, expected a folder of templates\n"

    def test_a_template_that_is_no_text_is_named(self, flowbench: Callable, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "logo.png").write_bytes(b"\x89PNG")
        status, _, err = flowbench("--format", "html", "--templates", "mine")
        assert (status, "has none of the templates" in err) == (2, True)  # what else lies there is not read for it
        (tmp_path / "mine" / "page.css").write_bytes(b"ok \xff")
        (tmp_path / "mine" / "logo.png").unlink()
        status, _, err = flowbench("--format", "html", "--templates", "mine")
        assert err == "flowbench: mine/page.css: not UTF-8 text (byte 3), expected a template\n"

    def test_a_template_that_says_too_much_is_cut(self, flowbench: Callable, tmp_path: Path) -> None:
        text = "{{ verdict }}\n{% for n in range(9000) %}line {{ n }}\n{% endfor %}"
        status, out, _ = self.render(flowbench, tmp_path / "mine", report_md_j2=text)
        assert status == 0
        assert len(out) <= 60_000
        assert out.rstrip().endswith("… cut here: the text was too long for a comment.")


@pytest.fixture
def situations_hostile(situations: dict) -> tuple[str, str]:
    """A hostile document in templates of one word."""
    document = situations["hostile_names"].document
    word = "{{ facts.comparisons[0].subject.name }} {{ document.git.commit }} {{ document.findings[0].message }}"
    style = Style(templates={"report.md.j2": word, "page.html.j2": word})
    return report.render(document, "markdown", style=style), report.render(document, "html", style=style)


class _Terminal(io.StringIO):
    def __init__(self, encoding: str, is_terminal: bool = True) -> None:
        super().__init__()
        self._encoding, self._is_terminal = encoding, is_terminal

    @property
    def encoding(self) -> str:
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (_Terminal("utf-8"), {}, Style(colour=True)),
        (_Terminal("utf-8"), {"NO_COLOR": "1"}, Style()),
        (_Terminal("utf-8"), {"TERM": "dumb"}, Style()),
        (_Terminal("utf-8", is_terminal=False), {}, Style()),
        (_Terminal("ascii"), {}, Style(colour=True, ascii_only=True)),
        (_Terminal("latin-1", is_terminal=False), {}, Style(ascii_only=True)),
        (None, {}, Style()),
    ],
)
def test_a_terminal_gets_what_it_can_show(
    monkeypatch: pytest.MonkeyPatch, stream: _Terminal | None, environment: dict[str, str], expected: Style
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stream)
    assert reporting.terminal_style() == expected


def test_in_ascii_nothing_is_lost_but_accents(situations: dict) -> None:
    for name, situation in situations.items():
        text = report.render(situation.document, comparison=situation.comparison, style=Style(ascii_only=True))
        assert text.isascii()
        if name != "hostile_names":
            assert "?" not in text.replace("?  ", "").replace("? unclear", "").replace("killed?", "").replace(
                "memory?", ""
            )
    assert Style(ascii_only=True).shown("naïve → 2 × 3 … Ⅳ 漢") == "naive -> 2 x 3 ... IV ?"


def test_colours_say_what_words_say(situations: dict) -> None:
    made = situations["slower"]
    plain = report.render(made.document, comparison=made.comparison)
    painted = report.render(made.document, comparison=made.comparison, style=Style(colour=True))
    lines = painted.splitlines()
    assert lines[0] == f"\x1b[31m{plain.splitlines()[0]}\x1b[0m"
    assert sum(line.startswith("\x1b[31m!") for line in lines) == 2
    assert sum(line.startswith("\x1b[33m?") for line in lines) == 1
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain


def test_a_comparison_names_what_was_measured_and_whose_commit_flowbench_ran_from(situations: dict) -> None:
    made = situations["slower"]
    lines = report.render(made.document, comparison=made.comparison).splitlines()
    told = [line.partition(": ")[::2] for line in lines[-7:]]
    assert told[:2] == [
        ("base", "main (1a2b3c4d5e)"),
        ("head", "working tree (0123456789, with uncommitted changes)"),
    ]
    words = [word for word, _ in told]
    assert "flowbench's commit" in words
    assert "commit" not in words
    alone = report.render(situations["two_cells"].document)
    assert "\ncommit: 0123456789abcdef" in alone, "of one side it is what was measured"
    comparison = replace(made.comparison, base=SideName("1a2b3c4d" * 5, "1a2b3c4d" * 5, False))
    for form in ("console", "markdown", "html", "junit"):
        text = report.render(made.document, form, comparison=comparison)
        assert "1a2b3c4d1a" in text, form
        assert "1a2b3c4d1a2" not in text, form


def test_a_sign_says_worse_or_better_whatever_the_quantity_and_is_explained(situations: dict) -> None:
    assert {verdict: SIGNS[verdict] for verdict in SIGNS if verdict.is_judged} == {
        Verdict.SLOWER: "!", Verdict.LARGER: "!", Verdict.FASTER: "✓", Verdict.SMALLER: "✓", Verdict.SAME: "=",
    }  # fmt: skip
    explained = {
        "slower": "! worse (slower or larger); ? unclear; = the same.",
        "memory_grew": "! worse (slower or larger); = the same.",
        "faster": "✓ better (faster or smaller); = the same.",
        "lost": "✕ failed, void or lost; + new; = the same.",
        "all_same": "= the same.",
    }
    for name, signs in explained.items():
        for form, start in (("console", "signs: "), ("markdown", "Signs: "), ("html", "Signs: ")):
            made = situations[name]
            assert start + signs in report.render(made.document, form, comparison=made.comparison), (name, form)
    assert "igns: " not in report.render(situations["two_cells"].document)


def test_memory_that_differs_by_little_does_not_read_as_the_same(situations: dict) -> None:
    """Sizes are compared byte by byte."""
    made = situations["memory_grew"]
    comparison = made.comparison
    little = [
        replace(one, change=replace(one.change, ratio=1.00016)) if one.quantity.unit == "bytes" and one.change else one
        for one in comparison.comparisons
    ]
    comparison = replace(comparison, comparisons=tuple(little))
    for form in ("console", "markdown", "html"):
        text = report.render(made.document, form, comparison=comparison)
        assert "1.0002" in text, form
    assert [memory_ratio(ratio) for ratio in (1.0, 0.5, 1.0004, 0.99984, 1 + 1e-12)] == [
        "1.000", "0.500", "1.0004", "0.9998", "1.000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "head_bytes", "said"),
    [
        (Verdict.LARGER, 0.3 * MIB, "836.0 MiB → 836.3 MiB"),
        (Verdict.LARGER, 1024, "836.000 MiB → 836.001 MiB"),
        (Verdict.SMALLER, -1024, "836.000 MiB → 835.999 MiB"),
        (Verdict.LARGER, 3 * MIB, "836 MiB → 839 MiB"),
        (Verdict.SAME, 0.3 * MIB, "836 MiB → 836 MiB"),
    ],
)
def test_sizes_that_a_verdict_tells_apart_do_not_read_as_the_same(
    situations: dict, verdict: Verdict, head_bytes: float, said: str
) -> None:
    made = situations["one_cell"]
    time, memory = made.comparison.comparisons
    base = 836.0 * MIB
    change = replace(memory.change, ratio=1 + head_bytes / base)
    memory = replace(memory, verdict=verdict, base=base, head=base + head_bytes, change=change)
    comparison = replace(made.comparison, comparisons=(time, memory))
    for form in ("markdown", "html"):
        text = report.render(made.document, form, comparison=comparison)
        assert text.count(said) == 2, form
    assert sizes(None, base + 1, told_apart=True) == "– → 836 MiB"


def test_a_pipe_that_shows_ascii_alone_gets_ascii(run_file: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flowbench", "report", str(run_file)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("library", "form"),
    [("jinja2", "markdown"), ("jinja2", "html"), ("pandas", "csv"), ("prometheus_client", "openmetrics")],
)
def test_a_missing_library_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, run_file: Path, library: str, form: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(FlowbenchError, match=r"pip install 'flowbench\[report\]'"):
        report.render(read_document(run_file), form)
    assert report.render(read_document(run_file), "console")


def test_the_history_of_a_store_is_on_the_page(flowbench: Callable, tmp_path: Path) -> None:
    samples = (ROOT / "tests" / "golden" / "speed_stats" / "08.txt").read_text()
    for number in (1, 2):  # a comment that is there already is not taken twice
        (tmp_path / f"{number}.txt").write_text(f"{samples}\n{'x' * number}\n")
    with pytest.raises(SystemExit) as stop:
        cli.main(["history", "import", "1.txt", "2.txt", "--store", "kept"])
    assert stop.value.code == 0
    status, _, _ = flowbench("--format", "html", "--store", "kept", "-o", "x.html")
    assert status == 0
    page = (tmp_path / "x.html").read_text()
    assert '<h2 id="history-imported">From old comments</h2>' in page
    assert 'id="history-measured"' not in page
    status, _, err = flowbench("--format", "html", "--store", "nowhere")
    assert status == 2
    assert err == "flowbench: nowhere: no such folder, expected a store of runs (flowbench store add DOCUMENT…)\n"


def test_without_jinja_a_run_says_what_it_does_not_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_file: Path
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    text = running.write_reports(tmp_path / "run.json", read_document(run_file))
    assert [path.name for path in tmp_path.iterdir()] == ["run.txt"]
    assert text.splitlines()[-1] == (
        "no Markdown, no HTML: Jinja is not installed: python -m pip install 'flowbench[report]'"
    )


def test_a_base_makes_it_a_report_of_what_changed(flowbench: Callable, tmp_path: Path, run_file: Path) -> None:
    status, out, err = flowbench(str(run_file), "--format", "markdown")
    assert (status, err) == (0, "")
    assert out.startswith("**")
    assert "Base and head were measured in two sittings, not in turn" in out
    assert "<summary>All cells (" in out
    other = tmp_path / "other.json"
    tree = json.loads(run_file.read_text())
    tree["machine"]["cpu_model"] = "Another CPU"
    other.write_text(json.dumps(tree))
    status, out, err = flowbench(str(other), "--format", "markdown")
    assert (status, err) == (0, "")
    assert out.startswith("**No verdict: ")
    assert "was measured on another machine" in out
    assert "cpu_model" in out


def test_documents_are_compared_and_reported_with_the_noise_floor_of_their_machine(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    document, output = read_document(run_file), tmp_path / "report.json"
    for sittings, margin in ((9, 0.01), (10, 0.5)):
        for cell in document.cells:
            floor = NoiseFloor(f"{cell.engine}/{cell.case.key}", 0.5, sittings, 0, "2026-11-29T10:00:00Z")
            keep_floor(document.machine, floor)
        _, text = comparing.compare(str(run_file), str(run_file), Request(), None, ())
        assert text.startswith("All 4 cells as fast") == (margin == 0.5), "pairs differ by some per cent"
        reporting.report(run_file, run_file, "json", None, None, output)
        changes = json.loads(output.read_text())["changes"]["comparisons"]
        assert {one["margin"]["size"] for one in changes if one["quantity"]["name"] == "step time"} == {margin}


def test_documents_of_unlike_machines_are_compared_by_force_alone_and_then_not_judged(
    run_file: Path, tmp_path: Path
) -> None:
    tree, other = json.loads(run_file.read_text()), tmp_path / "other.json"
    tree["machine"] |= {"cpu_model": "Another CPU", "usable_cores": 1}
    other.write_text(json.dumps(tree))
    with pytest.raises(FlowbenchError, match=r"unlike machines \(cpu_model: .* / Another CPU; usable_cores: .* / 1\)"):
        comparing.compare(str(run_file), str(other), Request(), None, ())
    status, text = comparing.compare(str(run_file), str(other), Request(), None, (), force=True)
    assert status == 2
    assert text.count("not comparable: unlike machines, shown by force") == 4


def test_a_sitting_of_two_sides_is_judged_by_itself_and_takes_no_base(
    flowbench: Callable, situations: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sitting_of_two = tmp_path / "two.json"
    sitting_of_two.write_text(document_text(situations["slower"].document))
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(sitting_of_two)])
    assert stop.value.code == 0
    out, _ = capfd.readouterr()
    assert out.startswith("All 5 cells as fast as main")
    status, _, err = flowbench(str(sitting_of_two))
    assert status == 2
    assert err.startswith(f"flowbench: {sitting_of_two} is a sitting of two sides already")


def test_a_comparison_takes_along_how_often_the_machine_was_wrong(situations: dict) -> None:
    floors = [
        NoiseFloor("a", 0.01, 30, 1, "2026-11-29T10:00:00Z"),
        NoiseFloor("b", 0.02, 20, 0, "2026-11-29T10:00:00Z"),
    ]
    document = with_false_alarms(situations["slower"].document, floors)
    text = report.render(document, "markdown")
    assert "- false alarms: `1 in 50 sittings of one commit against itself on this machine" in text
    unknown = report.render(with_false_alarms(document, []), "markdown")
    assert "how often this machine raises one is not known: flowbench aa measures it" in unknown


def test_documents_that_differ_in_threads_stand_beside_each_other_by_force(documents: dict, tmp_path: Path) -> None:
    def with_threads(threads: int) -> RunDocument:
        document = documents["two_cells"]
        cells = {cell.key: replace(cell, threads=threads) for cell in document.cells}
        samples = tuple(replace(one, cell=cells[one.cell].key) for one in document.samples)
        return replace(document, cells=tuple(cells.values()), samples=samples)

    paths = [tmp_path / f"{threads}.json" for threads in (16, 32)]
    for threads, path in zip((16, 32), paths, strict=True):
        path.write_text(document_text(with_threads(threads)))
    _, text = comparing.compare(*map(str, paths), Request(), None, ())
    assert re.search(r"^✕  resnet50 \[4, 3, 224, 224\], threads=16 Flow +lost ", text, re.MULTILINE)
    assert "flow-eager: head has it with 32 threads in place of 16: measure both with the same --threads" in text
    status, text = comparing.compare(*map(str, paths), Request(), None, (), force=True)
    assert status == 2
    assert re.search(r"^\?  resnet50 \[4, 3, 224, 224\], 16 / 32 threads Flow +unclear +\d+", text, re.MULTILINE)
    assert " lost " not in text
    assert " new " not in text
