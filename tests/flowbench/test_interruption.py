"""A sitting that is stopped, in any phase and by any means, leaves no process and a readable document."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flowbench.commands.running import interruptible
from flowbench.measure.processes import marked
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument

RUN = (
    "run", "--model", "linear", "--input-shape", "3x4x4", "--batch-size", "2", "--threads", "1", "--steps", "3", "--pairs", "2",
    "--engine", "toy", "--reference", "toy-waits", "--out", "out",
)  # fmt: skip


def documents(folder: Path) -> list[RunDocument]:
    return [read_document(path) for path in sorted((folder / "out").glob("*.json"))]


def stopped_at(where: str, start: Callable, wait: Callable, tmp_path: Path) -> subprocess.Popen[str]:
    """A run whose second engine, when the first is measured, waits at `where`, with a child in a session of its own."""
    file = tmp_path / "wait"
    file.write_text(where)
    process = start(*RUN, ODD_WAIT_FILE=str(file))
    reached = Path(f"{file}.reached")
    wait(lambda: reached.exists() or process.poll() is not None, f"reaching {where}")
    assert process.poll() is None, process.communicate()
    return process


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("build", signal.SIGINT),
        ("step 0", signal.SIGINT),
        ("step 2", signal.SIGINT),
        ("step 0", signal.SIGTERM),  # one handler serves all signals, so that these two need no other phase
        ("step 2", signal.SIGHUP),
    ],
)
def test_interrupted_in_any_phase(where: str, number: int, start: Callable, wait: Callable, tmp_path: Path) -> None:
    process = stopped_at(where, start, wait, tmp_path)
    process.send_signal(number)
    process.send_signal(number)  # an impatient user
    _, err = process.communicate(timeout=60)
    (document,) = documents(tmp_path)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("flowbench: interrupted; what was measured is in out/")
    assert document.ending.how == "interrupted"
    assert [(sample.pair, sample.status) for sample in document.samples] == [(0, "ok")]
    assert not marked(document.run_id)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix != ".json"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As nohup has it for that of a closed terminal, and a shell for Ctrl-C where a script goes on in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("where", ["build", "step 2"])
def test_killed_outright(where: str, start: Callable, wait: Callable, tmp_path: Path) -> None:
    process = stopped_at(where, start, wait, tmp_path)
    (document,) = documents(tmp_path)
    assert len(marked(document.run_id)) >= 2
    process.kill()
    process.wait()
    wait(lambda: not marked(document.run_id), "the end of all processes")
    (document,) = documents(tmp_path)
    assert document.ending.how == "running"
    assert [(sample.pair, sample.status) for sample in document.samples] == [(0, "ok")]


def test_a_killed_run_is_resumed(start: Callable, wait: Callable, tmp_path: Path) -> None:
    process = stopped_at("step 2", start, wait, tmp_path)
    process.kill()
    process.wait()
    (path,) = (tmp_path / "out").glob("*.json")
    (tmp_path / "wait").write_text("nowhere")
    (tmp_path / "link.json").symlink_to(path)
    elsewhere = start("run", "--resume", str(path), "--out", str(tmp_path / "elsewhere"))
    assert "is gone on with where it lies: leave --out" in elsewhere.communicate(timeout=60)[1]
    resumed = start("run", "--resume", str(tmp_path / "link.json"), ODD_WAIT_FILE=str(tmp_path / "wait"))
    _, err = resumed.communicate(timeout=100)
    assert resumed.returncode == 0, err
    (document,) = documents(tmp_path)
    assert document.ending.how == "complete"
    assert len(document.samples) == 4
    assert {finding.kind for finding in document.findings} >= {"resumed"}
    again = start("run", "--resume", str(path))
    assert "is complete: nothing is missing" in again.communicate(timeout=60)[1]
    assert again.returncode == 2


def test_interrupted_before_anything_is_planned(start: Callable, wait: Callable, tmp_path: Path) -> None:
    # `git` that waits: the sitting is still being planned.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 1000\n")
    (tools / "git").chmod(0o755)
    process = start(*RUN, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    wait((tmp_path / "asked").exists, "asking git")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines() == ["flowbench: interrupted before anything was measured"]
    assert not (tmp_path / "out").exists()
