"""Limits: what is checked, as numbers; and what is refused, by name."""

from __future__ import annotations

import dataclasses

import pytest
from sittings import CASE, MIB, sitting

from flowbench.errors import FlowbenchError
from flowbench.judge.compare import judge_document
from flowbench.judge.limits import check_limits, parse_limits
from flowbench.judge.verdict import Change, ComparisonSet, LimitResult


def checked(text: str, comparison: ComparisonSet | None = None) -> list[LimitResult]:
    return list(
        check_limits(parse_limits(text, "limits"), comparison or judge_document(sitting({"head": 1.1})), "limits")
    )


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        ("min_relative_speed = 1.0", True), ("min_relative_speed = 1.15", False), ("max_slowdown = 0.11", True),
        ("max_slowdown = 0.09", False), ("max_step_ms = 112", True), ("max_step_ms = 9", False), ("max_step_ms = 1000", True),
        ("max_allocated_mib = 100", True), ("max_allocated_mib = 99.9", False), ("max_reserved_mib = 400", True),
        ("max_resident_mib = 999", False),
    ],
)  # fmt: skip
def test_thresholds_are_compared_as_numbers(threshold: str, kept: bool) -> None:
    (result,) = checked(f'[[limit]]\ncell = "flow-eager/resnet18/4x*"\n{threshold}\nexit_code = 3\n')
    assert result.kept is kept
    assert result.exit_code == (0 if kept else 3)
    name, _, allowed = threshold.partition(" = ")
    unit = {"max_step_ms": " ms", "min_relative_speed": "", "max_slowdown": ""}.get(name, " MiB")
    assert f"{result.measured:.4g}{unit}, {name} = {allowed.removesuffix('.0')}: " in result.line
    assert result.line.endswith("kept" if kept else "exceeded")


def test_a_limit_holds_at_every_cell_it_matches_and_has_the_say_on_the_exit_code() -> None:
    comparison = judge_document(sitting())
    results = checked('[[limit]]\ncell = "*"\nmax_step_ms = 1\nexit_code = 7', comparison)
    assert len(results) == 2
    assert dataclasses.replace(comparison, limits=tuple(results)).exit_code == 7
    unchecked = dataclasses.replace(results[0], measured=None, kept=None, exit_code=2)
    assert dataclasses.replace(comparison, limits=(unchecked, *results)).exit_code == 7, "one is exceeded for certain"
    assert dataclasses.replace(comparison, limits=(unchecked,)).exit_code == 2
    assert checked("", comparison) == []


def test_memory_is_that_of_the_rank_that_takes_most() -> None:
    document = sitting(cases=(dataclasses.replace(CASE, world_size=2, ddp=True),))
    samples = []
    for sample in document.samples:
        one, other = sample.ranks
        less = dataclasses.replace(other.memory, allocated_peak_bytes=60 * MIB)
        samples.append(dataclasses.replace(sample, ranks=(one, dataclasses.replace(other, memory=less))))
    comparison = judge_document(dataclasses.replace(document, samples=tuple(samples)))
    kept = [checked(f'[[limit]]\ncell = "*"\nmax_allocated_mib = {most}', comparison)[0].kept for most in (100, 80)]
    assert kept == [True, False]


def test_what_was_not_measured_is_not_kept() -> None:
    comparison = judge_document(
        sitting(spoiled={("head", case): "failed" for case in {one.case for one in judge_document(sitting()).times}})
    )
    (result, _) = checked('[[limit]]\ncell = "*"\nmax_step_ms = 1000', comparison)
    assert (result.kept, result.exit_code) == (None, 2)
    (gpu, _) = checked('[[limit]]\ncell = "*"\nmax_gpu_mib = 1', judge_document(sitting(peaks={"head": MIB})))
    assert "was not measured" in gpu.line


@pytest.mark.parametrize(("pairs", "few"), [((0,), "one pair only"), ((0, 1), "too few pairs")])
@pytest.mark.parametrize(
    ("threshold", "measured"),
    [
        ("min_relative_speed = 0.5", "relative speed is"),
        ("max_slowdown = 0.5", "slowdown is"),
        ("max_step_ms = 500", None),
    ],
)
def test_a_ratio_of_too_few_pairs_cannot_be_judged(
    pairs: tuple[int, ...], few: str, threshold: str, measured: str | None
) -> None:
    """However far from the limit it is: its interval says nothing. A time is no ratio."""
    document = sitting()
    samples = [
        dataclasses.replace(
            one,
            ranks=tuple(dataclasses.replace(rank, steps_ms=(130.0,) * 4) for rank in one.ranks)
            if one.pair == 1 and "head" in one.cell
            else one.ranks,
        )
        for one in document.samples
        if one.pair in pairs
    ]
    comparison = judge_document(dataclasses.replace(document, samples=tuple(samples)))
    (result, _) = checked(f'[[limit]]\ncell = "*"\n{threshold}\nexit_code = 3', comparison)
    assert (result.kept, result.exit_code) == ((True, 0) if measured is None else (None, 2))
    assert result.is_unclear == (measured is not None)
    if measured is not None:
        assert f"{measured} {result.measured:.4g} ({few}), {threshold}: cannot be judged" in result.line


