"""Writes every sample of a run as a table for pandas, R or a spreadsheet: a row per step of each rank, as CSV or Parquet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from flowbench.cell import Case
from flowbench.errors import FlowbenchError
from flowbench.record.sample import Memory, RankSample, Sample
from flowbench.report.facts import Facts

_INTEGERS = ("batch_size", "world_size", "threads", "pair", "position", "rank", "rank_threads", "step")
_MEMORY = tuple(field.name for field in dataclasses.fields(Memory) if field.name.endswith("_bytes"))


def write_csv(facts: Facts) -> str:
    """The table as CSV: times in ms, sizes in bytes, empty where there is no value."""
    return str(frame(facts).to_csv(index=False, lineterminator="\n"))


def write_parquet(facts: Facts) -> bytes:
    """The table as one Parquet file."""
    table = frame(facts)
    try:
        return bytes(table.to_parquet(index=False, engine="pyarrow"))
    except ImportError:
        raise FlowbenchError("Parquet needs pyarrow: python -m pip install 'flowbench[report]'") from None


def frame(facts: Facts) -> Any:
    """The `pandas.DataFrame`: a row per step of each rank, and one for a sample that has no rank, so that none is lost."""
    try:
        import pandas as pd
    except ImportError:
        raise FlowbenchError("tables of samples need pandas: python -m pip install 'flowbench[report]'") from None
    table = pd.DataFrame.from_records(list(_rows(facts)), columns=_columns())
    # Whole numbers stay whole beside what is missing, and a file has the same types whatever is in it.
    return table.astype({name: _type(name) for name in table.columns})


def _type(name: str) -> str:
    if name in _INTEGERS or name in _MEMORY:
        return "Int64"
    if name in ("time_ms", "host_ms", "loss", "loss_difference", "wall_s"):
        return "Float64"
    return "boolean" if name in ("ddp", "backward", "broadcast_buffers") else "string"


def _columns() -> list[str]:
    of_case = ["run_id", "cell", "engine", "batch_size", *(field.name for field in dataclasses.fields(Case))]
    of_sample = ["pair", "position", "started", "wall_s", "status", "error", "loss_difference"]
    of_step = ["rank", "rank_threads", "phase", "step", "time_ms", "host_ms", "loss"]
    return [*of_case, *of_sample, *of_step, *_MEMORY]


def _rows(facts: Facts) -> Iterator[dict[str, Any]]:
    document = facts.document
    for cell in document.cells:
        about = {"run_id": document.run_id, "cell": cell.key, "engine": cell.engine, **_of_case(cell.case)}
        for sample in document.samples_of(cell):
            row = about | {
                name: getattr(sample, name) for name in ("pair", "position", "started", "wall_s", "status", "error")
            }
            row["loss_difference"] = sample.loss_difference
            yield from _of_sample(sample, row)


def _of_case(case: Case) -> dict[str, Any]:
    shape = case.input_shape
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(Case)}
    return values | {"batch_size": shape[0] if shape else None, "input_shape": "x".join(map(str, shape))}


def _of_sample(sample: Sample, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if not sample.ranks:
        yield row
    for rank in sample.ranks:
        held = {name: getattr(rank.memory, name) for name in _MEMORY}
        held |= {"rank": rank.rank, "rank_threads": rank.threads}
        yield from (row | held | step for step in _steps(rank))


def _steps(rank: RankSample) -> Iterator[dict[str, Any]]:
    """Each step with its phase, its number over all phases, its time or the host's, and its loss."""
    times: list[tuple[str, float | None, float | None]] = [("warm-up", time, None) for time in rank.warmup_ms]
    times += [("timed", time, None) for time in rank.steps_ms]
    times += [("host", None, time) for time in rank.host_ms or ()]
    for step, (phase, time_ms, host_ms) in enumerate(times):
        loss = rank.losses[step] if step < len(rank.losses) else None
        yield {"phase": phase, "step": step, "time_ms": time_ms, "host_ms": host_ms, "loss": loss}
