"""A store kept on a git branch of its own: pushed and pulled by git's plumbing, so that no checkout and no index is touched.

The branch begins with a commit without a parent, and only ever grows: a push that comes second fetches, adds its files to
what is there now, and tries again.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowbench.archive.folder import FILE_NAME, Archive, Stranger, read_imported
from flowbench.errors import FlowbenchError
from flowbench.git import advice, git_environment
from flowbench.record.document import parse_document

BRANCH = "flowbench-runs"
_ATTEMPTS = 20
_TIMEOUT_S = 600
_PRUNED = "pruned.txt"
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "flowbench"), ("EMAIL", "flowbench@localhost"))
}

_OTHER_REMOTE = "; give another remote with --remote, or another clone with --repository"
_WAYS_OUT = {
    "rev-parse": "; give a clone with --repository",
    "ls-remote": _OTHER_REMOTE,
    "fetch": _OTHER_REMOTE,
}


@dataclass(frozen=True)
class Transfer:
    """What a push or pull moved: names of files, how often it had to begin again, and what it left alone."""

    files: tuple[str, ...]
    retries: int
    strangers: tuple[Stranger, ...]


def push(
    archive: Archive, repository: Path, remote: str, branch: str, pause: Callable[[float], None] = time.sleep
) -> Transfer:
    """Add what the store holds to the branch of `remote`; raises FlowbenchError where that cannot be.

    Files of runs that were pruned here leave the branch, and do not come back from another store.
    """
    git = _Git(repository)
    _refuse_no_names(git, remote, branch)
    contents = archive.contents()
    ours = {f"runs/{entry.run_id}.json": archive.runs / f"{entry.run_id}.json" for entry in contents.entries}
    strangers = {stranger.path for stranger in contents.strangers}
    ours |= {f"imported/{path.name}": path for path in archive.imports.glob("*.json") if path not in strangers}
    for attempt in range(_ATTEMPTS):
        tip = git.fetch(remote, branch)
        _refuse_other_branch(git, tip, remote, branch)
        theirs = git.files(tip) if tip else {}
        pruned = archive.pruned() | git.pruned(tip)
        added = {name: path for name, path in ours.items() if name not in theirs and _run_id(name) not in pruned}
        gone = [name for name in theirs if _run_id(name) in pruned]
        _refuse_conflicts(git, ours, theirs)
        if not added and not gone and pruned == git.pruned(tip):
            return Transfer((), attempt, contents.strangers)
        commit = git.commit(tip, added, gone, pruned)
        problem = git.push(remote, branch, commit)
        if problem is None:
            git.run("update-ref", git.tracking(branch), commit)
            return Transfer(tuple(sorted(added)), attempt, contents.strangers)
        if attempt >= 3 and git.tip(remote, branch) == tip:  # nobody was quicker: it is refused for another reason
            raise FlowbenchError(f"git push {remote} {branch} was refused: {problem}{_OTHER_REMOTE}")
        pause(random.uniform(0.05, 0.2 * (attempt + 1)))
    raise FlowbenchError(
        f"git push {remote} {branch}: others were quicker {_ATTEMPTS} times; nothing is lost, push again"
    )


def pull(archive: Archive, repository: Path, remote: str, branch: str) -> Transfer:
    """Take from the branch of `remote` what the store lacks; what is no document there is named and left out."""
    git = _Git(repository)
    _refuse_no_names(git, remote, branch)
    tip = git.fetch(remote, branch)
    if tip is None:
        raise FlowbenchError(f"{remote} has no branch {branch!r}; flowbench store push makes it")
    _refuse_other_branch(git, tip, remote, branch)
    taken, strangers = [], []
    pruned = archive.pruned() | git.pruned(tip)
    for name, blob in git.files(tip).items():
        path = archive.folder / name
        if not FILE_NAME.fullmatch(path.name):
            strangers.append(Stranger(Path(f"{branch}:{name}"), "no document: expected a file RUN_ID.json"))
            continue
        if path.exists() or _run_id(name) in pruned:
            continue
        source = f"{branch}:{name}"
        try:
            content = git.blob(blob)
            if name.startswith("runs/"):
                document = parse_document(content, source)
                if document.run_id != _run_id(name):
                    raise FlowbenchError(
                        f"{source}: holds run {document.run_id[:80]!r}, expected the run its name says"
                    )
            elif name.startswith("imported/"):
                read_imported(content, source)
            else:
                continue
        except FlowbenchError as error:
            strangers.append(Stranger(Path(source), str(error).removeprefix(f"{source}: ")))
            continue
        # The bytes as they are: what an older version wrote stays what it was.
        archive.add_text(path, content.decode("utf-8"))
        taken.append(name)
    if pruned:
        archive.note_pruned(pruned)
    return Transfer(tuple(taken), 0, tuple(strangers))


def _run_id(name: str) -> str | None:
    return name[len("runs/") : -len(".json")] if name.startswith("runs/") else None


def _refuse_no_names(git: _Git, remote: str, branch: str) -> None:
    """FlowbenchError for a remote that git would take for an option, which may run any program, and for no branch's name."""
    if not remote or remote.startswith("-"):
        raise FlowbenchError(f"{remote!r} is no remote, expected a remote's name or address: give it with --remote")
    if branch.startswith("-") or branch in ("HEAD", "@") or not git.is_ref(f"refs/heads/{branch}"):
        raise FlowbenchError(f"{branch!r} is no name of a branch, expected one such as {BRANCH}: give it with --branch")


