"""The committed sittings of one commit against itself: what is said of them follows from them, and other rules are judged fairly."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, fmean
from types import ModuleType

import pytest

from flowbench.cell import Case
from flowbench.commands import false_alarms
from flowbench.commands.false_alarms import evidence, evidence_of_sides, report
from flowbench.errors import FlowbenchError
from flowbench.judge.false_alarms import Rate, noise_floor, rate_of, sitting_shift, smallest_found, verdicts_of
from flowbench.judge.times import Evidence, percent
from flowbench.judge.verdict import Verdict
from flowbench.record import aa
from flowbench.record.noise import read_floors
from flowbench.record.run import Machine

CHANGED = (Verdict.SLOWER, Verdict.FASTER)
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


def test_the_readme_adds_up_what_was_found_on_two_cores(repository: Path) -> None:
    folder = repository / "reports" / "aa-2-cores"
    files = {path.name: aa.read(path) for path in sorted(folder.glob("*.jsonl.xz"))}
    text = " ".join((folder / "README.md").read_text().split())
    sides = {name: evidence_of_sides(*read) for name, read in files.items()}
    alarms = rate_of(verdicts_of([one for by_side in sides.values() for one in by_side["head"]]), CHANGED)
    whole = f"{alarms.count} false alarms in {alarms.sittings} sittings (95 % interval {alarms.low:.1%} to {alarms.high:.1%})"
    assert whole in text
    largest = max(sitting_shift(by_side["head"]) for name, by_side in sides.items() if not files[name][0].load)
    assert f"the shift of a sitting, at most {percent(largest)} here, leaves it at 1 %" in text

    def found(side: str, at_floor: bool = False) -> Rate:
        judged = [
            replace(one, margin=noise_floor(by_side["head"])) if at_floor else one
            for by_side in sides.values()
            for one in by_side.get(side, ())
        ]
        return rate_of(verdicts_of(judged), (Verdict.SLOWER,))

    five, three = found("head+5%"), found("head+3%")
    assert f"+5 % is found in {five.count} of {five.sittings} ({percent(five.share)})" in text
    assert f"+3 % in {three.count} of {three.sittings} ({percent(three.share)})" in text
    five, three = found("head+5%", at_floor=True), found("head+3%", at_floor=True)
    left = f"{five.count} and {three.count} of {five.sittings} ({percent(five.share)} and {percent(three.share)})"
    assert f"leave {left}" in text


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
    alarms = rate_of(verdicts_of(sittings), CHANGED)
    assert (alarms.count, alarms.sittings, alarms.share) == (6, 20, 0.3)
    assert alarms.low < 0.3 < alarms.high
    needed = smallest_found([sitting(0.0)] * 5)
    found, missed = (verdicts_of([sitting(needed_log)])[0] for needed_log in (needed + 0.001, needed - 0.001))
    assert (found, missed) == (Verdict.SLOWER, Verdict.UNCLEAR)


def test_the_shift_of_a_sitting_is_what_the_intervals_leave_of_the_second_moment() -> None:
    def sitting(
        mean: float, error: float
    ) -> Evidence:  # two values, whose standard error is half of what lies between them
        return Evidence((mean - error, mean + error), (0.5, 0.7), 0.01)

    # (0.05^2 + 0.01^2) / 2 - (0.01^2 + 0.02^2) / 2 = 0.00105; what confirms has no part in it; t of 2 and of 3 degrees
    shift = sitting_shift([sitting(0.05, 0.01), sitting(-0.01, 0.02)])
    assert shift == pytest.approx(math.expm1(4.302653 * math.sqrt(0.00105)), rel=1e-6)
    assert sitting_shift([sitting(0.02, 0.01)] * 3) == pytest.approx(math.expm1(3.182446 * math.sqrt(0.0003)), rel=1e-6)
    assert sitting_shift([sitting(0.01, 0.02)] * 3) == 0


def simulated(shift: float, spread: float, sittings: int, margin: float, draw: random.Random) -> list[Evidence]:
    """Sittings of no change, each off by a normal shift in all its pairs, and each pair by a normal spread."""

    def one() -> Evidence:
        off = draw.gauss(0, shift)
        pairs = [draw.gauss(off, spread) for _ in range(16)]
        return Evidence(tuple(pairs[:10]), tuple(pairs[10:]), margin)

    return [one() for _ in range(sittings)]


@pytest.mark.parametrize("spread", [0.001, 0.01, 0.02])
def test_where_intervals_tell_all_noise_the_shift_is_nearly_none(spread: float) -> None:
    sittings = simulated(0.0, spread, 300, 0.01, random.Random(20261130))
    assert sitting_shift(sittings) < spread / 4
    assert max(0.01, sitting_shift(sittings)) == 0.01
    assert noise_floor(sittings) == pytest.approx(1.96 * spread / 4, rel=0.3), "which an interval of ten pairs tells"


@pytest.mark.parametrize("spread", [0.01, 0.03])
def test_what_all_pairs_of_a_sitting_share_is_found_and_raises_no_alarm_at_that_margin(spread: float) -> None:
    draw = random.Random(20261130)
    margin = sitting_shift(simulated(0.02, spread, 300, 0.01, draw))
    assert margin == pytest.approx(1.96 * 0.02, rel=0.15)
    alarms, at_one_per_cent = (
        rate_of(verdicts_of(simulated(0.02, spread, 500, size, draw)), CHANGED) for size in (margin, 0.01)
    )
    assert alarms.share < 0.05
    assert at_one_per_cent.share > 0.1, "with the least margin it would cry wolf"


@pytest.mark.parametrize("sittings", [10, 60])
def test_of_few_sittings_too_one_in_twenty_exceeds_the_shift(sittings: int) -> None:
    """Where pairs do not differ: a sitting over the root of the second moment of so many follows Student's t."""
    draw = random.Random(20261130)
    margins = [sitting_shift(simulated(0.02, 1e-6, sittings, 0.01, draw)) for _ in range(300)]
    beyond = [2 * (1 - NormalDist(0, 0.02).cdf(math.log1p(margin))) for margin in margins]
    assert fmean(beyond) == pytest.approx(0.05, abs=0.008)


