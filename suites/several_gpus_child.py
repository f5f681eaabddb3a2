"""The commands that `several_gpus.py` starts: each ends in time, or is ended, and none outlives it; `flowbench run` is one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flowbench.errors import FlowbenchError
from flowbench.measure.plan import Request
from flowbench.measure.processes import child_environment, die_with_parent
from flowbench.measure.resumption import check_resumable
from flowbench.measure.session import UNREACHED
from flowbench.record.document import read_document
from flowbench.record.run import RunDocument
from suites.several_gpus_setting import Deadline, Setting

# To end a part that takes too long, and to write the table.
RESERVE_S = 15.0


def run_child(
    command: Sequence[str], until: Deadline, variables: Mapping[str, str] = MappingProxyType({}), **streams: Any
) -> int | None:
    """A command's status, None where the time is up; then, and at Ctrl-C, it is told to end, and killed if it does not."""
    environment = {**child_environment(), **variables}
    with subprocess.Popen(command, env=environment, preexec_fn=die_with_parent, **streams) as process:
        try:
            return process.wait(max(1.0, until.left_s))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
            if not isinstance(ended, KeyboardInterrupt):
                print(f"  {until.words}: this part is told to end", flush=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(RESERVE_S - 5)
            except subprocess.TimeoutExpired:
                process.kill()  # the ranks see that, and end
            if isinstance(ended, KeyboardInterrupt):
                raise
            process.wait()
            return None


def time_left_s(until: Deadline, needed_s: float) -> float:
    """How long there is until then; raises where that is less than what is needed."""
    left_s = until.left_s
    if left_s < needed_s:
        raise FlowbenchError("there was no time left for it")
    return left_s


def sit(
    setting: Setting, name: str, world_sizes: Sequence[int], options: list[str], until: Deadline, round_s: float
) -> RunDocument:
    """The document of `flowbench run`: one that is there, whole or gone on with, or a new one."""
    folder = setting.out / name
    command = [sys.executable, "-m", "flowbench", "run", "--timeout", "120"]
    found = max(folder.glob("*.json"), default=None)
    if found is not None:
        before = read_document(found)
        _check_same(before, setting, world_sizes, found)
        check_resumable(before, Request(), str(found))
        if before.ending.how == "complete":
            return before
        command += ["--resume", str(found)]
    else:
        command += ["--device", setting.device, "--ddp", "--model", setting.model, "--out", str(folder), *options]
        command += ["--input-shape", "x".join(map(str, setting.image_shape)), "--world-size", *map(str, world_sizes)]
        command += ["--threads", "1"] if setting.device == "cpu" else []
    # A round that is begun is finished: none is to begin that would not be.
    command += ["--wall-cap", f"{time_left_s(until, round_s) - round_s + 1:.0f}"]
    status = run_child(command, until, stdout=subprocess.DEVNULL)
    written = max(folder.glob("*.json"), default=None)
    if written is None:
        raise FlowbenchError(until.words if status is None else f"flowbench run ended with status {status}, see above")
    document = read_document(written)
    if status is None:  # flowbench was told to end, and cannot know why
        left_out = tuple(
            replace(one, reason=until.words) if one.reason.startswith(UNREACHED) else one
            for one in document.not_measured
        )
        ending = replace(document.ending, reason=until.words)
        document = replace(document, ending=ending, not_measured=left_out)
    return document


def _check_same(document: RunDocument, setting: Setting, world_sizes: Sequence[int], path: Path) -> None:
    """Raises unless the document is of what is to be measured now."""
    cases = [cell.case for cell in document.cells]
    then = {(case.device, case.model, case.input_shape[1:]) for case in cases}
    wanted = {size for size in world_sizes if size <= setting.ranks}
    if then != {(setting.device, setting.model, setting.image_shape)} or not wanted <= {c.world_size for c in cases}:
        raise FlowbenchError(
            f"{path} is of another --device, --model or --world-sizes: give the same as then, or another --out"
        )
