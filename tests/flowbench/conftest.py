"""The toy engines, installed as another package would install them: by an entry point in a folder on the path."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from flowbench import cli
from flowbench.record import machine
from flowbench.record.run import Gpu, Machine

HERE = Path(__file__).parent

ENGINES = {
    "toy": "toy_engine:ToyEngine",
    "toy-raises": "odd_engines:Raises",
    "toy-raises-in-build": "odd_engines:RaisesInBuild",
    "toy-exits": "odd_engines:Exits",
    "toy-hangs": "odd_engines:Hangs",
    "toy-segfaults": "odd_engines:Segfaults",
    "toy-killed": "odd_engines:Killed",
    "toy-score": "odd_engines:TellsItsScore",
    "toy-wrong": "odd_engines:WrongGradients",
    "toy-not-finite": "odd_engines:NotFinite",
    "toy-threads": "odd_engines:TooManyThreads",
    "toy-child": "odd_engines:LeavesAChild",
    "toy-talks": "odd_engines:Talks",
    "toy-holds": "odd_engines:HoldsMemory",
    "toy-waits": "odd_engines:Waits",
    "toy-setup": "odd_engines:NotesItsSetup",
    "toy-talks-while-loading": "odd_engines:TalksWhileLoading",
    "toy-no-subclass": "odd_engines:NoSubclass",
    "toy-second-raises": "odd_engines:SecondRankRaises",
    "toy-second-slow": "odd_engines:SlowSecondRank",
    "toy-hiccups": "odd_engines:Hiccups",
    "toy-second-drifts": "odd_engines:SecondRankDrifts",
    "toy-second-dies": "odd_engines:SecondRankDies",
    "toy-second-reset": "odd_engines:SecondRankIsReset",
    "toy-agrees": "odd_engines:RanksAgree",
    "toy-missing": "odd_engines:NotInstalled",
    "toy-gpu": "gpu_engines:Gpu",
    "toy-gpu-elsewhere": "gpu_engines:ElsewhereEvents",
    "toy-gpu-on-cpu": "gpu_engines:StaysOnCpu",
    "toy-gpu-context": "gpu_engines:ContextOnFirstGpu",
    "toy-gpu-cores": "gpu_engines:NotesItsCores",
    "toy-gpu-memory": "gpu_engines:OutOfMemory",
    "toy-no-module": "no_such_module:Engine",
    "toy-sided": "odd_engines:Sided",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.fixture(autouse=True)
def without_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tests on every machine: those that are not about its GPUs do not see them, nor do the processes they start."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip would leave it: the modules and their dist-info."""
    folder = tmp_path_factory.mktemp("site")
    for module in ("toy_engine.py", "odd_engines.py", "gpu_engines.py"):
        shutil.copy(HERE / module, folder)
    info = folder / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in ENGINES.items())
    (info / "entry_points.txt").write_text(f"[flowbench.engines]\n{lines}")
    return folder


@pytest.fixture
def toys(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The toy engines, for this process and the ranks it starts."""
    monkeypatch.syspath_prepend(site)
    yield site
    for module in ("toy_engine", "odd_engines", "gpu_engines"):
        sys.modules.pop(module, None)


@pytest.fixture
def gpu_box(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine, as if a GPU were in it."""
    box = dataclasses.replace(machine.read_machine(), gpus=(Gpu("A GPU", 140 * 2**30),), gpu_driver="580.1")
    monkeypatch.setattr(machine, "read_machine", lambda: box)
    return box


@pytest.fixture
def gpu_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A driver with GPUs of these figures (see pynvml_double.py), for this process and the ranks it starts."""
    folder = tmp_path / "driver"
    folder.mkdir()
    shutil.copy(HERE / "pynvml_double.py", folder / "pynvml.py")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("GPU_DOUBLE", str(folder / "state.json"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = sys.modules.pop("pynvml", None)
    usual = {"name": "A GPU", "uuid": "GPU-aa", "memory": 140 * 2**30, "used": 600 * 2**20, "processes": []}

    def answer(*gpus: dict[str, object]) -> None:
        state = {"driver": "580.1", "cuda": 13000, "gpus": [usual | gpu for gpu in gpus]}
        (folder / "state.json").write_text(json.dumps(state))

    yield answer
    sys.modules.pop("pynvml", None)
    if before is not None:
        sys.modules["pynvml"] = before


Starter = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(site: Path, repository: Path, tmp_path: Path) -> Iterator[Starter]:
    """Starts `flowbench ARGUMENTS` in an empty folder; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []
    # No git: somebody may be editing this checkout while the tests run.
    tools = tmp_path / "no-git"
    tools.mkdir()
    (tools / "git").write_text("#!/bin/sh\nexit 1\n")
    (tools / "git").chmod(0o755)
    search = f"{tools}{os.pathsep}{os.environ['PATH']}"

    def start_one(
        *arguments: str, stdout: int | IO[str] = subprocess.PIPE, **environment: str
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(site), str(repository)])
        with heeding_signals():
            process = subprocess.Popen(
                [sys.executable, "-m", "flowbench", *arguments],
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "PATH": search, "PYTHONPATH": path, "NO_COLOR": "1", **environment},
            )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def heeding_signals() -> Iterator[None]:
    """What is started within it heeds the signals that end a process, also where these tests run in the background of a script."""
    before = {
        number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait until `condition` holds; fails the test, naming `what`, after a generous while."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def wait() -> Callable[..., None]:
    """`wait_for`, for tests that cannot import this file."""
    return wait_for


@pytest.fixture
def flowbench(
    toys: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process, in an empty folder: exit code, output, error output."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return call
