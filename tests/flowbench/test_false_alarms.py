"""The committed sittings of one commit against itself: what is said of them follows from them, and other rules are judged fairly."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flowbench.cell import Case
from flowbench.commands.false_alarms import evidence, report
from flowbench.errors import FlowbenchError
from flowbench.judge.false_alarms import noise_floor, rate_of, smallest_found, verdicts_of
from flowbench.judge.times import Evidence
from flowbench.judge.verdict import Verdict
from flowbench.record import aa
from flowbench.record.run import Machine

NOISE = (0.004, -0.003, 0.001, -0.004, 0.003, -0.001)


@pytest.fixture
def other_rules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_rules", repository / "suites" / "other_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "other_rules", module)
    spec.loader.exec_module(module)
    return module


SAMPLES = sorted((Path(__file__).parents[2] / "reports").glob("aa-*/*.jsonl.xz"))


@pytest.mark.parametrize("samples", SAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_readme_says_what_the_samples_say(other_rules: ModuleType, samples: Path) -> None:
    readme = samples.with_name("README.md")
    text = readme.read_text()
    assert report(samples) in text, f"what `flowbench aa` reports of {samples.name} now belongs into {readme}"
    assert other_rules.table(samples) in text, "the table that suites/other_rules.py makes of it belongs there too"


def test_rules_see_what_their_tools_would_see(other_rules: ModuleType) -> None:
    rules = {rule.name: rule.says_changed for rule in other_rules.RULES}
    base = [[100.0, 102, 98, 101, 99] * 4] * 3
    for factor, changed in (
        (1.0, set()),
        (1.04, {"Mann"}),
        (1.2, {"Mann", "pytest", "asv", "110"}),
        (1.6, {"Mann", "pytest", "asv", "110", "150"}),
    ):
        head = [[factor * time for time in process] for process in base]
        for name, says in rules.items():
            assert says(base, head) == any(word in name for word in changed), (name, factor)


def test_rates_floors_and_what_would_be_found() -> None:
    def sitting(change: float) -> Evidence:
        return Evidence(tuple(change + one for one in NOISE), tuple(change + one for one in NOISE), 0.01)

    changes = [0.001 * number for number in range(20)]
    sittings = [sitting(change) for change in changes]
    assert noise_floor(sittings) == pytest.approx(0.0182, abs=1e-4)  # the 19th of 20
    assert noise_floor([sitting(-0.5)]) == pytest.approx(0.6487, abs=1e-4)
    alarms = rate_of(verdicts_of(sittings), (Verdict.SLOWER, Verdict.FASTER))
    assert (alarms.count, alarms.sittings, alarms.share) == (6, 20, 0.3)
    assert alarms.low < 0.3 < alarms.high
    needed = smallest_found([sitting(0.0)] * 5)
    found, missed = (verdicts_of([sitting(needed_log)])[0] for needed_log in (needed + 0.001, needed - 0.001))
    assert (found, missed) == (Verdict.SLOWER, Verdict.UNCLEAR)


def test_evidence_pairs_each_round_with_its_own_base() -> None:
    case = Case("linear", (4, 3, 16, 16), "float32", "eager", 1, False, True, True, 1)
    machine = Machine("A CPU", "x86_64", 2, 2, 2, 2**34, (), None, "Linux 6", "3.11.9")
    setting = aa.Setting(machine, None, "flow-eager", case, 3, 0, 1, 0, 2, 1, 0.02, {"head+3%": 0.03}, False)
    times_us = {"base": (100.0, 200.0, 400.0), "head": (101.0, 206.0, 396.0), "head+3%": (103.0, 206.0, 412.0)}
    rounds = [  # not in order; the third one confirms
        aa.Pair(side, pair, pair == 2, (times[pair],) * 3) for side, times in times_us.items() for pair in (2, 0, 1)
    ]
    sitting = aa.AaSitting("2026-11-29T10:00:00+00:00", 1.0, 0.5, tuple(rounds))
    one = evidence(setting, sitting, "head")
    assert [math.exp(ratio) for ratio in one.sampling] == pytest.approx([1.01, 1.03])
    assert [math.exp(ratio) for ratio in one.confirming] == pytest.approx([0.99])
    assert one.margin == 0.02
    slowed = evidence(setting, sitting, "head+3%")
    assert [math.exp(ratio) for ratio in (*slowed.sampling, *slowed.confirming)] == pytest.approx([1.03] * 3)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"half a line", b"\xff\xfe\n", b"[" * 100_000 + b"\n"])
def test_files_that_hold_no_sittings(tmp_path: Path, content: bytes) -> None:
    for name in ("sittings.jsonl", "sittings.jsonl.xz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FlowbenchError, match=r"expected sittings of flowbench aa") as error:
            aa.read(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(FlowbenchError, match="No such file"):
        aa.read(tmp_path / "none")


def test_a_file_of_sittings_is_begun_once_and_by_one(repository: Path, tmp_path: Path) -> None:
    kept = repository / "reports" / "aa-2-cores" / "unchanged.jsonl.xz"
    setting, sittings = aa.read(kept)
    out = tmp_path / "new" / "aa.jsonl"
    with aa.held(out):
        assert aa.begin(out, setting) == 0
        with pytest.raises(FlowbenchError, match="another process is writing"), aa.held(out):
            pass
    first = out.read_bytes()
    for length in (0, 5, 200, len(first) - 1):  # killed while it wrote the first line
        out.write_bytes(first[:length])
        assert aa.begin(out, setting) == 0
        assert out.read_bytes() == first
    aa.add(out, sittings[0])
    assert aa.begin(out, setting) == 1
    out.write_text("something else")
    with pytest.raises(FlowbenchError, match="expected sittings of flowbench aa"):
        aa.begin(out, setting)
    assert out.read_text() == "something else"
    with (
        pytest.raises(FlowbenchError, match=r"cannot write .*; choose another file with --out"),
        aa.held(out / "in-a-file"),
    ):
        pass
    compressed = tmp_path / kept.name
    compressed.write_bytes(kept.read_bytes())
    assert aa.begin(compressed, setting) == len(sittings)
    with pytest.raises(FlowbenchError, match="is compressed, which is for reading alone"):
        aa.add(compressed, sittings[0])
    assert compressed.read_bytes() == kept.read_bytes()