def test_what_aa_says_is_judged_at_the_margin_of_a_comparison_there(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, kept = aa.read(repository / "reports" / "aa-2-cores" / "slowed-2.jsonl.xz")
    sitting = next(one for one in kept if any(pair.confirming and pair.side == "head" for pair in one.pairs))

    def off_by(factor: float) -> aa.AaSitting:
        """All sides but base are off by the factor, those that were slowed are 10 % slower besides; pairs differ by NOISE."""
        times_us = {"base": 1.0, "head": factor} | dict.fromkeys(setting.slowdowns, 1.1 * factor)
        noise = {side: 0.0 if side == "base" else 1.0 for side in times_us}
        pairs = [
            replace(one, steps_us=(1000 * times_us[one.side] * math.exp(noise[one.side] * NOISE[one.pair % 6]),))
            for one in sitting.pairs
        ]
        return replace(sitting, pairs=tuple(pairs))

    sittings = [off_by(factor) for factor in (1.04, 0.96, 1.02, 0.98, 1.0) * 2]
    sides = evidence_of_sides(setting, sittings)
    shift = sitting_shift([evidence(setting, one, "head") for one in sittings])
    assert shift == pytest.approx(0.065, abs=0.002)
    assert list(sides) == ["head", *setting.slowdowns]
    assert {one.margin for of_side in sides.values() for one in of_side} == {shift}
    assert rate_of(verdicts_of([replace(one, margin=0.01) for one in sides["head"]]), (Verdict.SLOWER,)).count == 4
    few = evidence_of_sides(setting, sittings[:9])
    loaded = evidence_of_sides(replace(setting, load=True), sittings)
    assert {one.margin for by_side in (few, loaded) for of_side in by_side.values() for one in of_side} == {0.01}

    out = tmp_path / "aa.jsonl"
    aa.begin(out, setting)
    for one in sittings:
        aa.add(out, one)
    text = report(out)
    assert "false alarms: 0 of 10" in text
    assert "shift of a sitting: 6.5 % (" in text
    assert "for the margin within a sitting, 6.5 % here" in text
    assert "+3 % injected: found in 8 of 10" in text, "10 % slower, but off by 4 % the other way, is not beyond 6.5 %"

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    false_alarms._keep(out)
    (kept_noise,) = read_floors(setting.machine).values()
    assert (kept_noise.shift, kept_noise.floor) == (shift, noise_floor(sides["head"]))
    assert (kept_noise.alarms, kept_noise.sittings) == (0, 10)


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


@pytest.mark.parametrize("name", ["a.lock", "poetry.jsonl"])
def test_sittings_are_kept_under_any_name_and_beside_any_file(repository: Path, tmp_path: Path, name: str) -> None:
    setting, sittings = aa.read(repository / "reports" / "aa-2-cores" / "unchanged.jsonl.xz")
    beside = tmp_path / "poetry.lock"
    beside.write_text("poetry's")
    with aa.held(tmp_path / name):
        aa.begin(tmp_path / name, setting)
        aa.add(tmp_path / name, sittings[0])
    assert aa.read(tmp_path / name) == (setting, sittings[:1])
    assert beside.read_text() == "poetry's"


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
