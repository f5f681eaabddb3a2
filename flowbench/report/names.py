"""What engines and cases are called in a report: names that no two of a document share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container

from flowbench.cell import Case
from flowbench.record.run import Engine, RunDocument


def engine_names(document: RunDocument) -> dict[str, str]:
    """A name for each engine that no other has: its display name, or its own where several show the same one.

    A side of a comparison is a word behind it (`Flow head`): an @ would read as a mention.
    """
    shown = {engine.name: _display_name(engine) for engine in document.engines}
    counts = Counter(shown.values())
    names: dict[str, str] = {}
    for engine in sorted(document.engines, key=lambda engine: engine.name != document.reference):
        keeps = counts[shown[engine.name]] == 1 or engine.name == document.reference
        names[engine.name] = unique(shown[engine.name] if keeps else engine.name, names.values())
    return names


def _display_name(engine: Engine) -> str:
    return side_less_name(engine) if engine.side is None else f"{side_less_name(engine)} {engine.side}"


def side_less_name(engine: Engine) -> str:
    """What an engine is called, whichever side of a comparison it stands for."""
    return engine.display_name.removesuffix(f"@{engine.side}") if engine.side else engine.display_name


def case_labels(document: RunDocument) -> dict[Case, str]:
    """A label for each case that no other has; threads are told only where they tell cases apart."""
    labels: dict[Case, str] = {}
    taken: set[str] = set()
    for case in document.cases:
        label = case.label if document.labels[case.label] == 1 else f"{case.label}, threads={case.threads}"
        labels[case] = unique(label, taken)
        taken.add(labels[case])
    return labels


def unique(name: str, taken: Container[str]) -> str:
    """`name`, or with a number behind it where it is taken: nothing may print over something else."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}-{number}"
    return candidate
