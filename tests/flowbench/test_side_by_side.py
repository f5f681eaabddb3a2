"""Operations side by side: two processes in turn, results compared first, a table at the end, and no process left."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.codec import decode
from flowbench.measure.operations import Sides
from flowbench.measure.processes import marked
from flowbench.record.operations import Comparison
from flowbench.report.operations import table

pytest_plugins = ["pytester"]

SIDES = '''
"""Two sides that sleep; one can go wrong in several ways."""
import os, time
import numpy as np
from flowbench.operation import Prepared

class Quick:
    seconds = 0.001

    @staticmethod
    def start(device, threads):
        assert (device, threads) == ("cpu", 1), (device, threads)
        assert os.environ["OMP_NUM_THREADS"] == "1"
        print("what a side prints disturbs nothing")

    @classmethod
    def sleep(cls, values):
        return Prepared(lambda: time.sleep(cls.seconds), lambda: [np.array(values), np.ones((2, 3))])

    @classmethod
    def wrong(cls):
        return cls.sleep([1.0, 2.0])

    @classmethod
    def breaks(cls):
        return cls.sleep([])

    dies = of_other_shape = not_finite = breaks

class Slow(Quick):
    seconds = 0.008

    @classmethod
    def wrong(cls):
        return cls.sleep([1.0, 2.1])

    @classmethod
    def breaks(cls):
        raise RuntimeError("no such\\noperation here")

    @classmethod
    def dies(cls):
        os.write(2, b"last words\\n")
        os._exit(3)

    @classmethod
    def of_other_shape(cls):
        return cls.sleep([1.0])

    @classmethod
    def not_finite(cls):
        return cls.sleep([float("nan")])
'''

SUITE = """
import pytest

SIDES = {"Quick": "toys:Quick", "Slow": "toys:Slow"}

@pytest.mark.parametrize("size", [1, 2])
def test_sleep(side_by_side, size):
    made = side_by_side(SIDES, "sleep", {"values": [1.0] * size}, tolerance=0, title="nap", label=f"of {size}", uses=size)
    assert made.difference == 0

@pytest.mark.parametrize("name", ["wrong", "breaks", "dies"])
def test_fault(side_by_side, name):
    side_by_side(SIDES, name, {}, tolerance=1e-3)

def test_the_next_one(side_by_side):
    side_by_side(SIDES, "sleep", {"values": [1.0]}, tolerance=0)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, repository: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with a suite and its two sides."""
    pytester.makepyfile(toys=SIDES, test_suite=SUITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), str(pytester.path)]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts sooner with the one plugin it is about
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    options = ["-p", "flowbench.pytest_plugin", "--flowbench-out=out", "--flowbench-pairs=3", "--flowbench-threads=1"]
    return suite.runpytest_subprocess(*options, "--flowbench-device=cpu", *arguments, timeout=120)


def test_the_table_has_a_row_for_each_and_the_sum_of_all_uses(suite: pytest.Pytester) -> None:
    result = run(suite, "-k", "sleep")
    result.assert_outcomes(passed=2, deselected=4)
    result.stdout.fnmatch_lines(
        [
            "Quick and Slow in turn on cpu, 1 threads; ms a call; ratio: Slow / Quick, above 1 Quick is quicker",
            "operation  of  *uses *Quick *Slow  ratio *lowest - highest",
            "nap        of 1 * 1 *",
            "nap        of 2 * 2 *",
            "nap        all uses *",
            "flowbench: out/operations-*.jsonl has every round",
        ]
    )
    (file,) = suite.path.glob("out/operations-*.jsonl")
    head, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert set(head) == {"machine", "versions"}
    kept = [decode(Comparison, row) for row in rows]
    assert [(each.label, each.uses, len(each.subject_ms), len(each.reference_ms)) for each in kept] == [
        ("of 1", 1, 3, 3),
        ("of 2", 2, 3, 3),
    ]
    for each in kept:
        assert min(each.subject_ms) >= 1
        assert min(each.reference_ms) >= 8


def test_what_goes_wrong_fails_its_test_and_no_other(suite: pytest.Pytester) -> None:
    result = run(suite, "-k", "fault or next")
    result.assert_outcomes(passed=1, failed=3, deselected=2)
    result.stdout.fnmatch_lines_random(
        [
            "*wrong: the results of Quick and Slow differ by *of their norm, allowed is 1e-03; a wrong result has no speed*",
            "*Slow: RuntimeError: no such operation here*",
            "*dies: Slow: its process ended with status 3; its last words: last words*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize("operation", ["of_other_shape", "not_finite"])
def test_results_that_cannot_be_compared_are_wrong(suite: pytest.Pytester, operation: str) -> None:
    suite.makepyfile(
        test_suite=f"""
