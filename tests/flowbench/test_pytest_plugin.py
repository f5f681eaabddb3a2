"""The fixture of suites: what was measured once in one sitting is what pytest-benchmark shows, saves and compares."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from flowbench.pytest_plugin import ReplayTimer

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is not installed here")
pytest_plugins = ["pytester"]

ENGINES = '''
"""Engines that train nothing: one quick, one slow, one that fails, one that is not there."""
import time
from flowbench.engine import Engine, Training

class Sleeping(Training):
    def __init__(self, seconds):
        self.seconds = seconds
    def step(self, index):
        time.sleep(self.seconds)
    def loss(self):
        return 1.0

class Quick(Engine):
    display_name, library, seconds = "Quick", "json", 0.002
    def build(self, task):
        return Sleeping(self.seconds)

class Slow(Quick):
    display_name, seconds = "Slow", 0.02

class Failing(Quick):
    def build(self, task):
        raise RuntimeError("no weights for you")

class Absent(Quick):
    library = "a_library_that_is_not_there"
'''

SUITE = """
import pytest

@pytest.mark.flowbench(
    models=["linear"], engines=[{engines}], reference="slow", batch_sizes=[2], image_shape=(3, 4, 4),
    steps=3, warmup=1, pairs=2, threads=1,
)
def test_linear(measured):
    measured.replay()
    if measured.ratio:
        assert measured.ratio.geometric_mean > 1
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, repository: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with the toy engines installed, ready for a suite."""
    site = pytester.mkdir("site")
    (site / "toys.py").write_text(ENGINES)
    points = "".join(f"{name.lower()} = toys:{name}\n" for name in ("Quick", "Slow", "Failing", "Absent"))
    for name, text in {
        "METADATA": "Name: toys\nVersion: 1\n",
        "entry_points.txt": f"[flowbench.engines]\n{points}",
    }.items():
        (site / "toys-1.dist-info").mkdir(exist_ok=True)
        (site / "toys-1.dist-info" / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), str(site)]))
    # Each pytest of these tests starts with the two plugins it is about, not with every one that is installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv(
        "PYTEST_XDIST_WORKER", raising=False
    )  # benchmarks do not run where several processes share the tests
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    plugins = ["-p", "flowbench.pytest_plugin", "-p", "benchmark"]
    return suite.runpytest_subprocess(*plugins, "--flowbench-out=out", *arguments, timeout=120)


def documents(suite: pytest.Pytester) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(suite.path.glob("out/*.json"))]


def test_the_table_shows_what_one_sitting_measured(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick"'))
    result = run(suite, "--benchmark-json=table.json", "--benchmark-save=first")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["*benchmark 'linear [[]2, 3, 4, 4[]]': 2 tests*", "*linear-2x3x4x4-quick*", "*linear-2x3x4x4-slow*"]
    )
    (document,) = documents(suite)
    assert [sample["pair"] for sample in document["samples"]] == [0, 0, 1, 1], "interleaved, in one sitting"
    rows = {
        row["extra_info"]["engine"]: row for row in json.loads((suite.path / "table.json").read_text())["benchmarks"]
    }
    medians_s = {}
    for name, row in rows.items():
        samples = [sample for sample in document["samples"] if sample["cell"].startswith(f"{name}/")]
        medians_s[name] = [sorted(sample["ranks"][0]["steps_ms"])[1] / 1e3 for sample in samples]
        assert row["stats"]["data"] == pytest.approx(medians_s[name])
        assert row["group"] == "linear [2, 3, 4, 4]"
        assert row["extra_info"]["losses"] == [[[1.0] * 4]] * 2
        assert row["extra_info"]["resident_peak_bytes"] > 0
        assert row["extra_info"]["allocated_peak_bytes"] is None
        assert row["extra_info"]["gpu_used_bytes"] is None
        assert row["extra_info"]["host_ms"] == [[[]], [[]]]
    assert rows["slow"]["extra_info"]["relative_speed"] is None
    ratios = [slow / quick for quick, slow in zip(medians_s["quick"], medians_s["slow"], strict=True)]
    assert rows["quick"]["extra_info"]["relative_speed"] == pytest.approx(math.prod(ratios) ** 0.5)
    low, high = rows["quick"]["extra_info"]["relative_speed_interval"]
    assert low < rows["quick"]["extra_info"]["relative_speed"] < high
    again = run(suite, "--benchmark-compare=0001", "-k", "quick")
    again.assert_outcomes(passed=1, deselected=1)
    again.stdout.fnmatch_lines_random(["*quick[]] (0001_first)*", "*quick[]] (NOW)*"])


def test_only_selected_cells_are_measured(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick"'))
    result = run(suite, "-k", "slow", "--flowbench-pairs=1", "--flowbench-steps=1")
    result.assert_outcomes(passed=1, deselected=1)
    (document,) = documents(suite)
    assert [cell["engine"] for cell in document["cells"]] == ["slow"]
    assert [len(sample["ranks"][0]["steps_ms"]) for sample in document["samples"]] == [1]


def test_a_failing_engine_fails_its_test_and_no_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick", "failing"'))
    result = run(suite)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*linear [[]2, 3, 4, 4[]] failing: failed: RuntimeError: no weights for you*"])


def test_an_engine_that_is_not_there_is_named(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick", "absent"'))
    result = run(suite, "--flowbench-pairs=1")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["flowbench: not measured: absent: a_library_that_is_not_there is not installed*"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '@pytest.mark.flowbench(modles=["linear"])',
            "*mark flowbench: modles was given, expected keywords out of preset*",
        ),
        ('@pytest.mark.flowbench(models=["linaer"])', "*unknown model 'linaer': did you mean 'linear'*"),
        ('@pytest.mark.flowbench("linear")', "*mark flowbench: 'linear' was given*"),
        ('@pytest.mark.flowbench(models="linear")', "*mark flowbench: models was given 'linear', expected a list"),
        ("@pytest.mark.flowbench(batch_sizes=(4, 0))", "*batch_sizes[[]1] was given 0, expected at least 1"),
        ('@pytest.mark.flowbench(threads="2")', "*threads was given '2', expected a whole number"),
        ("@pytest.mark.flowbench(image_shape=(3, 4))", "*image_shape was given 2 numbers, expected three: channels, *"),
        ('@pytest.mark.flowbench(device="tpu")', "*device was given 'tpu', expected one of 'cpu', 'cuda'"),
    ],
)
def test_a_wrong_marker_is_an_error_in_one_line(suite: pytest.Pytester, line: str, said: str) -> None:
    suite.makepyfile(test_suite=f"import pytest\n\n{line}\ndef test_it(measured):\n    measured.replay()\n")
    result = run(suite)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([said])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize("pairs", [0, -1])
def test_an_option_that_cannot_be_is_an_error_in_one_line(suite: pytest.Pytester, pairs: int) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick"'))
    result = run(suite, f"--flowbench-pairs={pairs}")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*mark flowbench: pairs was given {pairs}, expected at least 1"])
    assert "Traceback" not in result.stdout.str()


def test_the_fixture_needs_a_marker(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite="def test_it(measured):\n    measured.replay()\n")
    result = run(suite)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*mark the test with @pytest.mark.flowbench*"])


def test_disabled_benchmarks_measure_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick"'))
    run(suite, "--benchmark-disable").assert_outcomes(skipped=2)
    assert documents(suite) == []


def test_a_folder_that_cannot_be_written_fails_each_test_and_measures_once(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE.format(engines='"quick"'))
    (suite.path / "out").write_text("a file in the way")
    result = run(suite)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*cannot write out/*; choose another folder with --flowbench-out"])


def test_other_tests_are_left_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite="import sys\n\ndef test_it():\n    assert 'flowbench.measure' not in sys.modules\n")
    run(suite).assert_outcomes(passed=1)


def test_the_timer_shows_each_duration_once_per_round() -> None:
    timer = ReplayTimer()
    timer.load([0.25, 3.0])
    readings = [timer() for _ in range(4)]
    assert [readings[1] - readings[0], readings[3] - readings[2]] == [0.25, 3.0]
