"""Which cells of several ranks are planned, and with how many threads."""

from __future__ import annotations

import pytest

from flowbench.measure.plan import Request, plan_run
from flowbench.record import machine
from flowbench.record.run import RunDocument
from flowbench.report import render

pytestmark = pytest.mark.usefixtures("toys", "cpu_box")


@pytest.fixture
def cpu_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, as if it had four cores and no GPU."""
    import dataclasses

    box = dataclasses.replace(
        machine.read_machine(), gpus=(), physical_cores=4, logical_cores=4, usable_cores=4, gpu_driver=None
    )
    monkeypatch.setattr(machine, "read_machine", lambda: box)
    monkeypatch.setattr(machine, "default_threads", lambda machine: 4)


def planned(**asked: object) -> RunDocument:
    return plan_run(Request(**asked), ("test",))


def shapes(document: RunDocument) -> set[tuple[int, bool, int, int]]:
    return {(cell.world_size, cell.ddp, cell.input_shape[0], cell.threads) for cell in document.cells}


def test_the_default_on_a_cpu_has_two_ranks_that_share_the_cores() -> None:
    document = planned(preset="cpu")
    assert shapes(document) == {(1, False, n, 4) for n in (4, 2, 1)} | {(2, True, n, 2) for n in (2, 1)}
    assert "4 threads per rank, 2 where there are 2 ranks" in render(document, "console")
    assert {cell.engine for cell in document.cells if cell.ddp} == {"flow-eager", "torch-eager"}
    assert any("ddp, world size=2" in cell.label for cell in document.cells)


def test_another_grid_has_the_ranks_that_were_asked_for() -> None:
    asked = {"engines": ("toy",), "reference": "none", "models": ("linear",), "image_shape": (3, 4, 4)}
    assert shapes(planned(batch_sizes=(2,), **asked)) == {(1, False, 2, 4)}
    assert shapes(planned(batch_sizes=(2,), world_sizes=(1, 4), **asked)) == {(1, False, 2, 4), (4, True, 2, 1)}
    assert shapes(planned(batch_sizes=(2,), world_sizes=(1,), ddp=True, **asked)) == {(1, True, 2, 4)}
    # Threads that were asked for are those of one rank.
    crowded = planned(batch_sizes=(2,), world_sizes=(2,), threads=3, **asked)
    assert shapes(crowded) == {(2, True, 2, 3)}
    assert any("6 threads on 4 logical cores" in finding.message for finding in crowded.findings)
    bare = planned(batch_sizes=(2,), world_sizes=(2,), broadcast_buffers=False, **asked)
    assert not bare.cells[0].broadcast_buffers
    assert "buffers not broadcast" in bare.cells[0].label