def test_it(side_by_side):
    side_by_side({{"Quick": "toys:Quick", "Slow": "toys:Slow"}}, "{operation}", {{}}, tolerance=1e9)
"""
    )
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the results of Quick and Slow differ by inf of their norm*"])


def test_a_side_that_is_not_there_is_named(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_suite="""
def test_it(side_by_side):
    side_by_side({"Quick": "toys:Quick", "Nobody": "nowhere"}, "sleep", {"values": []}, tolerance=0)
"""
    )
    result = run(suite)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Nobody: ModuleNotFoundError: No module named 'nowhere'*"])


def test_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toys.py").write_text(SIDES.replace('("cpu", 1)', '("cpu", threads)'))
    monkeypatch.syspath_prepend(tmp_path)
    mark = f"test-no-process-is-left-{os.getpid()}"
    sides = Sides({"Quick": "toys:Quick", "Slow": "toys:Slow"}, "cpu", 1, mark)
    comparison = sides.compare("sleep", {"values": [2.0]}, tolerance=0, rounds=2)
    assert len(marked(mark)) >= 2
    sides.close()
    assert marked(mark) == {}
    assert comparison.operation == "sleep"


def _comparison(operation: str, label: str, uses: int, ours: float, theirs: float) -> Comparison:
    return Comparison(
        operation, label, uses, "cuda", 16, "Flow", "PyTorch", (ours, 2 * ours), (theirs, 2 * theirs), 0.0
    )


def test_the_table_reads_so() -> None:
    rows = [
        _comparison("convolution", "64->64", 3, 0.1, 0.2),
        _comparison("convolution", "3->64", 1, 2, 1),
        _comparison("linear", "2048->1000", 0, 200, 100),
    ]
    assert list(table(rows)) == [
        "Flow and PyTorch in turn on cuda; ms a call; ratio: PyTorch / Flow, above 1 Flow is quicker",
        "operation    of          uses    Flow  PyTorch  ratio  lowest - highest",
        "convolution  64->64         3  0.1500   0.3000   2.00       2.00 - 2.00",
        "convolution  3->64          1   3.000    1.500   0.50       0.50 - 0.50",
        "convolution  all uses           3.450    2.400   0.70",
        "linear       2048->1000         300.0    150.0   0.50       0.50 - 0.50",
    ]
    assert list(table([])) == []


def test_ratios_of_too_few_rounds_are_marked() -> None:
    row = _comparison("convolution", "3->64", 0, 2, 1)
    once = replace(row, subject_ms=(2.0,), reference_ms=(1.0,))
    uneven = replace(row, subject_ms=(2.0, 2.0), reference_ms=(1.0, 3.0))
    lines = list(table([once, uneven]))[2:]
    assert [line.split("  ")[-1].strip() for line in lines] == ["one pair only", "0.50 - 1.50, too few pairs"]


@pytest.mark.parametrize("size", ["0", "-3"])
def test_a_batch_without_images_is_refused_before_anything_runs(suite: pytest.Pytester, size: str) -> None:
    result = run(suite, f"--flowbench-batch-size={size}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--flowbench-batch-size: a batch has at least one image, not {size}"])