def _refuse_other_branch(git: _Git, tip: str | None, remote: str, branch: str) -> None:
    """FlowbenchError for a branch of something else, such as code: nothing of ours belongs on it."""
    if tip is None:
        return
    folders = set(git.run("ls-tree", "-d", "--name-only", tip).split("\n")) - {""}
    strange = sorted(folders - {"runs", "imported"})
    if strange or not (folders or git.pruned(tip)):
        what = f"it has {', '.join(strange[:3])}" if strange else "it has no runs"
        raise FlowbenchError(
            f"branch {branch!r} of {remote} is none of a store: {what}; give a branch of its own with --branch"
            f" (default: {BRANCH})"
        )


def _refuse_conflicts(git: _Git, ours: dict[str, Path], theirs: dict[str, str]) -> None:
    shared = [name for name in ours if name in theirs]
    for name, blob in zip(shared, git.hashes([ours[name] for name in shared]), strict=True):
        if theirs[name] != blob:
            raise FlowbenchError(
                f"{ours[name]} is on the branch with other content, and a stored document never changes: move one away"
            )


class _Git:
    """Git in one repository, by commands that touch objects and refs alone."""

    def __init__(self, repository: Path) -> None:
        self._directory = repository
        self.run("rev-parse", "--git-dir")

    def run(self, *arguments: str, stdin: str | None = None, index: str | None = None) -> str:
        """What the command prints; raises FlowbenchError with git's last line where it fails."""
        done = self._done(arguments, stdin, index)
        if done.returncode != 0:
            way_out = advice(done.stderr.decode(errors="replace")) or _WAYS_OUT.get(arguments[0], "")
            raise FlowbenchError(f"git {arguments[0]} failed in {self._directory}: {_last_line(done)}{way_out}")
        return done.stdout.decode(errors="replace").strip()

    def is_ref(self, name: str) -> bool:
        """Whether git takes `name` for the whole name of a ref."""
        return self._done(("check-ref-format", name)).returncode == 0

    def tracking(self, branch: str) -> str:
        """Our own ref of what was fetched, so that a next fetch brings the new alone."""
        return f"refs/flowbench/{branch}"

    def tip(self, remote: str, branch: str) -> str | None:
        """The commit the branch stands at in the remote; None where there is no such branch."""
        name = f"refs/heads/{branch}"
        rows = [line.split() for line in self.run("ls-remote", remote, name).splitlines()]
        return next((row[0] for row in rows if row[1:] == [name]), None)  # it lists what ends with the name, too

    def fetch(self, remote: str, branch: str) -> str | None:
        """As `tip`, with its objects brought here."""
        tip = self.tip(remote, branch)
        if tip is not None:
            self.run("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", remote, f"refs/heads/{branch}")
            self._done(("update-ref", self.tracking(branch), tip))
        return tip

    def files(self, tip: str) -> dict[str, str]:
        """The blob of each ordinary file of the store in a commit, by name; pruned.txt is none of them."""
        rows = self.run("ls-tree", "-r", "-z", tip).split("\0")
        parts = [(row.split("\t", 1)[1], *row.split("\t", 1)[0].split()) for row in rows if "\t" in row]
        return {
            name: blob
            for name, mode, _, blob in parts
            if mode == "100644" and Path(name).suffix == ".json" and name.count("/") == 1 and "/." not in name
        }

    def pruned(self, tip: str | None) -> set[str]:
        """The run ids that the branch says were pruned."""
        done = self._done(("cat-file", "blob", f"{tip}:{_PRUNED}")) if tip else None
        return set(done.stdout.decode(errors="replace").split()) if done and done.returncode == 0 else set()

    def blob(self, name: str) -> bytes:
        """The content of a blob."""
        done = self._done(("cat-file", "blob", name))
        if done.returncode != 0:
            raise FlowbenchError(f"git cat-file failed in {self._directory}: {_last_line(done)}")
        return done.stdout

    def hashes(self, paths: list[Path], write: bool = False) -> list[str]:
        """The blobs of files, made where `write` is set."""
        if not paths:
            return []
        names = "".join(f"{path.resolve()}\n" for path in paths)
        option = ["-w"] if write else []
        return self.run("hash-object", *option, "--no-filters", "--stdin-paths", stdin=names).split()

    def commit(self, tip: str | None, added: dict[str, Path], gone: list[str], pruned: set[str]) -> str:
        """A commit on `tip` with files added and removed; without a parent where there is no tip."""
        with tempfile.TemporaryDirectory() as folder:
            index = f"{folder}/index"
            if tip:
                self.run("read-tree", tip, index=index)
            blobs = self.hashes(list(added.values()), write=True)
            rows = [f"100644 {blob}\t{name}" for name, blob in zip(added, blobs, strict=True)]
            rows += [f"0 {'0' * 40}\t{name}" for name in gone]
            if pruned:
                listing = self.run(
                    "hash-object", "-w", "--stdin", stdin="".join(f"{run_id}\n" for run_id in sorted(pruned))
                )
                rows.append(f"100644 {listing}\t{_PRUNED}")
            self.run("update-index", "--add", "--index-info", stdin="".join(f"{row}\n" for row in rows), index=index)
            tree = self.run("write-tree", index=index)
        message = f"flowbench: {len(added)} added, {len(gone)} pruned"
        parent = ["-p", tip] if tip else []
        return self.run("commit-tree", tree, *parent, "-m", message)

    def push(self, remote: str, branch: str, commit: str) -> str | None:
        """None where the branch now stands at `commit`, else what git says."""
        done = self._done(("push", "--porcelain", "--no-verify", remote, f"{commit}:refs/heads/{branch}"))
        return None if done.returncode == 0 else _last_line(done)

    def _done(
        self, arguments: tuple[str, ...], stdin: str | None = None, index: str | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        environment = {**git_environment(), **_IDENTITY, "GIT_TERMINAL_PROMPT": "0"}
        if index is not None:
            environment["GIT_INDEX_FILE"] = index
        try:
            return subprocess.run(
                ["git", "-C", str(self._directory), *arguments],
                input=(stdin or "").encode(), capture_output=True, env=environment, timeout=_TIMEOUT_S,
            )  # fmt: skip
        except FileNotFoundError:
            raise FlowbenchError("git is not installed; the branch of a store is kept by it") from None
        except subprocess.TimeoutExpired:
            raise FlowbenchError(f"git {arguments[0]} did not end within {_TIMEOUT_S} s") from None


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    said = (done.stderr + b"\n" + done.stdout).decode(errors="replace").splitlines()
    lines = [line.strip() for line in said if line.strip() and not line.startswith(("hint:", "To ", "Done"))]
    return lines[0][:300] if lines else f"status {done.returncode}"
