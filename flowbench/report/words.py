"""How reports word things from data: names and reasons that cannot break out of their line, figures, sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from flowbench.judge.inference import binomial_interval
from flowbench.judge.stats import Ratio, is_telling, untold
from flowbench.record.gpu import Range
from flowbench.record.run import RunDocument, SidesCompared

_ZERO_WIDTH_SPACE = "\u200b"
# Where less has room it is a name, of which every letter may tell it from others.
_SENTENCE = 80
_PLAIN_NAME = re.compile(r"(?!www\.)[A-Za-z0-9](?:[\w.+-]*|[A-Za-z0-9 .+-]*)", re.ASCII | re.IGNORECASE)


def one_line(text: str, longest: int = 200) -> str:
    """`text` in one line of printable characters, cut with an ellipsis behind `longest`: a sentence after a word."""
    if not text.isprintable():
        text = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(text.split())
    if len(line) <= longest:
        return line
    words = line[:longest].rpartition(" ")[0]
    after_a_word = longest >= _SENTENCE and len(words) > longest // 2
    return (words if after_a_word else line[: longest - 1]).rstrip() + "…"


def markdown(text: str, longest: int = 200) -> str:
    """`text` from data for GitHub's Markdown: plain words stay, all else becomes a code span that nothing can end.

    Inside it there are no mentions, links, tags or table borders; characters that could still matter are replaced by
    ones that look alike, and `<!--` and `@name` are broken for whoever searches the source.
    """
    line = one_line(text, longest)
    if not line:
        return "`?`"
    if _PLAIN_NAME.fullmatch(line):
        return line
    line = line.replace("`", "ˋ").replace("|", "∣").replace("\\", "⧵")
    line = re.sub(r"(?<=<)(?=[!/?A-Za-z])|(?<=@)(?=\S)|(?<=\])(?=\()", _ZERO_WIDTH_SPACE, line)
    return f"`{line}`"


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its word: `1 pair`, `2 pairs`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def milliseconds(time_ms: float) -> str:
    """A time with about four digits."""
    return f"{time_ms:.1f}" if time_ms >= 100 else f"{time_ms:.2f}" if time_ms >= 1 else f"{time_ms:.4f}"


def mebibytes(size_bytes: float, digits: int = 0) -> str:
    """A size in MiB."""
    return f"{size_bytes / 1024 / 1024:,.{digits}f} MiB".replace(",", " ")


def sizes(base_bytes: float | None, head_bytes: float | None, told_apart: bool) -> str:
    """`836 MiB → 837 MiB`; where they are `told_apart` by a verdict, with as many digits as it takes to see it."""
    digits = 0
    if told_apart and base_bytes is not None and head_bytes is not None and base_bytes != head_bytes:
        # An allocator's smallest step is 512 bytes, or 0.0005 MiB.
        digits = next(
            (digits for digits in range(4) if mebibytes(base_bytes, digits) != mebibytes(head_bytes, digits)), 4
        )
    return " → ".join("–" if size is None else mebibytes(size, digits) for size in (base_bytes, head_bytes))


def memory_ratio(ratio: float) -> str:
    """A ratio of sizes, which are compared byte by byte: with as many digits as it takes to differ from 1."""
    digits = next((digits for digits in range(3, 9) if float(f"{ratio:.{digits}f}") != 1), 3)
    return f"{ratio:.{digits}f}"


def spread(low: float, high: float) -> str:
    """Two ends of a range of ratios."""
    return f"{low:.3f} - {high:.3f}"


def interval(ends: tuple[float, float] | None) -> str:
    """A ratio's 95 % interval; in its place that there is none, or that it is so wide that it says nothing."""
    return spread(*ends) if ends and is_telling(*ends) else str(untold(ends))


def range_of_pairs(ratio: Ratio) -> str:
    """The lowest and the highest pair of a ratio, and whether they are too few to tell anything from."""
    if ratio.pairs < 2:
        return str(untold(None))
    few = untold(ratio.interval)
    return f"{ratio.lowest:.2f} - {ratio.highest:.2f}{f', {few}' if few else ''}"


