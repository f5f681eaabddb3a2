"""Ranks on the GPUs of one machine: all-reduce and DDP beside PyTorch's, a killed rank, agreement; each figure beside its bar.

    python suites/several_gpus.py [--world-sizes 8 4 2 1] [--minutes 8] [--out DIR] [--device cpu]

What matters most comes first, and the time is kept: called again with the same --out it goes on with the training that is
missing. DIR gets the run documents and several-gpus.md, anew after each part. Exit codes: 0 every bar is met, 1 one is missed,
2 none is missed but something was not measured, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script

import psutil  # noqa: E402

from flowbench.cell import Case, Cell  # noqa: E402
from flowbench.commands.running import interruptible  # noqa: E402
from flowbench.engine import Task  # noqa: E402
from flowbench.engine_registry import load_engine  # noqa: E402
from flowbench.errors import FlowbenchError  # noqa: E402
from flowbench.measure.plan import Request  # noqa: E402
from flowbench.measure.progress import duration  # noqa: E402
from flowbench.measure.resumption import check_resumable  # noqa: E402
from flowbench.measure.session import UNREACHED  # noqa: E402
from flowbench.output import drop_output  # noqa: E402
from flowbench.record.document import read_document  # noqa: E402
from flowbench.record.machine import read_machine  # noqa: E402
from flowbench.record.run import RunDocument  # noqa: E402
from flowbench.record.store import write_whole  # noqa: E402
from flowbench.workload.data import make_batches, make_weights  # noqa: E402
from flowbench.workload.losses import LEARNING_RATE, MOMENTUM  # noqa: E402
from flowbench.workload.models import describe_model  # noqa: E402
from framework.distributed.launch import MOST_RANKS  # noqa: E402
from suites import several_gpus_figures as figures  # noqa: E402
from suites import test_all_reduce as all_reduce  # noqa: E402
from suites.several_gpus_figures import BEST, FLOW, LEAST_BANDWIDTH, MOST_ENDING_S, PYTORCH, Figure  # noqa: E402

AGREEMENT_STEPS = 100
KILLED_AFTER_STEPS = 5
MOST_PAIRS = 3
# To end a part that takes too long, and to write the table.
RESERVE_S = 15.0
TIME_IS_UP = "the time (--minutes) is up"
MOST_MINUTES = 10_000


@dataclass(frozen=True)
class Setting:
    """What is measured on a device. Each group of batch sizes is a sitting; the first is the one whose scaling counts.

    `turn_s` is about what a fresh process group of each engine takes with all its steps, `others_s` each other part.
    """

    device: str
    model: str
    image_shape: tuple[int, int, int]
    world_sizes: tuple[int, ...]
    ranks: int
    batch_sizes: tuple[tuple[int, ...], ...]
    agreeing_batch_size: int
    turn_s: dict[str, float]
    others_s: float
    memory_kinds: tuple[str, ...]
    all_reduce_bytes: tuple[int, ...]
    steps: int
    warmup: int
    pairs: int | None = None
    out: Path = Path()

    @property
    def reached(self) -> tuple[int, ...]:
        """The world sizes for which there are GPUs; flowbench lists the others with the reason."""
        return tuple(size for size in self.world_sizes if size <= self.ranks)

    @property
    def round_s(self) -> float:
        """About how long one batch size takes at one world size: every engine once."""
        return sum(self.turn_s.values())


# The times of process groups are the medians in the documents of reports/h200.
GPU = Setting(
    "cuda", "resnet50", (3, 224, 224), (8, 4, 2, 1), 8, ((64,), (16,), (8, 4, 2, 1)), 16,
    {FLOW: 5.5, PYTORCH: 13.5, BEST: 13.5}, 20.0, ("peak allocated", "GPU used"),
    (1_000_000, 25_000_000, 100_000_000, 400_000_000), steps=20, warmup=10,
)  # fmt: skip
CPU = Setting(
    "cpu", "resnet18", (3, 64, 64), (2, 1), 2, ((4,), (2,)), 2,
    {FLOW: 3.0, PYTORCH: 6.0}, 10.0, ("peak resident",), (1_000_000, 25_000_000), steps=5, warmup=2, pairs=1,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A piece of the work: about how long it takes, and what gives its figures until a time of the monotonic clock."""

    title: str
    about_s: float
    run: Callable[[float], list[Figure]] = field(repr=False)


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
    until = time.monotonic() + seconds - RESERVE_S
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
            while left:
                print(f"\n{left[0].title}", flush=True)
                lines += measured(left[0], until)
                del left[0]
                write_whole(setting.out / "several-gpus.md", table(setting, lines))
    except KeyboardInterrupt:
        lines += [Figure(part.title, "interrupted before it was done", "-", None) for part in left]
        write_whole(setting.out / "several-gpus.md", table(setting, lines))
    print()
    for line in lines:
        print(f"{line.what}: {line.value} (bar: {line.bar}): {line.verdict}")
    print(f"written: {setting.out / 'several-gpus.md'}, with the run documents beside it")
    verdicts = {line.met for line in lines}
    return 130 if left else 1 if False in verdicts else 0 if verdicts == {True} else 2


