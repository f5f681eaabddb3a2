"""Writes a run as OpenMetrics text, for a dashboard: times in seconds, sizes in bytes, ratios, verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowbench.cell import Case
from flowbench.errors import FlowbenchError
from flowbench.record.quantities import instant
from flowbench.report.changes import rows_of
from flowbench.report.facts import Facts
from flowbench.report.words import one_line

_OF_CASE = ("engine", "model", "case", "batch_size", "world_size")


def write(facts: Facts) -> str:
    """The exposition of `facts`, ending with `# EOF`."""
    try:
        from prometheus_client.openmetrics.exposition import generate_latest
    except ImportError:
        raise FlowbenchError("OpenMetrics needs prometheus-client: python -m pip install 'flowbench[report]'") from None
    return str(generate_latest(_Families(facts)).decode())


class _Families:
    """What the library's writer asks for its metrics."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Any]:
        """The families in their order."""
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        document = self._facts.document
        run = InfoMetricFamily("flowbench_run", "The run that all of this is from.")
        commit = document.git.commit if document.git else "unknown"
        about = {
            "run_id": document.run_id,
            "commit": commit,
            "device": self._facts.device,
            "flowbench": document.flowbench_version,
        }
        run.add_metric([], {key: one_line(value) for key, value in about.items()})
        yield run
        created = GaugeMetricFamily("flowbench_run_created_seconds", "When the run began, since 1970.")
        created.add_metric([], instant(document.created).timestamp())
        yield created
        yield from _of_engines(self._facts, GaugeMetricFamily)
        if self._facts.changes is not None:
            yield from _of_changes(self._facts, GaugeMetricFamily)


def _of_engines(facts: Facts, gauge: Any) -> Iterator[Any]:
    times = gauge("flowbench_step_time_seconds", "Median step of a cell.", labels=_OF_CASE)
    memory = gauge(
        "flowbench_memory_peak_bytes", "Largest peak of a rank, by kind.", labels=(*_OF_CASE, "rank", "kind")
    )
    speed = gauge("flowbench_relative_speed", "Reference time / subject time.", labels=(*_OF_CASE, "end"))
    measured = gauge("flowbench_cell_measured", "1 where a cell was measured, 0 where not.", labels=_OF_CASE)
    seen = set()
    for comparison in facts.comparisons:
        for side in (comparison.reference, comparison.subject):
            if side is None or (side.engine, comparison.case) in seen:
                continue
            seen.add((side.engine, comparison.case))
            labels = _labels(side.engine, comparison.label, comparison.case)
            measured.add_metric(labels, int(side.status == "measured"))
            if side.times is not None:
                times.add_metric(labels, side.times.median_ms / 1000)
            for rank in side.memory:
                for kind, size in rank.peaks.items():
                    memory.add_metric([*labels, str(rank.rank), kind], size)
        if comparison.ratio is not None:
            labels = _labels(comparison.subject.engine, comparison.label, comparison.case)
            low, high = comparison.ratio.telling_interval or (None, None)
            for end, value in (("mean", comparison.ratio.geometric_mean), ("low", low), ("high", high)):
                if value is not None:
                    speed.add_metric([*labels, end], value)
    yield from (measured, times, memory, speed)


def _of_changes(facts: Facts, gauge: Any) -> Iterator[Any]:
    assert facts.changes is not None
    verdicts = gauge("flowbench_verdict", "1 for what became of a quantity.", labels=(*_OF_CASE, "quantity", "verdict"))
    ratios = gauge("flowbench_change_ratio", "Head's value / base's.", labels=(*_OF_CASE, "quantity", "end"))
    for row in rows_of(facts):
        labels = _labels(row.engine, row.label, row.case)
        for one in (row.time, *row.memory):
            if one is None:
                continue
            verdicts.add_metric([*labels, one.quantity.label, str(one.verdict)], 1)
            if one.change is not None:
                ends = (("mean", one.change.ratio), ("low", one.change.low), ("high", one.change.high))
                for end, value in ends:
                    if value is not None:
                        ratios.add_metric([*labels, one.quantity.label, end], value)
    yield from (verdicts, ratios)


def _labels(engine: str, label: str, case: Case) -> list[str]:
    batch = str(case.input_shape[0]) if case.input_shape else ""
    return [one_line(engine), one_line(case.model), one_line(label, 400), batch, str(case.world_size)]