def details_of(document: RunDocument) -> Iterator[tuple[str, str]]:
    """What belongs under every report: run, commit, machine, versions, protocol; as (word, text from data)."""
    machine, protocol, git = document.machine, document.protocol, document.git
    yield "run", f"{document.run_id}, {document.created}, flowbench {document.flowbench_version}"
    yield "command", " ".join(document.command)
    # A comparison measures its two sides, from wherever the checkout stands that flowbench itself is run from.
    word = "commit" if document.comparison is None else "flowbench's commit"
    if git is None:
        yield word, "unknown (no git repository)"
    else:
        branch = f" on {git.branch}" if git.branch else ""
        yield word, f"{git.commit}{branch}{', with uncommitted changes' if git.dirty else ''}"
    yield (
        "CPU",
        (
            f"{machine.cpu_model}, {machine.physical_cores} cores ({machine.usable_cores} of {machine.logical_cores} "
            f"logical ones usable), {machine.memory_bytes / 1024**3:.1f} GiB"
        ),
    )
    cards = Counter(f"{gpu.name}, {gpu.memory_bytes / 1024**3:.1f} GiB" for gpu in machine.gpus)
    for card, number in cards.items():
        yield "GPU", f"{f'{number} × ' if number > 1 else ''}{card}, driver {machine.gpu_driver or 'unknown'}"
    for index, text in gpu_conditions(document):
        yield f"GPU {index} while measured", text
    yield "system", f"{machine.system}, {machine.architecture}, Python {machine.python}"
    for engine in document.engines:
        yield "engine", f"{engine.name} ({engine.display_name}): {engine.library} {engine.version}"
    yield (
        "versions",
        ", ".join(f"{name} {version}" for name, version in sorted(document.versions.items())) or "none noted",
    )
    if document.comparison is not None:
        yield "false alarms", _false_alarms(document.comparison)
        yield (
            "times",
            "the median of the processes' median steps: of base and head in the rounds with both, of the reference in its own",
        )
        yield "head / base", "of a pair by the faster half of its steps, of pairs in the geometric mean"
    if document.reference is not None:
        yield (
            "relative speed",
            "the reference's time / the subject's: of a pair by its median steps, of pairs and cells in the geometric mean",
        )
    if document.comparison is not None or document.reference is not None:
        yield "ratios", "of the two processes of each pair, never of the two times that are shown"
    yield (
        "protocol",
        (
            f"{pairs_of(document)} of fresh processes in order {protocol.order}, "
            f"{protocol.warmup} warm-up and {counted(protocol.steps, 'timed step')} each, "
            f"{threads_of(document)}, seed {protocol.seed}, "
            f"SGD with learning rate {protocol.learning_rate:g} and momentum {protocol.momentum:g}, "
            f"losses equal within {protocol.loss_tolerance:g}"
        ),
    )


def gpu_conditions(document: RunDocument) -> Iterator[tuple[int, str]]:
    """How each GPU ran over all samples, by the driver's readings: clocks, temperature, power, what lowered its clocks."""
    seen = [each for sample in document.samples for each in sample.gpus if each.readings]
    for gpu in sorted({each.gpu for each in seen}):
        own = [each for each in seen if each.gpu == gpu]
        words = [
            _span([each.sm_clock_mhz for each in own], "SM clock", "MHz"),
            _span([each.memory_clock_mhz for each in own], "memory clock", "MHz"),
            _span([each.temperature_c for each in own], "temperature", "°C"),
            _span([each.power_w for each in own], "power", "W"),
        ]
        reasons = sorted({reason for each in own for reason in each.slowed_by})
        words.append(f"slowed down at times by {', '.join(reasons)}" if reasons else "never slowed down")
        yield gpu, f"{', '.join(filter(None, words))} ({counted(sum(each.readings for each in own), 'reading')})"


def _span(ranges: Iterable[Range | None], what: str, unit: str) -> str | None:
    told = [each for each in ranges if each is not None]
    if not told:
        return None
    low, high = min(each.lowest for each in told), max(each.highest for each in told)
    return f"{what} {low:.0f} {unit}" if round(low) == round(high) else f"{what} {low:.0f} to {high:.0f} {unit}"


def pairs_of(document: RunDocument) -> str:
    """`6 pairs`; of a comparison `up to 6 pairs (and up to 6 to confirm)`, since it ends when it knows enough."""
    pairs, plan = document.protocol.pairs, document.comparison
    if plan is None:
        return counted(pairs, "pair")
    confirming = f" (and up to {plan.confirmation_pairs} to confirm)" if plan.confirmation_pairs else ""
    return f"up to {counted(pairs - plan.confirmation_pairs, 'pair')}{confirming}"


def threads_of(document: RunDocument) -> str:
    """How many threads a rank has; where ranks share the cores that is less than one alone has."""
    usual = document.protocol.threads
    several = [cell for cell in document.cells if cell.world_size > 1 and cell.threads != usual]
    shared = sorted({(cell.world_size, cell.threads) for cell in several})
    others = "".join(f", {threads} where there are {ranks} ranks" for ranks, threads in shared)
    return f"{counted(usual, 'thread')} per rank{others}"


def _false_alarms(plan: SidesCompared) -> str:
    if not plan.aa_sittings:
        return "how often this machine raises one is not known: flowbench aa measures it"
    low, high = binomial_interval(plan.aa_alarms, plan.aa_sittings)
    return (
        f"{plan.aa_alarms} in {counted(plan.aa_sittings, 'sitting')} of one commit against itself on this machine "
        f"(95 % interval of the rate: {100 * low:.1f} to {100 * high:.1f} %)"
    )
