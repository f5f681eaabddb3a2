"""Ranks on the GPUs of one machine: all-reduce and DDP beside PyTorch's, a killed rank, agreement; each figure beside its bar.

    python suites/several_gpus.py [--world-sizes 8 4 2 1] [--minutes 8] [--out DIR] [--device cpu]

What matters most comes first, and the time is kept: called again with the same --out it goes on with the training that is
missing. DIR gets the run documents and several-gpus.md, anew after each part. Where the GPUs' NVLink multicast may not be used,
set NCCL_NVLS_ENABLE=0: all parts get the environment as it is. Exit codes: 0 every bar is met, 1 one is missed,
2 none is missed but something was not measured, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script

from flowbench.commands.running import interruptible  # noqa: E402
from flowbench.errors import FlowbenchError  # noqa: E402
from flowbench.measure.progress import duration  # noqa: E402
from flowbench.output import drop_output  # noqa: E402
from flowbench.record.machine import read_machine  # noqa: E402
from flowbench.record.store import write_whole  # noqa: E402
from flowbench.workload.models import describe_model  # noqa: E402
from framework.distributed.launch import MOST_RANKS  # noqa: E402
from suites.several_gpus_child import RESERVE_S  # noqa: E402
from suites.several_gpus_figures import Figure  # noqa: E402
from suites.several_gpus_parts import Part, measured, plan  # noqa: E402
from suites.several_gpus_setting import CPU, GPU, Deadline, Setting  # noqa: E402

MOST_MINUTES = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, measure, print a line for each figure, write the table; returns the exit code."""
    setting, seconds = _asked(arguments)
    try:
        return carry_out(setting, seconds)
    except (FlowbenchError, OSError) as error:  # what is written has no place: 1 would say that a bar is missed
        if isinstance(error, BrokenPipeError):
            drop_output()
        print(f"several_gpus: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def carry_out(setting: Setting, seconds: float) -> int:
    """Measure part by part within `seconds`; FlowbenchError and OSError where nothing can be written."""
    until = Deadline(time.monotonic() + seconds - RESERVE_S)
    parts = plan(setting, seconds - RESERVE_S)
    print(f"up to {setting.ranks} ranks on {setting.device}, {setting.model}, in {duration(seconds)} at most:")
    for part in parts:
        print(f"  about {duration(part.about_s)}: {part.title}")
    if sum(part.about_s for part in parts) > seconds - RESERVE_S:
        print(f"that is more than there is: the last may be cut. Go on with the same command and --out {setting.out}")
    absent = [size for size in setting.world_sizes if size > setting.ranks]
    lines = [
        Figure(f"{size} ranks", "each needs a GPU of its own, and there are fewer here", "-", None) for size in absent
    ]
    left = list(parts)
    try:
        with interruptible():
            _write(setting, lines, left, "not reached yet")
            while left:
                print(f"\n{left[0].title}", flush=True)
                lines += measured(left[0], until)
                del left[0]
                _write(setting, lines, left, "not reached yet")
    except KeyboardInterrupt:
        lines = _write(setting, lines, left, "interrupted before it was done")
    print()
    for line in lines:
        print(f"{line.what}: {line.value} (bar: {line.bar}): {line.verdict}")
    print(f"written: {setting.out / 'several-gpus.md'}, with the run documents beside it")
    verdicts = {line.met for line in lines}
    return 130 if left else 1 if False in verdicts else 0 if verdicts == {True} else 2


def _write(setting: Setting, lines: list[Figure], left: Sequence[Part], why: str) -> list[Figure]:
    """Writes the table, which names the parts that are left, so that it tells what is missing also if nothing follows."""
    whole = [*lines, *(Figure(part.title, why, "-", None) for part in left)]
    write_whole(setting.out / "several-gpus.md", table(setting, whole))
    return whole


def table(setting: Setting, lines: Sequence[Figure]) -> str:
    """The figures so far in Markdown, what they were taken on, and the documents they are from."""
    machine = read_machine()
    gpus = f"{len(machine.gpus)} × {machine.gpus[0].name}, driver {machine.gpu_driver}; " if machine.gpus else ""
    documents = sorted(path.relative_to(setting.out).as_posix() for path in setting.out.glob("*/*.json"))
    what = f"{setting.model} training on {setting.device}, batches of N per rank"
    where = f"{gpus}{machine.cpu_model}, {machine.usable_cores} cores"
    settings = "".join(f" {name}={os.environ[name]}." for name in sorted(os.environ) if name.startswith("NCCL_"))
    rows = [f"| {line.what} | {line.value.replace('|', '/')} | {line.bar} | {line.verdict} |" for line in lines]
    links = ", ".join(f"[{name}]({name})" for name in documents) or "no run document"
    return "\n".join(
        [
            f"# Up to {setting.ranks} ranks on one machine",
            "",
            f"`suites/several_gpus.py` on {datetime.now():%Y-%m-%d}: {what}. {where}.{settings}",
            "",
            "| figure | measured | bar | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"From {links}.",
            "",
        ]
    )


def _asked(arguments: Sequence[str] | None) -> tuple[Setting, float]:
    """What is to be measured, and in how many seconds."""
    sentence, _, rest = str(__doc__).partition("\n\n")
    parser = argparse.ArgumentParser(description=sentence, epilog=rest.partition("\n\n")[2], allow_abbrev=False)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--world-sizes", type=int, nargs="+", metavar="R", help="default: 8, 4, 2 and 1; on the CPU 2 and 1")
    add("--minutes", type=float, default=8.0, metavar="M", help="all of it takes so long at most; default: 8")
    add("--pairs", type=int, metavar="P", help="process groups of each cell; default: as many as there is time for")
    add("--model", help="default: resnet50, on the CPU resnet18")
    add("--out", type=Path, metavar="DIR", help="default: a new folder under reports/out/")
    asked = parser.parse_args(arguments)
    if not 0 < asked.minutes <= MOST_MINUTES:  # which NaN is not either
        parser.error(f"--minutes {asked.minutes:g}: expected a number above 0, {MOST_MINUTES} at most")
    if (asked.pairs is not None and asked.pairs < 1) or not all(
        1 <= size <= MOST_RANKS for size in asked.world_sizes or [1]
    ):
        parser.error(f"--pairs and --world-sizes are numbers above 0, world sizes {MOST_RANKS} at most")
    setting = GPU if asked.device == "cuda" else CPU
    world_sizes = tuple(dict.fromkeys(asked.world_sizes or setting.world_sizes))
    there = len(read_machine().gpus) if asked.device == "cuda" else max(world_sizes)
    if min(world_sizes) > there:
        have = f"{there} GPUs" if there else "no GPU that answers"
        parser.exit(
            2, f"several_gpus: each rank needs a GPU, here is {have}: take fewer --world-sizes, or --device cpu\n"
        )
    try:
        describe_model(asked.model or setting.model, setting.image_shape)
    except FlowbenchError as error:
        parser.error(f"--model: {error}")
    out = asked.out or Path(f"reports/out/several-gpus-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror or error}; expected a folder that can be written")
    setting = replace(
        setting,
        model=asked.model or setting.model,
        world_sizes=world_sizes,
        ranks=max(size for size in world_sizes if size <= there),
        pairs=asked.pairs or setting.pairs,
        out=out,
    )
    return setting, 60 * asked.minutes


if __name__ == "__main__":
    sys.exit(main())
