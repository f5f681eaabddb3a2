"""What `flowbench compare --dry-run` says: the cells of a comparison, their margins, and how long it takes at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowbench.commands.comparing import NO_BASE, REPOSITORY, begun, stopped_comparison
from flowbench.commands.limits import limits_text as read_limits
from flowbench.commands.running import interruptible, remarks
from flowbench.errors import FlowbenchError
from flowbench.judge.compare import canary_of, comparison_of, label_of, margin_within, matched_sides, side_name
from flowbench.judge.explanation import MOST_PROFILED
from flowbench.judge.times import percent
from flowbench.measure.comparison_session import CONFIRMING_SHARE, takes_part
from flowbench.measure.plan import Request
from flowbench.measure.progress import duration
from flowbench.measure.refs import placed_sides
from flowbench.measure.schedule import estimate_s
from flowbench.record import store
from flowbench.record.run import RunDocument
from flowbench.report.words import counted


def dry_run(
    base: str | None,
    head: str | None,
    request: Request,
    command: Sequence[str],
    *,
    limits: Path | None = None,
    resume: Path | None = None,
) -> str:
    """What `compare` of two refs would measure, at which margins and for how long at most, as text; nothing is measured.

    Both sides are placed and imported for it, so that a ref that cannot be measured is told.
    """
    limits_text = read_limits(limits)
    if resume is not None:
        resume = store.followed(resume)
        base, head = stopped_comparison(resume, base, head)
    if base is None:
        raise FlowbenchError(NO_BASE)
    for given in (base, head):
        if given and Path(given).is_file():
            raise FlowbenchError(f"{given} is a file: of documents nothing is measured that --dry-run could list")
    with interruptible(), placed_sides(REPOSITORY, base, head) as (base_side, head_side):
        document, _ = begun(resume, request, command, base_side.side, head_side.side, limits_text)
    return "\n".join(_plan_lines(document))


def _plan_lines(document: RunDocument) -> Iterator[str]:
    plan, protocol = comparison_of(document), document.protocol
    sampling = protocol.pairs - plan.confirmation_pairs
    pairs = f"{plan.least_pairs} to {sampling}" if sampling > plan.least_pairs else str(sampling)
    yield " -> ".join(side_name(side).label for side in (plan.base, plan.head))
    yield (
        f"{pairs} pairs, and {plan.confirmation_pairs} to confirm what looks changed,"
        f" x ({protocol.warmup} warm-up + {protocol.steps} timed) steps, {counted(protocol.threads, 'thread')},"
        f" reference: {document.reference or 'none'}"
    )
    matches = matched_sides(document)
    margins = [margin_within(plan, match) for match in matches]
    for match, margin in zip(matches, margins, strict=True):
        yield f"  {label_of(document, match.case)} {match.engine}: margin {percent(margin.size)}"
    for source, count in Counter(margin.source for margin in margins).items():
        yield f"  margin of {counted(count, 'cell')}: {source}"
    canary = canary_of(document)
    if canary is not None:
        yield f"  {label_of(document, canary.case)} {canary.engine}: base once more, against itself"
    yield from remarks(document)
    profiles = f"then profiles of {counted(min(MOST_PROFILED, len(matches)), 'cell')} at most"
    yield f"{counted(len(matches), 'cell')} in one sitting, {_bound(document)}, {profiles}"


def _bound(document: RunDocument) -> str:
    """How long a sitting takes at most, without its profiles, in words."""
    protocol, done = document.protocol, {(sample.cell, sample.pair) for sample in document.samples}
    estimated_s = sum(
        estimate_s(cell, protocol.steps + protocol.warmup)
        for cell in document.cells
        for pair in range(protocol.pairs)
        if takes_part(document, cell, pair) and (cell.key, pair) not in done
    )
    cap_s = protocol.wall_cap_s
    if cap_s is None or estimated_s < cap_s:
        return f"about {duration(estimated_s)} at most on a quiet machine"
    return f"{duration(cap_s)} at most, {duration(CONFIRMING_SHARE * cap_s)} more to confirm"
