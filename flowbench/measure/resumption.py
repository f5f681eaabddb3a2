"""Going on with a sitting that was stopped: whether this is still the same sitting, and which of its samples count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import flowbench
from flowbench.cell import Case
from flowbench.engine_registry import load_engine
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import comparison_of, matched_sides
from flowbench.measure.plan import NO_REFERENCE, Request, why_not
from flowbench.measure.schedule import plan_turns
from flowbench.measure.session import CAPPED, SLEPT, UNREACHED, given_up
from flowbench.record import machine as fingerprint
from flowbench.record.run import RESUMED, Ending, Finding, Protocol, RunDocument, Side


def differences(document: RunDocument, request: Request) -> list[str]:
    """In what measuring here and now, with what `request` asks for, would be another sitting: each in words."""
    here = Path(flowbench.__file__).parent
    now, then = fingerprint.read_git(here), document.git
    found = [
        *_conflicts(request, document),
        *(f"machine's {text}" for text in document.machine.differences(fingerprint.read_machine())),
    ]
    if (then and then.commit) != (now and now.commit):
        unknown = fingerprint.why_no_commit(here) if now is None else None
        is_now = f"not known ({unknown})" if unknown else now and now.commit
        found.append(f"commit: {then and then.commit} / {is_now}")
    elif (then and then.changes) != (now and now.changes):
        found.append("the uncommitted changes of the working tree are others")
    versions = fingerprint.read_versions()
    found += [
        f"version of {name}: {document.versions.get(name)} / {versions.get(name)}"
        for name in sorted({*document.versions, *versions})
        if document.versions.get(name) != versions.get(name)
    ]
    return found


def check_resumable(document: RunDocument, request: Request, source: str, done: str = "resumed") -> None:
    """Raise FlowbenchError, naming what differs, where `document` was not measured here with these settings.

    `done` says what is to be done with it.
    """
    found = differences(document, request)
    if found:
        raise FlowbenchError(f"{source} cannot be {done} here (then / now): {'; '.join(found)}; start a new run")
    for name in dict.fromkeys(engine.registered_name for engine in document.engines):
        reason = why_not(load_engine(name), "unavailable")
        if reason is not None:
            raise FlowbenchError(f"{source} cannot be {done} here: engine {name}: {reason}")


def check_same_sides(document: RunDocument, base: Side, head: Side, source: str) -> None:
    """Raise FlowbenchError where a side of the comparison in `document` is no longer what it was when the sitting began."""
    plan = comparison_of(document)
    for then, now in ((plan.base, base), (plan.head, head)):
        was, is_now = then.git, now.git
        if (was and was.commit) != (is_now and is_now.commit):
            what = f"{then.asked} was {was and was.commit[:10]} and is now {is_now and is_now.commit[:10]}"
        elif (was and was.changes) != (is_now and is_now.changes):
            what = f"the uncommitted changes of the {then.asked} are others"
        else:
            continue
        raise FlowbenchError(
            f"{source} cannot be gone on with: {what}; what was measured is judged by: flowbench compare {source}"
        )


def resumed_protocol(document: RunDocument, request: Request) -> Protocol:
    """The document's protocol with the limits asked for anew: they change when a sitting ends, not what it measures."""
    return replace(
        document.protocol,
        timeout_s=request.timeout_s or document.protocol.timeout_s,
        wall_cap_s=request.wall_cap_s or document.protocol.wall_cap_s,
    )


def whole_rounds(document: RunDocument) -> RunDocument:
    """The document without rounds that were begun and not finished: their parts would be measured far apart."""
    turns = plan_turns(document.cells, document.protocol.pairs)
    abandoned = given_up(document.samples)
    done = {(sample.cell, sample.pair) for sample in document.samples}
    broken = {
        (turn.cell.case, turn.pair)
        for turn in turns
        if (turn.cell.key, turn.pair) not in done and turn.cell.key not in abandoned
    }
    whole = _without(document, broken)
    left = len(document.samples) - len(whole.samples)
    note = Finding(RESUMED, f"{left} samples of unfinished rounds were measured anew", None, None)
    return _reopened(replace(whole, findings=(*whole.findings, *([note] if left else []))))


