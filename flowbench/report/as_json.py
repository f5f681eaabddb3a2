"""Writes the facts of a run as JSON, for other tools: figures as numbers, what is missing as null with its reason."""

from __future__ import annotations

import json
from typing import Any

from flowbench.codec import encode
from flowbench.report.facts import Comparison, Facts, Side

SCHEMA = "flowbench.report"
SCHEMA_VERSION = 1


def write(facts: Facts) -> str:
    """The JSON text of `facts`: times in ms, sizes in bytes; ratios of times are reference / subject, of memory the reverse."""
    document = facts.document
    tree = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "run_id": document.run_id,
        "created": document.created,
        "ending": encode(document.ending),
        "reference": facts.reference,
        "comparisons": [_comparison(comparison) for comparison in facts.comparisons],
        "overall": encode(facts.overall),
        "changes": None if facts.changes is None else encode(facts.changes),
        "not_measured": encode(facts.left_out),
        "findings": encode(document.findings),
        "engines": encode(document.engines),
        "protocol": encode(document.protocol),
        "git": encode(document.git),
        "machine": encode(document.machine),
        "versions": encode(document.versions),
    }
    return json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _comparison(comparison: Comparison) -> dict[str, Any]:
    ratio = comparison.ratio
    return {
        "case": encode(comparison.case),
        "label": comparison.label,
        "subject": _side(comparison.subject),
        "reference": _side(comparison.reference) if comparison.reference else None,
        "relative_speed": comparison.relative_speed,
        "ratio": None if ratio is None else {**encode(ratio), "pairs": ratio.pairs},
        "no_ratio": comparison.no_ratio,
        "memory_ratios": comparison.memory_ratios,
    }


def _side(side: Side) -> dict[str, Any]:
    times = side.times
    return {**encode(side), "times": None if times is None else {**encode(times), "mean_ms": times.mean_ms}}
