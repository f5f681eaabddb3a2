"""What `flowbench aa` does: measures one commit against itself again and again, and tells how often the verdict was wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

import click

import flowbench
from flowbench.cell import cell_name
from flowbench.commands.running import interruptible
from flowbench.errors import FlowbenchError, Interrupted
from flowbench.judge.false_alarms import (
    LEAST_SITTINGS,
    noise_floor,
    pair_spread,
    rate_of,
    sitting_shift,
    smallest_found,
    verdicts_of,
)
from flowbench.judge.times import LEAST_PAIRS, Evidence, pair_log_ratio, percent
from flowbench.judge.verdict import Verdict
from flowbench.measure.comparison_session import Place, run_comparison
from flowbench.measure.plan import NO_REFERENCE, Request
from flowbench.measure.plan_comparison import plan_comparison
from flowbench.measure.processes import child_environment
from flowbench.measure.progress import ProgressDisplay
from flowbench.measure.refs import placed_copy
from flowbench.measure.session import Watcher
from flowbench.record import aa as record
from flowbench.record import store
from flowbench.record.noise import NoiseFloor, keep_floor, noise_path, read_floors
from flowbench.record.run import RunDocument
from flowbench.report.words import counted

# The competing load: processes that compute, started and stopped after random times within these seconds.
_LOAD_S = (0.2, 3.0)

# Without a terminal, how far a sitting has come is told so often.
_TOLD_EVERY_S = 20.0

# The repository whose working tree is measured: the one this harness is part of.
REPOSITORY = Path(flowbench.__file__).parent.parent

_CHANGED = (Verdict.SLOWER, Verdict.FASTER)


def aa(
    request: Request, sittings: int, slowdowns: Sequence[float], load: bool, out: Path, command: Sequence[str]
) -> str:
    """Measure until the file `out` has so many sittings, and report; killed or interrupted, it goes on where it was."""
    done = 0
    if store.is_same_file(out, noise_path()):
        raise FlowbenchError(f"{out} is where noise floors are kept: choose another file with --out")
    try:
        with interruptible(), placed_copy(REPOSITORY) as head, record.held(out):
            document = plan_comparison(
                replace(request, reference=NO_REFERENCE), command, head.side, head.side, {}, [*_sides(slowdowns)], False
            )
            if len(document.cases) != 1 or len({engine.registered_name for engine in document.engines}) != 1:
                raise FlowbenchError(
                    f"{len(document.cases)} cases were asked for, expected one cell: give one --model and --batch-size"
                )
            setting = replace(_setting(document, slowdowns, load), git=head.side.git)
            read_floors(document.machine)  # what cannot be read is said now, not after the first sitting
            done = record.begin(out, setting)
            places = {"base": Place(head.import_path), "head": Place(head.import_path)}
            places |= {name: Place(head.import_path, slowdown) for name, slowdown in _sides(slowdowns).items()}
            while done < sittings:
                with ProgressDisplay(
                    document, prefix=f"sitting {done + 1} of {sittings}: ", every_s=_TOLD_EVERY_S
                ) as display:
                    sitting = _sitting(document, places, load, display)
                record.add(out, sitting)
                done += 1
                _keep(out)
                click.echo(f"{done} of {sittings} sittings: {_brief(out)}", err=True)
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted after {done} sittings, which are in {out}; the same command goes on") from None
    _keep(out)
    return report(out)


def report(path: Path) -> str:
    """False alarms, the noise, the smallest change found, and the power, from a file of sittings."""
    setting, sittings = record.read(path)
    sides = evidence_of_sides(setting, sittings)
    unchanged = sides["head"]
    alarms = rate_of(verdicts_of(unchanged), _CHANGED)
    what = (
        f"{counted(len(sittings), 'sitting')} of one commit against itself: {setting.engine} {setting.case.label}, "
        f"{counted(setting.case.threads, 'thread')}, {'with' if setting.load else 'without'} a competing load of its own"
    )
    lines = [
        what,
        f"false alarms: {alarms.count} of {alarms.sittings} (95 % interval {alarms.low:.1%} to {alarms.high:.1%})",
        *_noise_words(setting, unchanged),
        f"from pair to pair: {percent(pair_spread(unchanged))} (standard deviation, median sitting)",
    ]
    lines += _power(unchanged, {slowdown: sides[side] for side, slowdown in setting.slowdowns.items()})
    return "\n".join(lines)


def _power(unchanged: Sequence[Evidence], slowed: Mapping[float, Sequence[Evidence]]) -> Iterator[str]:
    """Which changes would be found, and how often those that were injected were; `slowed` by how much."""
    if len(unchanged) >= LEAST_SITTINGS:
        yield f"smallest change found in 90 % of the sittings: {percent(smallest_found(unchanged))}"
    for slowdown, sittings in slowed.items():
        found = rate_of(verdicts_of(sittings), (Verdict.SLOWER,))
        yield (
            f"+{percent(slowdown)} injected: found in {found.count} of {found.sittings}"
            f" (95 % interval {found.low:.0%} to {found.high:.0%})"
        )


def _noise_words(setting: record.Setting, unchanged: Sequence[Evidence]) -> Iterator[str]:
    if len(unchanged) < LEAST_SITTINGS:
        why = f"too few sittings for a noise floor: it takes {LEAST_SITTINGS}, and a larger --sittings adds to these"
        yield f"noise floor: {why}"
        return
    margin = percent(unchanged[0].margin)
    floor, shift = percent(noise_floor(unchanged)), percent(sitting_shift(unchanged))
    between, within = "for the margin between run documents", f"for the margin within a sitting, {margin} here"
    if setting.load:
        between, within = "not kept: it is the load's", f"not kept either; all is judged with a margin of {margin}"
    yield f"noise floor: {floor} (95 % of the sittings showed less), {between}"
    yield f"shift of a sitting: {shift} (95 % are off by less, beyond what their own intervals tell), {within}"


def evidence_of_sides(setting: record.Setting, sittings: Sequence[record.AaSitting]) -> dict[str, list[Evidence]]:
    """The evidence of every side against base, sitting by sitting, at the margin that `flowbench compare` takes here.

    That is the shift of these same sittings where it is larger than the least margin, but for one under a load of our own.
    What looks changed at a larger margin than that of its measurement looked so then too, and has its confirming rounds.
    """
    sides = {side: [evidence(setting, sitting, side) for sitting in sittings] for side in ("head", *setting.slowdowns)}
    if len(sittings) < LEAST_SITTINGS or setting.load:
        return sides
    margin = max(setting.least_margin, sitting_shift(sides["head"]))
    return {side: [replace(one, margin=margin) for one in of_side] for side, of_side in sides.items()}


def evidence(setting: record.Setting, sitting: record.AaSitting, side: str) -> Evidence:
    """The log-ratios of a side against base in one sitting."""
    base = {pair.pair: pair for pair in sitting.pairs if pair.side == "base"}
    ratios = [
        (pair.confirming, pair_log_ratio(base[pair.pair].steps_us, pair.steps_us))
        for pair in sitting.pairs
        if pair.side == side
    ]
    return Evidence(
        sampling=tuple(ratio for confirming, ratio in ratios if not confirming),
        confirming=tuple(ratio for confirming, ratio in ratios if confirming),
        margin=setting.least_margin,
    )


def _sitting(document: RunDocument, places: dict[str, Place], load: bool, watcher: Watcher) -> record.AaSitting:
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), monotonic()
    with tempfile.TemporaryDirectory() as folder, _competing(load):
        try:
            measured = run_comparison(store.create(Path(folder), document), document, places, watcher)
        except store.WriteError as error:
            raise FlowbenchError(f"{error.what}; free some space there, or set TMPDIR to another folder") from None
    bad = next((sample for sample in measured.samples if sample.status != "ok"), None)
    if bad is not None:
        raise FlowbenchError(f"a sitting cannot be measured: {bad.cell}: {bad.error}")
    _check_pairs(measured)
    first_confirming = measured.protocol.pairs - _confirming_rounds(measured)
    pairs = tuple(
        record.Pair(
            side=str(measured.engine(measured.by_key[sample.cell].engine).side),
            pair=sample.pair,
            confirming=sample.pair >= first_confirming,
            steps_us=tuple(float(round(time_ms * 1000)) for time_ms in sample.steps_ms),
        )
        for sample in measured.samples
    )
    return record.AaSitting(started, monotonic() - began, os.getloadavg()[0], pairs)


def _check_pairs(measured: RunDocument) -> None:
    """Raise FlowbenchError for a sitting of so few pairs that it can show nothing."""
    pairs = len({sample.pair for sample in measured.samples})
    if pairs < LEAST_PAIRS:
        why = "; ".join(measured.comparison.stopped.values()) if measured.comparison else ""
        raise FlowbenchError(
            f"a sitting came to {counted(pairs, 'pair')}, expected at least {LEAST_PAIRS} ({why}): give --pairs, which has"
            " no cap, or a smaller cell"
        )


def _confirming_rounds(document: RunDocument) -> int:
    """How many rounds of a comparison only confirm."""
    return document.comparison.confirmation_pairs if document.comparison else 0


def _setting(document: RunDocument, slowdowns: Sequence[float], load: bool) -> record.Setting:
    protocol, confirming = document.protocol, _confirming_rounds(document)
    return record.Setting(
        machine=document.machine,
        git=document.git,
        engine=document.engines[0].registered_name,
        case=document.cases[0],
        steps=protocol.steps,
        warmup=protocol.warmup,
        steps_per_turn=protocol.steps_per_turn or protocol.steps,
        untimed_per_turn=protocol.untimed_per_turn,
        pairs=protocol.pairs - confirming,
        confirmation_pairs=confirming,
        least_margin=document.comparison.least_margin if document.comparison else 0.0,
        slowdowns=_sides(slowdowns),
        load=load,
    )


def _sides(slowdowns: Sequence[float]) -> dict[str, float]:
    return {f"head+{100 * slowdown:g}%": slowdown for slowdown in slowdowns}


def _brief(path: Path) -> str:
    return "; ".join(line for line in report(path).splitlines() if line.startswith(("false", "+")))


def _keep(out: Path) -> None:
    """Keep the noise of the sittings in `out` for comparisons on this machine, where there are enough of them.

    What a competing load of our own has done is no noise of the machine: as a margin it would hide changes from then on.
    """
    setting, sittings = record.read(out)
    if len(sittings) < LEAST_SITTINGS or setting.load:
        return
    unchanged = evidence_of_sides(setting, sittings)["head"]
    alarms = rate_of(verdicts_of(unchanged), _CHANGED)
    floor = NoiseFloor(
        cell=cell_name(setting.engine, setting.case),
        floor=noise_floor(unchanged),
        sittings=len(sittings),
        alarms=alarms.count,
        measured=sittings[-1].started,
        shift=sitting_shift(unchanged),
    )
    try:
        keep_floor(setting.machine, floor)
    except store.WriteError as error:
        done = counted(len(sittings), "sitting")
        raise FlowbenchError(f"{error}, and give the same command again: it goes on with the {done} in {out}") from None


@contextmanager
def _competing(load: bool) -> Iterator[None]:
    """With `load`, processes that compute come and go at random times while the context lasts."""
    if not load:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_compete, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def load_command() -> list[str]:
    """A process that computes for as long as this one lives, which may be killed outright."""
    program = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(i * i for i in range(100_000))"
    return [sys.executable, "-c", program, str(os.getpid())]


def _compete(ended: threading.Event) -> None:
    while not ended.wait(random.uniform(*_LOAD_S)):
        process = subprocess.Popen(load_command(), env=child_environment())
        ended.wait(random.uniform(*_LOAD_S))
        process.kill()
        process.wait()
