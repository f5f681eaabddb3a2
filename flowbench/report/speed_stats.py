"""Writes the "Speed stats" text: per case the reference's line, the subject's line and the ratio line, then memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from flowbench.cell import Case
from flowbench.report.facts import Comparison, Facts, Side
from flowbench.report.names import unique
from flowbench.report.peaks import MIB
from flowbench.report.words import one_line


def write(facts: Facts) -> str:
    """The Speed stats text of `facts`; `speed_stats_reader.parse` reads the same figures back.

    What has no figures stands under "Not measured", in a table: readers take tables for noise, whatever a reason says.
    """
    machine = facts.document.machine
    on_gpu = facts.document.on_gpu and machine.gpus
    device = f"GPU Name: {_name(machine.gpus[0].name)}" if on_gpu else f"CPU Name: {_name(machine.cpu_model)}"
    framework, case_text = _unique_words(_framework), _case_texts(facts)
    lines = ["Speed stats:", device, ""]
    for comparison in facts.comparisons:
        lines += _case_lines(comparison, framework, case_text[comparison.case])
    memory = list(_memory_lines(facts, framework, case_text))
    lines += ["Memory stats:", "", *memory] if memory else []
    if facts.left_out:
        lines.append("Not measured:")
        lines += [f"| {_prose(missing.what)} | {_prose(missing.reason)} |" for missing in facts.left_out]
    return "\n".join(lines).rstrip("\n") + "\n"


def _case_lines(comparison: Comparison, framework: Callable[[str], str], case_text: tuple[str, str]) -> list[str]:
    lines = [
        _time_line(side, framework(side.name), case_text)
        for side in (comparison.reference, comparison.subject)
        if side is not None and side.times is not None
    ]
    reference, subject = comparison.reference, comparison.subject
    if comparison.ratio and reference and reference.times and subject.times:
        # The format divides what stands in the two lines above, which are means.
        ours, theirs = subject.times.mean_ms, reference.times.mean_ms
        lines.append(f"Relative speed: {theirs / ours:.2f} (= {theirs:.1f}ms / {ours:.1f}ms)")
    return [*lines, ""] if lines else []


def _time_line(side: Side, framework: str, case_text: tuple[str, str]) -> str:
    assert side.times is not None
    model, labels = case_text
    times = side.times
    return f"{framework} {model} time: {times.mean_ms:.1f}ms (= {times.total_ms:.1f}ms / {times.count}, {labels})"


def _memory_lines(
    facts: Facts, framework: Callable[[str], str], case_text: dict[Case, tuple[str, str]]
) -> Iterator[str]:
    """Per case a heading, then a line per engine, rank and kind: `NAME KIND (rank N): M MiB`."""
    sides: dict[Case, dict[str, Side]] = {case: {} for case in case_text}
    for comparison in facts.comparisons:
        for side in (comparison.reference, comparison.subject):
            if side is not None and side.memory:
                sides[comparison.case].setdefault(side.name, side)
    for case, (model, labels) in case_text.items():
        if not sides[case]:
            continue
        yield f"{model}, {labels}:"
        for name, side in sides[case].items():
            for rank in side.memory:
                for kind, size in rank.peaks.items():
                    yield f"{framework(name)} {kind} (rank {rank.rank}): {size / MIB:.1f} MiB"
        yield ""


def _case_texts(facts: Facts) -> dict[Case, tuple[str, str]]:
    """Each case's model and labels, no two alike: what the format has no label for is added where it tells cases apart."""
    texts: dict[Case, tuple[str, str]] = {}
    taken: set[tuple[str, str]] = set()
    for comparison in facts.comparisons:
        case = comparison.case
        if case in texts:
            continue
        model, labels = _model(case.model), _labels(case)
        for addition in (f", threads={case.threads}", f", case={len(texts) + 1}"):
            if (model, labels) in taken:
                labels += addition
        texts[case] = (model, labels)
        taken.add(texts[case])
    return texts


def _labels(case: Case) -> str:
    labels = [f"input_shape={list(case.input_shape)}", f"backward is {'enabled' if case.backward else 'disabled'}"]
    labels += ["ddp"] if case.ddp else []
    labels += ["ddp_broadcast_buffers is disabled"] if case.ddp and not case.broadcast_buffers else []
    labels += [f"world size={case.world_size}"] if case.ddp or case.world_size > 1 else []
    labels += [f"precision={case.precision}"] if case.precision != "float32" else []
    labels += [f"mode={case.mode}"] if case.mode != "eager" else []
    return ", ".join(labels)


def _unique_words(word: Callable[[str], str]) -> Callable[[str], str]:
    """`word`, changed so that two different names never become the same word."""
    known: dict[str, str] = {}

    def named(name: str) -> str:
        if name not in known:
            known[name] = unique(word(name), known.values())
        return known[name]

    return named


def _framework(name: str) -> str:
    return re.sub(r"[^\w.+#-]+", "-", name).strip("-.+#") or "engine"


def _model(name: str) -> str:
    return re.sub(r"[^\w.+#/ -]+", "-", one_line(name)) or "model"


def _name(name: str) -> str:
    return re.sub(r"[^\w.,+#/ ()@-]|@(?=\S)", "-", one_line(name)) or "unknown"


def _prose(text: str) -> str:
    """A reason in one line that ends no fence or column, opens no tag or link, names nobody, and is read back as noise."""
    return one_line(text, 400).replace("](", "] (").translate(str.maketrans("\\|<>`@", "//()'-"))