def plan(setting: Setting, seconds: float) -> list[Part]:
    """The parts, what matters most first, with as many pairs as there is time for; one at least."""
    reached = len(setting.reached)
    sizes = sum(map(len, setting.batch_sizes))
    fitting = (seconds - 3 * setting.others_s) / (sizes * reached * setting.round_s)
    pairs = setting.pairs or max(1, min(MOST_PAIRS, int(fitting)))

    def sitting(batch_sizes: tuple[int, ...]) -> Part:
        worlds = ", ".join(map(str, setting.reached))
        return Part(
            f"DDP beside PyTorch's, N = {', '.join(map(str, batch_sizes))} per rank, world sizes {worlds}",
            pairs * len(batch_sizes) * reached * setting.round_s,
            lambda until: trained(setting, batch_sizes, pairs, until),
        )

    def other(title: str, run: Callable[[Setting, str, float], list[Figure]]) -> Part:
        return Part(title, setting.others_s, lambda until: run(setting, title, until))

    ranks = f"{setting.ranks} ranks"
    first, *rest = setting.batch_sizes
    return [
        other(f"all-reduce among {ranks}", all_reduced),
        other(f"{ranks} train, one is killed, all others end", killed),
        sitting(first),
        other(f"{ranks}, parameters after {AGREEMENT_STEPS} steps with data of their own", agreed),
        *map(sitting, rest),
    ]


def measured(part: Part, until: float) -> list[Figure]:
    """A part's figures; where it fails, or there is no time for it, a line that says so."""
    try:
        return part.run(until)
    except subprocess.TimeoutExpired:
        return [Figure(part.title, TIME_IS_UP, "-", None)]
    except (FlowbenchError, OSError, ValueError, subprocess.SubprocessError) as error:
        return [Figure(part.title, " ".join(str(error).split())[:300], "-", None)]


def all_reduced(setting: Setting, title: str, until: float) -> list[Figure]:
    """Bus bandwidth beside the other library's; both have to give the sum first."""
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", f">= {LEAST_BANDWIDTH}", None)]
    left_s = _time_left(until, setting.others_s)
    rows = all_reduce.measure(setting.ranks, setting.device, setting.all_reduce_bytes, timeout_s=left_s)
    lines = [Figure(f"{title}, values", "the sum", "the sum", True)]
    for row in rows:
        flow, other = (
            all_reduce.bus_bandwidth(row["bytes"], row[name][0], setting.ranks) for name in ("flow", "torch")
        )
        lines.append(figures.bandwidth(f"{title}, {row['bytes'] / 1e6:g} MB, bus bandwidth", flow, other))
    return lines