def whole_pairs(document: RunDocument) -> RunDocument:
    """The document of a comparison as it may be gone on with: without pairs that lack a side, and with a note of the pause.

    A case whose sampling had ended with such a pair is open again. So is one that had no more time, or whose round the machine
    slept through, unless rounds that confirm have followed: what confirms comes after all the sampling.
    """
    plan, bad = comparison_of(document), given_up(document.samples)
    half = set()
    for match in matched_sides(document):
        sides = [cell for cell in (match.base, match.head) if cell is not None]
        if len(sides) == 2 and not bad & {cell.key for cell in sides}:
            ours, theirs = ({sample.pair for sample in document.samples_of(cell)} for cell in sides)
            half |= {(match.case, pair) for pair in ours ^ theirs}
    whole = _without(document, half)
    rounds = len({(document.by_key[sample.cell].case, sample.pair) for sample in whole.samples})
    since = document.ending.finished or max((sample.started for sample in whole.samples), default=document.created)
    message = (
        f"{rounds} rounds were measured until {since[:19]}, the others after a pause,"
        f" from {datetime.now(UTC).isoformat(timespec='seconds')[:19]} on (UTC)"
    )
    note = Finding(RESUMED, message, None, None)
    sampling = document.protocol.pairs - plan.confirmation_pairs
    confirming = {document.by_key[sample.cell].case.key for sample in whole.samples if sample.pair >= sampling}
    again = {key for key, why in plan.stopped.items() if why.startswith((CAPPED, SLEPT)) and key not in confirming}
    again |= {case.key for case, pair in half if pair < sampling}
    plan = replace(plan, stopped={key: why for key, why in plan.stopped.items() if key not in again})
    return _reopened(replace(whole, findings=(*whole.findings, note), comparison=plan))


def _without(document: RunDocument, rounds: set[tuple[Case, int]]) -> RunDocument:
    """The document without the samples of some rounds of cases, and without what was found in these."""
    cases = {key: cell.case for key, cell in document.by_key.items()}
    return replace(
        document,
        samples=tuple(one for one in document.samples if (cases[one.cell], one.pair) not in rounds),
        findings=tuple(
            one
            for one in document.findings
            if one.cell is None or one.pair is None or (cases[one.cell], one.pair) not in rounds
        ),
    )


def _reopened(document: RunDocument) -> RunDocument:
    left_out = tuple(one for one in document.not_measured if not one.reason.startswith(UNREACHED))
    return replace(document, ending=Ending("running", None, None), not_measured=left_out)


def _conflicts(request: Request, document: RunDocument) -> Iterator[str]:
    """What was asked for and differs from `document`'s settings, each in words."""
    protocol, cells, plan = document.protocol, document.cells, document.comparison
    reference = document.reference or NO_REFERENCE
    engines = {*request.engines, *([document.reference] if document.reference else [])} if request.engines else None
    settings = [
        ("preset", request.preset, document.preset),
        ("reference", request.reference, reference),
        ("engines", engines, {engine.registered_name for engine in document.engines}),
        ("models", set(request.models) or None, {cell.model for cell in cells}),
        ("batch sizes", set(request.batch_sizes) or None, {cell.input_shape[0] for cell in cells}),
        ("input shapes", {request.image_shape} if request.image_shape else None, {c.input_shape[1:] for c in cells}),
        ("world sizes", set(request.world_sizes) or None, {cell.world_size for cell in cells}),
        ("ddp", {request.ddp} if request.ddp else None, {cell.ddp for cell in cells}),
        (
            "buffers broadcast",
            None if request.broadcast_buffers is None else {request.broadcast_buffers},
            {cell.broadcast_buffers for cell in cells},
        ),
        ("launcher options", request.launcher_options or None, protocol.launcher_options),
        ("device", {request.device} if request.device else None, {cell.device for cell in cells}),
        ("pairs", request.pairs, protocol.pairs - (plan.confirmation_pairs if plan else 0)),
    ]
    names = ("steps", "warmup", "threads", "seed", "gpu_memory_limit_bytes", "launcher")
    settings += [(name, getattr(request, name), getattr(protocol, name)) for name in names]
    for name, ours, theirs in settings:
        if ours not in (None, theirs):
            yield f"{name} {_words(theirs)}, asked for {_words(ours)}"


def _words(value: object) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, set) else str(value)
