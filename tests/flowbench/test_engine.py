"""The registry of engines: built-in ones, and those that installed packages bring."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import flowbench
from flowbench.engine import Engine
from flowbench.engine_registry import engine_names, load_engine, skipped_engines
from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run


def test_the_built_in_engines_are_there_without_loading_their_frameworks(repository: Path) -> None:
    code = (
        "import sys\nfrom flowbench.engine_registry import load_engine\n"
        "print([(load_engine(n).display_name, load_engine(n).unavailable()) for n in "
        "('flow-eager', 'torch-eager', 'torch-channels-last')])\nprint('torch' in sys.modules, 'framework' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository)
    assert "('Flow', None)" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize("engine", ["flow-eager", "torch-eager"])
def test_built_in_engines_load_their_libraries_before_what_is_counted_as_their_training(
    engine: str, repository: Path
) -> None:
    pytest.importorskip(load_engine(engine).library)
    if not Path("/proc/self/maps").exists():
        pytest.skip("the system does not tell which libraries are loaded")
    code = f"""
import os
from flowbench.cell import Case, Cell
from flowbench.engine import Task
from flowbench.engine_registry import load_engine
from flowbench.workload.data import make_batches, make_weights
from flowbench.workload.models import describe_model

def large_libraries():
    mapped = {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
    return {{path for path in mapped if os.path.exists(path) and os.path.getsize(path) > 2**20}}

cell = Cell.of(Case("resnet18", (2, 3, 32, 32), "float32", "eager", 1, False, True, True, 1), "{engine}")
weights = make_weights(describe_model("resnet18", (3, 32, 32)), 0)
task = Task(cell, weights, make_batches((2, 3, 32, 32), 0, 0), 1e-4, 0.9, 0, 1)
engine = load_engine("{engine}")
engine.load("cpu")
loaded = large_libraries()
training = engine.build(task)
training.step(0)
training.loss()
print(sorted(large_libraries() - loaded))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_flow_has_the_version_of_the_project() -> None:
    assert load_engine("flow-eager").version() == flowbench.__version__


def test_an_installed_package_adds_an_engine(toys: Path) -> None:
    assert "toy" in engine_names()
    assert load_engine("toy").display_name == "Toy"
    assert (Path(__file__).parent / "toy_engine.py").read_text().count("\n") < 60


def test_of_one_name_from_two_packages_the_foreign_one_is_skipped(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowbench.engines]\ntorch-eager = others:Engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_engine("torch-eager").display_name == "PyTorch"
    assert list(skipped_engines()) == ["torch-eager"]
    said = "'flowbench.engines.torch:TorchEager' is used, 'others:Engine' is skipped"
    assert said in skipped_engines()["torch-eager"]
    document = plan_run(Request(preset="cpu"), ("test",))
    assert [finding.kind for finding in document.findings] == ["engine"]
    assert said in document.findings[0].message


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"library": 3}, "is no engine: its library is '3', expected a text"),
        ({"display_name": ""}, "is no engine: its display_name is ''"),
        ({"build": None}, "is no engine: it has no method build"),
        ({"build": Engine.build}, "is no engine: it has no method build of its own"),
        ({"tunes": "Never"}, "is no engine: its tunes is 'Never', expected one of never, once, always"),
    ],
)
def test_what_is_no_engine_is_refused_by_name(
    parts: dict, said: str, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in parts.items():
        monkeypatch.setattr(type(load_engine("toy")), name, value)
    with pytest.raises(FlowbenchError, match=f"engine 'toy' from 'toy_engine:ToyEngine' {said}"):
        load_engine("toy")


def test_images_that_flows_resnets_do_not_take_are_refused_by_the_plan() -> None:
    asked = Request(
        preset="smoke",
        models=("resnet18", "linear"),
        batch_sizes=(4,),
        image_shape=(1, 64, 64),
        engines=("flow-eager",),
        reference="none",
    )
    document = plan_run(asked, ("test",))
    assert [cell.case.model for cell in document.cells] == ["linear"]
    (left_out,) = document.not_measured
    assert left_out.reason == "Flow's ResNets take images of 3 channels, not of 1"
    assert "resnet18 [4, 1, 64, 64]" in left_out.what


@pytest.mark.parametrize("question", ["unavailable", "unsupported"])
def test_an_engine_that_raises_when_asked_is_not_measured(
    question: str, toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise ValueError("broken\non purpose")

    monkeypatch.setattr(type(load_engine("toy")), question, broken)
    request = Request(
        preset="smoke", models=("linear",), batch_sizes=(2,), engines=("toy", "flow-eager"), reference="none"
    )
    document = plan_run(request, ("test",))
    assert [cell.engine for cell in document.cells] == ["flow-eager"]
    (left_out,) = document.not_measured
    assert left_out.what.endswith("toy")
    assert left_out.reason == f"its {question}() raised ValueError: broken on purpose"


def test_what_may_spoil_a_run_is_noted_before_it() -> None:
    request = Request(preset="smoke", engines=("flow-eager",), reference="none", threads=9999, batch_sizes=(2, 1))
    threads, few = plan_run(request, ("test",)).findings
    assert threads.message.startswith("9999 threads on ")
    assert few.message.startswith(
        "resnet18 [1, 3, 64, 64]: its last batch norm sees 4 values per channel, fewer than 8"
    )
    assert plan_run(Request(preset="cpu"), ("test",)).findings == ()


def test_without_torch_flow_runs_alone_and_there_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    document = plan_run(Request(preset="smoke"), ("test",))
    assert document.reference is None
    assert {cell.engine for cell in document.cells} == {"flow-eager"}
    assert [left_out.what for left_out in document.not_measured] == ["torch-channels-last", "torch-eager"]
    assert "without it there is no reference, and no ratio" in document.not_measured[1].reason
    assert "pip install torch" in document.not_measured[1].reason
