"""Benchmarks as pytest files: one interleaved sitting, shown as pytest-benchmark's table, JSON and compare.

A suite marks a test with what to measure, in the words of `flowbench.measure.plan.Request`, and replays each cell:

    @pytest.mark.flowbench(models=["resnet50"], batch_sizes=[4, 2, 1])
    def test_training(measured):
        measured.replay()

The test is repeated for every cell. The first one that runs measures all selected cells as `flowbench run` would; then
pytest-benchmark is told the times. A round of its table is a fresh process (its median step), never a step.

For single operations there is the fixture `side_by_side`: see `flowbench.pytest_operations`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowbench.errors import FlowbenchError

if TYPE_CHECKING:
    from flowbench.cell import Cell
    from flowbench.judge.stats import Ratio
    from flowbench.measure.plan import Request
    from flowbench.record.run import RunDocument
    from flowbench.record.sample import Sample

MARKER = "flowbench"
pytest_plugins = ["flowbench.pytest_operations"]


class Measured:
    """One cell after its sitting: its samples, its ratio to the reference, and the replay for pytest-benchmark."""

    def __init__(self, cell: Cell, document: RunDocument, path: Path, benchmark: Any, timer: ReplayTimer) -> None:
        self.cell = cell
        self.document = document
        self.path = path
        self._benchmark = benchmark
        self._timer = timer

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The good samples, in the order of the rounds."""
        return tuple(sample for sample in self.document.samples_of(self.cell) if sample.status == "ok")

    @property
    def ratio(self) -> Ratio | None:
        """Reference time / this cell's time over the matched rounds; None for the reference itself, or without any."""
        from flowbench.judge.pairs import ratio_to_reference

        return ratio_to_reference(self.document, self.cell)

    def replay(self) -> None:
        """Tell pytest-benchmark the times, the memory and the losses; fails where the cell failed or is void."""
        from flowbench.judge.stats import process_median

        bad = [sample for sample in self.document.samples_of(self.cell) if sample.status != "ok"]
        if bad or not self.samples:
            said = dict.fromkeys(f"{sample.status}: {sample.error}" for sample in bad)
            reasons = "; ".join(said) or "not measured: the sitting ended before it"
            pytest.fail(f"{self.cell.label}: {reasons} (run document: {self.path})", pytrace=False)
        durations_s = [process_median(sample.steps_ms) / 1e3 for sample in self.samples]
        self._timer.load(durations_s)
        self._benchmark.extra_info.update(self.extra_info())
        self._benchmark.pedantic(_nothing, rounds=len(durations_s))

    def extra_info(self) -> dict[str, Any]:
        """What pytest-benchmark has no column for: sizes in bytes (the largest of all processes), times in ms."""
        ratio = self.ratio
        memory = [rank.memory for sample in self.samples for rank in sample.ranks]
        return {
            "cell": self.cell.key,
            "engine": self.cell.engine,
            "reference": self.document.reference,
            "relative_speed": ratio and ratio.geometric_mean,
            "relative_speed_interval": ratio and ratio.interval,
            "steps_ms": [list(sample.steps_ms) for sample in self.samples],
            "host_ms": [[list(rank.host_ms or ()) for rank in sample.ranks] for sample in self.samples],
            "losses": [[list(rank.losses) for rank in sample.ranks] for sample in self.samples],
            "allocated_peak_bytes": _largest([each.allocated_peak_bytes for each in memory]),
            "reserved_peak_bytes": _largest([each.reserved_peak_bytes for each in memory]),
            "resident_peak_bytes": _largest([each.resident_peak_bytes for each in memory]),
            "resident_above_bytes": _largest([each.resident_above_bytes for each in memory]),
            "gpu_used_bytes": _largest([each.gpu_used_bytes for each in memory]),
            "run_document": str(self.path),
        }


class ReplayTimer:
    """A clock that pytest-benchmark reads twice a round, and that then shows a time which was measured elsewhere."""

    __name__ = "replay_of_flowbench"

    def __init__(self) -> None:
        self._readings: Iterator[float] = iter(())

    def load(self, durations_s: Sequence[float]) -> None:
        """Show these durations, one a round."""
        self._readings = iter([reading for duration in durations_s for reading in (0.0, duration)])

    def __call__(self) -> float:
        return next(self._readings)


class Sitting:
    """What the tests under one marker share: the plan, and from the first test that runs on, what was measured."""

    def __init__(self, plan: RunDocument, out: Path) -> None:
        self.plan = plan
        self._out = out
        self._outcome: tuple[RunDocument, Path] | FlowbenchError | None = None

    def measure(self, cells: Sequence[Cell]) -> tuple[RunDocument, Path]:
        """The run document with these cells of the plan, and its file; only the first call measures."""
        if self._outcome is None:
            try:
                self._outcome = self._sit(cells)
            except FlowbenchError as error:
                self._outcome = error
        if isinstance(self._outcome, FlowbenchError):
            pytest.fail(str(self._outcome), pytrace=False)
        return self._outcome

    def lines(self) -> Iterator[str]:
        """What to say at the end: where the document is, and what is not in it."""
        document, path = self._outcome if isinstance(self._outcome, tuple) else (self.plan, None)
        if path is not None:
            yield f"flowbench: {path} has it all: flowbench report {path}"
        for left_out in document.not_measured:
            yield f"flowbench: not measured: {left_out.what}: {left_out.reason}"

    def _sit(self, cells: Sequence[Cell]) -> tuple[RunDocument, Path]:
        from flowbench.measure.progress import ProgressDisplay
        from flowbench.measure.session import run_session
        from flowbench.record import store

        document = dataclasses.replace(self.plan, cells=tuple(cells))
        with store.way_out("choose another folder with --flowbench-out"):
            path = store.create(self._out, document)
            with ProgressDisplay(document) as display:
                return run_session(path, document, display), path


