"""What came of single operations measured side by side: one record an operation, kept as a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """One operation by two sides, in turn: what one call of each took, in ms, in every round.

    `uses` says how often a model has it, 0 where that is no question. `difference` is the largest of the results' relative
    distances (2-norms).
    """

    operation: str
    label: str
    uses: int
    device: str
    threads: int
    subject: str
    reference: str
    subject_ms: tuple[float, ...]
    reference_ms: tuple[float, ...]
    difference: float
