"""The committed sittings of one commit against itself: what is said of them follows from them, and other rules are judged fairly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flowbench.errors import FlowbenchError
from flowbench.false_alarms import evidence, report
from flowbench.judge.false_alarms import noise_floor, rate_of, smallest_found, verdicts_of
from flowbench.judge.times import Evidence
from flowbench.judge.verdict import Verdict
from flowbench.record import aa

NOISE = (0.004, -0.003, 0.001, -0.004, 0.003, -0.001)


@pytest.fixture(scope="module")
def folder(repository: Path) -> Path:
    return repository / "reports" / "aa-2-cores"


@pytest.fixture
def other_rules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("other_rules", repository / "suites" / "other_rules.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "other_rules", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["sittings", "unchanged"])
def test_the_readme_says_what_the_samples_say(folder: Path, other_rules: ModuleType, name: str) -> None:
    text, samples = (folder / "README.md").read_text(), folder / f"{name}.jsonl.xz"
    assert report(samples) in text
    assert other_rules.table(samples) in text


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


def test_evidence_pairs_each_round_with_its_own_base(folder: Path) -> None:
    setting, sittings = aa.read(folder / "sittings.jsonl.xz")
    one = evidence(setting, sittings[0], "head")
    assert len(one.sampling) == setting.pairs
    assert one.margin == setting.least_margin
    assert set(setting.slowdowns) == {"head+3%", "head+5%"}


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"half a line", b"\xff\xfe\n"])
def test_files_that_hold_no_sittings(tmp_path: Path, content: bytes) -> None:
    for name in ("sittings.jsonl", "sittings.jsonl.xz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FlowbenchError, match=r"expected sittings of flowbench aa") as error:
            aa.read(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(FlowbenchError, match="No such file"):
        aa.read(tmp_path / "none")