@dataclasses.dataclass(frozen=True)
class Planned:
    """A test's parameter: a cell of a sitting."""

    cell: Cell
    sitting: Sitting


class Sittings:
    """All sittings of this run of pytest, by what they were asked for."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._sittings: dict[Request, Sitting] = {}

    def of(self, marker: pytest.Mark) -> Sitting:
        """The sitting a marker asks for; raises FlowbenchError for one that cannot be planned."""
        from flowbench.measure.plan import plan_run

        request = self._request(marker)
        if request not in self._sittings:
            plan = plan_run(request, ("pytest", *self._config.invocation_params.args))
            self._sittings[request] = Sitting(plan, Path(self._config.getoption("flowbench_out")))
        return self._sittings[request]

    def _request(self, marker: pytest.Mark) -> Request:
        from flowbench.codec import CodecError, decode
        from flowbench.measure.plan import Request

        words = [field.name for field in dataclasses.fields(Request)]
        unknown = [*map(repr, marker.args), *sorted(set(marker.kwargs) - set(words))]
        if unknown:
            raise FlowbenchError(
                f"mark {MARKER}: {', '.join(unknown)} was given, expected keywords out of {', '.join(words)}"
            )
        asked: dict[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in marker.kwargs.items()
        }
        options = {
            name: self._config.getoption(f"flowbench_{name}")
            for name in ("steps", "warmup", "pairs", "threads", "device")
        }
        asked |= {name: value for name, value in options.items() if value is not None}
        try:
            return decode(Request, asked)
        except CodecError as error:
            raise FlowbenchError(
                f"mark {MARKER}: {error.path.removeprefix('$.')} was given {error.given}, expected {error.expected}"
            ) from None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name the run documents, and what is missing in them."""
        for sitting in self._sittings.values():
            for line in sitting.lines():
                terminalreporter.write_line(line)


_SITTINGS = pytest.StashKey[Sittings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `pytest suites`."""
    group = parser.getgroup("flowbench", "flowbench: interleaved measurements of training steps")
    group.addoption(
        "--flowbench-out", metavar="DIR", default="reports/out", help="Where the run documents are written."
    )
    for name in ("steps", "warmup", "pairs", "threads"):
        group.addoption(f"--flowbench-{name}", type=int, metavar="N", help=f"Takes the place of every suite's {name}.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the sittings of this run."""
    config.addinivalue_line(
        "markers", f"{MARKER}(**request): measure cells; flowbench.measure.plan.Request has the keywords"
    )
    config.stash[_SITTINGS] = Sittings(config)
    config.pluginmanager.register(config.stash[_SITTINGS], "flowbench-sittings")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a marked test for each cell of its sitting."""
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is None or "measured" not in metafunc.fixturenames:
        return
    try:
        sitting = metafunc.config.stash[_SITTINGS].of(marker)
    except FlowbenchError as error:
        raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
    planned = [Planned(cell, sitting) for cell in sitting.plan.cells]
    metafunc.parametrize("measured", planned, ids=[_test_id(each.cell) for each in planned], indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the table by case, and give pytest-benchmark the clock that replays."""
    for item in items:
        planned = _planned(item)
        if planned is not None:
            own = item.get_closest_marker("benchmark")
            settings = {"group": planned.cell.case.label, **(own.kwargs if own else {}), "timer": ReplayTimer()}
            item.add_marker(pytest.mark.benchmark(**settings), append=False)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """The cell of this test after its sitting: call `replay()`, then assert what you like."""
    planned = _planned(request.node)
    if planned is None:
        pytest.fail(
            f"the fixture `measured` needs to know what: mark the test with @pytest.mark.{MARKER}(…)", pytrace=False
        )
    if not request.config.pluginmanager.hasplugin("benchmark"):
        pytest.fail(
            "the fixture `measured` needs pytest-benchmark (python -m pip install pytest-benchmark)", pytrace=False
        )
    benchmark = request.getfixturevalue("benchmark")
    if benchmark.disabled:
        pytest.skip("benchmarks are disabled (--benchmark-disable, or pytest-xdist)")
    together = [each.cell for each in map(_planned, request.session.items) if each and each.sitting is planned.sitting]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        document, path = planned.sitting.measure(list(dict.fromkeys(together)))
    timer = request.node.get_closest_marker("benchmark").kwargs["timer"]
    return Measured(planned.cell, document, path, benchmark, timer)


def _planned(item: Any) -> Planned | None:
    parameter = item.callspec.params.get("measured") if hasattr(item, "callspec") else None
    return parameter if isinstance(parameter, Planned) else None


def _test_id(cell: Cell) -> str:
    return f"{cell.model}-{'x'.join(map(str, cell.input_shape))}-{cell.engine}"


def _largest(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return max(known, default=None)


def _nothing() -> None:
    """What pytest-benchmark calls in place of the step, which was timed elsewhere."""
