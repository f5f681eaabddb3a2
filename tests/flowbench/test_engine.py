"""The registry of engines: built-in ones, and those that installed packages bring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flowbench
from flowbench.engine import engine_names, load_engine
from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request, plan_run


def test_the_built_in_engines_are_there_without_loading_their_frameworks(repository: Path) -> None:
    code = (
        "import sys\nfrom flowbench.engine import *\n"
        "print([(load_engine(n).display_name, load_engine(n).unavailable()) for n in "
        "('flow-eager', 'torch-eager', 'torch-channels-last')])\nprint('torch' in sys.modules, 'framework' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository)
    assert "('Flow', None)" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_flow_has_the_version_of_the_project() -> None:
    assert load_engine("flow-eager").version() == flowbench.__version__


def test_an_installed_package_adds_an_engine(toys: Path) -> None:
    assert "toy" in engine_names()
    assert load_engine("toy").display_name == "Toy"
    assert (Path(__file__).parent / "toy_engine.py").read_text().count("\n") < 60


def test_one_name_from_two_packages_is_refused(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flowbench.engines]\ntorch-eager = others:Engine\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        FlowbenchError, match=r"'torch-eager' is given twice, by 'flowbench.engines.torch:TorchEager' and by"
    ):
        engine_names()


def test_without_torch_flow_runs_alone_and_there_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    import flowbench.engine as registry

    find_spec = registry.importlib.util.find_spec
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    document = plan_run(Request(preset="smoke"), ("test",))
    assert document.reference is None
    assert {cell.engine for cell in document.cells} == {"flow-eager"}
    assert [left_out.what for left_out in document.not_measured] == ["torch-channels-last", "torch-eager"]
    assert "without it there is no reference, and no ratio" in document.not_measured[1].reason
    assert "pip install torch" in document.not_measured[1].reason
