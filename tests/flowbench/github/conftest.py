"""A run document that compares two sides, its artifact, and a server that behaves like GitHub."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from flowbench.cell import Case, Cell
from flowbench.record import run
from flowbench.record.document import document_text
from flowbench.record.profile import Profile, ProfiledOp
from flowbench.record.sample import Memory, RankSample, Sample

pytest.importorskip("github")

SHA = "a" * 40
CASE = Case("resnet50", (4, 3, 224, 224), "float32", "eager", 1, False, True, True, 2)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake_github = _load("fake_github")


def make_document(commit: str = SHA) -> run.RunDocument:
    """An ordinary run of one engine at `commit`, in two pairs."""
    cell = Cell.of(CASE, "flow-eager")
    rank = RankSample(0, 2, "cpu", (), (500.0,), (6.9,), Memory(None, None, 2**30, 2**28))
    return run.RunDocument(
        run_id="20261129-100000-abcd",
        created="2026-11-29T10:00:00+00:00",
        flowbench_version="0.1.0",
        command=("flowbench", "run"),
        preset="cpu",
        reference=None,
        engines=(run.Engine("flow-eager", "Flow", "framework", "0.1.0"),),
        protocol=run.Protocol(1, 0, 2, 2, "mirrored", 0, 0.01, 0.9, 1e-4, None, None),
        git=run.Git(commit, "topic", False),
        machine=run.Machine("AMD EPYC", "x86_64", 2, 2, 2, 2**34, (), None, "Linux 6", "CPython 3.11"),
        versions={"numpy": "2.0"},
        cells=(cell,),
        samples=tuple(
            Sample(cell.key, pair, 0, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, (rank,)) for pair in range(2)
        ),
        findings=(),
        not_measured=(),
        ending=run.Ending("complete", None, None),
    )


def make_comparison(commit: str = SHA, slow: float = 1.5) -> run.RunDocument:
    """Flow at main and at `commit` in one sitting of twelve pairs, in which the latter's steps take `slow` times as long."""
    one = make_document(commit)
    names = ("base", "head", "canary")
    engines = tuple(replace(one.engines[0], name=f"flow-eager@{name}", side=name) for name in names)
    cells = tuple(Cell.of(CASE, engine.name) for engine in engines)
    samples = []
    for pair in range(12):
        for position, cell in enumerate(cells):
            time_ms = (500.0 + 0.1 * (pair % 3)) * (slow if cell.engine == "flow-eager@head" else 1.0)
            ranks = (replace(one.samples[0].ranks[0], steps_ms=(time_ms,)),)
            samples.append(Sample(cell.key, pair, position, "2026-11-29T10:00:00Z", 1.0, "ok", None, None, ranks))
    calls = {"base": 10.0, "head": 260.0}
    profiles = tuple(
        Profile(
            cell.key,
            500.0,
            500.0,
            (ProfiledOp("relu", "float32[4]", "layer1```</details>", 1, spent),),
            None,
            None,
            (),
            (),
            (),
        )
        for cell, spent in zip(cells, calls.values(), strict=False)
    )
    return replace(
        one,
        engines=engines,
        cells=cells,
        samples=tuple(samples),
        profiles=profiles,
        protocol=replace(one.protocol, pairs=12),
        comparison=run.SidesCompared(
            run.Side("main", run.Git("d" * 40, None, False)), run.Side("HEAD", run.Git(commit, None, False)),
            0.01, 6, 4, {}, {},
        ),
    )  # fmt: skip


@pytest.fixture
def comparison() -> run.RunDocument:
    return make_comparison()


@pytest.fixture
def document() -> run.RunDocument:
    return make_document()


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[..., Path]:
    """Writes the artifact of a document, as GitHub zips it."""

    def write(document: run.RunDocument | None = None, name: str = "artifact.zip", **changes: object) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("run.json", document_text(replace(document or make_document(), **changes)))
        return path

    return write


@pytest.fixture
def github() -> Iterator[object]:
    """The server, with pull request 12 of a fork at SHA, and run 77 of it."""
    with fake_github.serving() as server:
        server.add_pull(12, SHA)
        server.add_run(77, SHA)
        yield server
