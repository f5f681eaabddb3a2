"""Which runs of a store may go: those that are old and that no report, and no run that stays, refers to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from flowbench.archive.folder import Archive
from flowbench.errors import FlowbenchError
from flowbench.record.quantities import instant

_TEXTS = {".md", ".txt", ".html", ".json", ".xml", ".csv", ".rst"}


@dataclass(frozen=True)
class Pruning:
    """What a pruning removes, and what it keeps although it is old: each run id with the file that refers to it."""

    removed: tuple[str, ...]
    kept: dict[str, str]


def prune(archive: Archive, days: float, referring: Sequence[Path], *, dry_run: bool = False) -> Pruning:
    """Remove runs older than `days` that no text below the folders `referring`, and no run that stays, names."""
    for folder in referring:
        if not folder.exists():
            raise FlowbenchError(f"{folder}: no such file or folder; name where reports lie with --referred-in")
    entries = archive.contents().entries
    limit = datetime.now(UTC) - timedelta(days=days)
    old = {entry.run_id for entry in entries if instant(entry.created) < limit}
    # Not the store itself, and not where runs write their own: there each run is named by its own report.
    aside = {archive.folder.resolve(), *((folder / "out").resolve() for folder in referring)}
    texts = [path for path in _texts(referring) if not aside & set(path.resolve().parents)]
    kept = _named_in(texts, old)
    # A run that stays may name another as its base, and that one a third.
    waiting = [entry.run_id for entry in entries if entry.run_id not in old or entry.run_id in kept]
    while waiting:
        run_id = waiting.pop()
        found = _named_in([archive.runs / f"{run_id}.json"], old - set(kept))
        kept |= found
        waiting += found
    removed = tuple(entry.run_id for entry in entries if entry.run_id in old and entry.run_id not in kept)
    if not dry_run and removed:
        with archive.locked():
            archive.note_pruned(set(removed))
            for run_id in removed:
                (archive.runs / f"{run_id}.json").unlink(missing_ok=True)
        archive.contents()
    return Pruning(removed, kept)


def _texts(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        found = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (path for path in found if path.suffix in _TEXTS and path.is_file())


def _named_in(paths: Iterable[Path], run_ids: set[str]) -> dict[str, str]:
    """Which of `run_ids` stand in the files, each with the first that names it."""
    if not run_ids:
        return {}
    longest_first = sorted(map(re.escape, run_ids), key=len, reverse=True)
    pattern = re.compile("(?<![A-Za-z0-9])(?:" + "|".join(longest_first) + ")(?![A-Za-z0-9])")
    named: dict[str, str] = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise FlowbenchError(
                f"{path}: {error.strerror or error}, and what it refers to has to stay: nothing was removed"
            ) from None
        for match in pattern.finditer(text):
            named.setdefault(match[0], str(path))
    return named