@pytest.mark.parametrize(
    ("threshold", "interval", "kept"),
    [
        ("max_slowdown = 0.05", (0.91, 1.3), None),
        ("max_slowdown = 0.05", (1.04, 1.16), None),
        ("max_slowdown = 0.05", (1.06, 1.14), False),
        ("max_slowdown = 0.11", (0.91, 1.3), True),
        ("min_relative_speed = 1.2", (0.9, 1.3), None),
        ("min_relative_speed = 1.2", (1.0, 1.19), False),
        ("min_relative_speed = 1.0", (0.9, 1.3), True),
    ],
)
def test_a_ratio_is_beyond_its_limit_where_its_whole_interval_is(
    threshold: str, interval: tuple[float, float], kept: bool | None
) -> None:
    """Of a ratio within its limit the mean has the say: what is not slower for certain fails no job."""
    comparison = judge_document(sitting({"head": 1.1}))
    times = tuple(
        dataclasses.replace(time, change=Change(1.1, *interval), head_relative_interval=interval)
        for time in comparison.times
    )
    (result, _) = checked(
        f'[[limit]]\ncell = "*"\n{threshold}\nexit_code = 3', dataclasses.replace(comparison, comparisons=times)
    )
    assert (result.kept, result.exit_code) == (kept, {True: 0, False: 3, None: 2}[kept])
    less = threshold.startswith("max")
    said = f" (95 % interval {interval[0] - less:.4g} to {interval[1] - less:.4g}), {threshold.removesuffix('.0')}: cannot be judged"
    assert result.line.endswith(said) == (kept is None)


def test_a_limit_that_is_merely_unclear_has_the_exit_code_of_what_is_unclear() -> None:
    comparison = judge_document(sitting())
    (kept, _) = checked('[[limit]]\ncell = "*"\nmin_relative_speed = 0.5', comparison)
    unclear = dataclasses.replace(kept, kept=None, exit_code=2)
    lost = dataclasses.replace(unclear, measured=None)
    for limits, only_unclear, exit_code in (
        ((kept,), False, 0),
        ((kept, unclear), True, 2),
        ((unclear, lost), False, 2),
        ((unclear, dataclasses.replace(kept, kept=False, exit_code=7)), False, 7),
    ):
        judged = dataclasses.replace(comparison, limits=limits)
        assert (judged.is_only_unclear, judged.exit_code) == (only_unclear, exit_code)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[limit]\n", "not TOML"),
        ("[limits]\n", "unknown key 'limits'"),
        ('limit = "x"', "limit is no list of tables"),
        ('[limit]\ncell = "*"\nmax_step_ms = 1', "expected [[limit]] with two brackets"),
        ("[[limit]]\nmax_step_ms = 1", "its cell is None"),
        ('[[limit]]\ncell = "*"', "no threshold"),
        ('[[limit]]\ncell = "*"\nmax_speed = 1', "unknown key 'max_speed'"),
        ('[[limit]]\ncell = "*"\nmax_step_ms = "92.8"', "max_step_ms is '92.8', expected a number"),
        ('[[limit]]\ncell = "*"\nmax_step_ms = nan', "expected a number"),
        ('[[limit]]\ncell = "*"\nmax_step_ms = true', "expected a number"),
        (f'[[limit]]\ncell = "*"\nmax_step_ms = 1{"0" * 400}', "expected a number from 0 to 1e+15"),
        (f'[[limit]]\ncell = "*"\nmax_step_ms = 1{"0" * 5000}', "not TOML that can be read: Exceeds the limit"),
        (f"limit = {'[' * 100_000}", "nested too deeply"),
        ('[[limit]]\ncell = "*"\nmax_step_ms = 1\nexit_code = 2', "exit_code is 2"),
        ('[[limit]]\ncell = "flow-eager/resnet999/*"\nmax_step_ms = 1', "matches no cell"),
    ],
)
def test_what_is_refused_is_named(text: str, said: str) -> None:
    with pytest.raises(FlowbenchError, match="limits: ") as error:
        checked(text)
    assert said in str(error.value)