def killed(setting: Setting, title: str, until: float) -> list[Figure]:
    """How long after a rank was killed the launcher and every other rank have ended."""
    bar = f"<= {MOST_ENDING_S:g} s"
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", bar, None)]
    _time_left(until, setting.others_s)
    with tempfile.TemporaryDirectory() as folder:
        shape = (setting.agreeing_batch_size, *setting.image_shape)
        job = json.dumps({"folder": folder, "device": setting.device, "model": setting.model, "shape": shape})
        launch = [sys.executable, "-m", "framework.distributed.launch", "--nproc-per-node", str(setting.ranks)]
        status = _run([*launch, __file__, "--rank-job", job], until)
        ended = time.time()
        if status is None:
            return [Figure(title, TIME_IS_UP, bar, None)]
        moment, pids = Path(folder) / "killed", Path(folder).glob("rank*")
        if status != 128 + signal.SIGKILL or not moment.exists():
            return [Figure(title, f"no rank was killed: the launcher ended with status {status}, see above", bar, None)]
        took_s = ended - float(moment.read_text())
        left = sorted(path.name for path in pids if psutil.pid_exists(int(path.read_text())))
    value = f"within {took_s:.1f} s" + (f", but {', '.join(left)} still run" if left else "")
    return [Figure(title, value, bar, took_s <= MOST_ENDING_S and not left)]


