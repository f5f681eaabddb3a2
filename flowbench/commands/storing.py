"""What `flowbench store` does: adds runs, moves them to and from a git branch, prunes, makes the index anew; in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from flowbench.archive import git_branch, pruning
from flowbench.archive.folder import Archive, Stranger
from flowbench.errors import FlowbenchError
from flowbench.record.document import read_document
from flowbench.report.words import counted

# What is said, and what has to be said beside it on standard error.
Said = tuple[str, list[str]]


def add(store: Path, documents: Sequence[Path]) -> Said:
    """Keep run documents; all of them are read before the first is kept."""
    archive = Archive(store)
    read_ones = [read_document(path) for path in documents]
    new = [document.run_id for document in read_ones if archive.add(document)]
    there = len(read_ones) - len(new)
    text = f"{counted(len(new), 'run')} added to {store}" + (f", {there} there already" if there else "")
    return text, _left_alone(archive.contents().strangers)


def push(store: Path, repository: Path, remote: str, branch: str) -> Said:
    """Send to the branch what it lacks."""
    _existing(store)
    sent = git_branch.push(Archive(store), repository, remote, branch)
    again = f" after {counted(sent.retries, 'new beginning')}: others were quicker" if sent.retries else ""
    text = f"{counted(len(sent.files), 'file')} pushed to {branch} of {remote}{again}"
    return text, _left_alone(sent.strangers)


def pull(store: Path, repository: Path, remote: str, branch: str) -> Said:
    """Take from the branch what the store lacks."""
    taken = git_branch.pull(Archive(store), repository, remote, branch)
    text = f"{counted(len(taken.files), 'file')} pulled from {branch} of {remote} into {store}"
    return text, _left_alone(taken.strangers)


def prune(store: Path, days: float, referring: Sequence[Path], dry_run: bool) -> Said:
    """Remove old runs that nothing refers to."""
    _existing(store)
    done = pruning.prune(Archive(store), days, referring, dry_run=dry_run)
    lines = [f"{'would remove' if dry_run else 'removed'} {run_id}" for run_id in done.removed]
    lines += [f"kept {run_id}: {named_in} refers to it" for run_id, named_in in sorted(done.kept.items())]
    lines.append(f"{counted(len(done.removed), 'run')} {'would be ' if dry_run else ''}removed")
    return "\n".join(lines), []


def reindex(store: Path) -> Said:
    """Make the index anew from the documents alone."""
    _existing(store)
    contents = Archive(store).contents(anew=True)
    imported = counted(len(contents.imported), "imported point")
    return f"{counted(len(contents.entries), 'run')} and {imported} in {store}", _left_alone(contents.strangers)


def _existing(store: Path) -> None:
    if not store.is_dir():
        raise FlowbenchError(f"{store}: no such folder; flowbench store add DOCUMENT… or flowbench store pull make one")


def _left_alone(strangers: Iterable[Stranger]) -> list[str]:
    return [f"{stranger.path}: left alone: {stranger.reason}" for stranger in strangers]