def run_rank(job: dict[str, Any]) -> None:
    """What each rank of `killed` does: it trains, until the last one is killed with its step under way."""
    folder, shape = Path(job["folder"]), tuple(job["shape"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"rank{rank}").write_text(str(os.getpid()))
    case = Case(job["model"], shape, "float32", "eager", size, True, True, True, 1, job["device"])
    weights, batches = make_weights(describe_model(case.model, shape[1:]), 0), make_batches(shape, 0, rank)
    task = Task(Cell.of(case, FLOW), weights, batches, LEARNING_RATE, MOMENTUM, rank, size, local_rank=rank)
    training = load_engine(FLOW).build(task)
    for step in range(1_000_000):
        training.step(step)
        if step == KILLED_AFTER_STEPS and rank == size - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def trained(setting: Setting, batch_sizes: tuple[int, ...], pairs: int, until: float) -> list[Figure]:
    """One sitting over all world sizes: speed, memory, and for the first of them the scaling."""
    engines = list(setting.turn_s)
    options = ["--engine", *engines, "--reference", PYTORCH, "--pairs", str(pairs), "--steps", str(setting.steps)]
    options += ["--warmup", str(setting.warmup), "--batch-size", *map(str, batch_sizes)]
    name = f"n-{'-'.join(map(str, batch_sizes))}"
    document = sit(setting, name, setting.world_sizes, options, until, setting.round_s)
    lines: list[Figure] = []
    for size in batch_sizes:
        for world_size in setting.reached:
            own = figures.cell_of(document, FLOW, size, world_size)
            lines += figures.speeds(document, own, engines[1:])
            lines += figures.memory(document, own, setting.memory_kinds)
    if batch_sizes == setting.batch_sizes[0]:
        lines += figures.scaling(document, batch_sizes[0], setting.reached)
    if setting.device == "cuda":
        lines.append(figures.foreign_memory(document, batch_sizes))
    return lines


def agreed(setting: Setting, title: str, until: float) -> list[Figure]:
    """Many steps of ranks that see different data: flowbench compares their parameters bit for bit."""
    if setting.ranks < 2:
        return [Figure(title, "there is one rank", "bit-identical", None)]
    options = ["--engine", FLOW, "--reference", "none", "--pairs", "1", "--warmup", "0"]
    options += ["--steps", str(AGREEMENT_STEPS), "--batch-size", str(setting.agreeing_batch_size)]
    document = sit(setting, "agreement", (setting.ranks,), options, until, setting.others_s)
    cell = figures.cell_of(document, FLOW, setting.agreeing_batch_size, setting.ranks)
    return [figures.agreement(document, title, cell)]


def sit(
    setting: Setting, name: str, world_sizes: Sequence[int], options: list[str], until: float, round_s: float
) -> RunDocument:
    """The document of `flowbench run`: one that is there, whole or gone on with, or a new one."""
    folder = setting.out / name
    command = [sys.executable, "-m", "flowbench", "run", "--timeout", "120"]
    found = max(folder.glob("*.json"), default=None)
    if found is not None:
        before = read_document(found)
        check_resumable(before, Request(), str(found))
        if before.ending.how == "complete":
            return before
        command += ["--resume", str(found)]
    else:
        command += ["--device", setting.device, "--ddp", "--model", setting.model, "--out", str(folder), *options]
        command += ["--input-shape", "x".join(map(str, setting.image_shape)), "--world-size", *map(str, world_sizes)]
        command += ["--threads", "1"] if setting.device == "cpu" else []
    # A round that is begun is finished: none is to begin that would not be.
    command += ["--wall-cap", f"{_time_left(until, round_s) - round_s + 1:.0f}"]
    status = _run(command, until, stdout=subprocess.DEVNULL)
    written = max(folder.glob("*.json"), default=None)
    if written is None:
        raise FlowbenchError(TIME_IS_UP if status is None else f"flowbench run ended with status {status}, see above")
    document = read_document(written)
    if status is None:  # flowbench was told to end, and cannot know why
        left_out = tuple(
            replace(one, reason=TIME_IS_UP) if one.reason.startswith(UNREACHED) else one
            for one in document.not_measured
        )
        ending = replace(document.ending, reason=TIME_IS_UP)
        document = replace(document, ending=ending, not_measured=left_out)
    return document


def table(setting: Setting, lines: Sequence[Figure]) -> str:
    """The figures so far in Markdown, what they were taken on, and the documents they are from."""
    machine = read_machine()
    gpus = f"{len(machine.gpus)} × {machine.gpus[0].name}, driver {machine.gpu_driver}; " if machine.gpus else ""
    documents = sorted(path.relative_to(setting.out).as_posix() for path in setting.out.glob("*/*.json"))
    what = f"{setting.model} training on {setting.device}, batches of N per rank"
    where = f"{gpus}{machine.cpu_model}, {machine.usable_cores} cores"
    rows = [f"| {line.what} | {line.value.replace('|', '/')} | {line.bar} | {line.verdict} |" for line in lines]
    links = ", ".join(f"[{name}]({name})" for name in documents) or "no run document"
    return "\n".join(
        [
            f"# Up to {setting.ranks} ranks on one machine",
            "",
            f"`suites/several_gpus.py` on {datetime.now():%Y-%m-%d}: {what}. {where}.",
            "",
            "| figure | measured | bar | |",
            "|---|---|---|---|",
            *rows,
            "",
            f"From {links}.",
            "",
        ]
    )


def _time_left(until: float, needed_s: float) -> float:
    """How long there is until then; raises where that is less than what is needed."""
    left_s = until - time.monotonic()
    if left_s < needed_s:
        raise FlowbenchError("there was no time left for it")
    return left_s


def _run(command: list[str], until: float, **streams: Any) -> int | None:
    """A command's status, None where the time is up; then, and at Ctrl-C, it is told to end, and killed if it does not."""
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams) as process:
        try:
            return process.wait(max(1.0, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as ended:
            if not isinstance(ended, KeyboardInterrupt):
                print(f"  {TIME_IS_UP}: this part is told to end", flush=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(RESERVE_S - 5)
            except subprocess.TimeoutExpired:
                process.kill()  # the ranks see that, and end
            if isinstance(ended, KeyboardInterrupt):
                raise
            process.wait()
            return None


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
    add("--rank-job", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank_job:
        run_rank(asked.rank_job)
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
