"""A machine that cannot take a side: real full disks and limits, and git's own words of them; no commit is blamed for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flowbench.git import machine_fault
from flowbench.measure import places, refs
from flowbench.measure.places import PlaceError
from flowbench.measure.refs import SideError, placed_sides

# A process of its own, for limits and for mounts that end with it: what placing two commits, or a search, comes to.
PROGRAM = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
from flowbench.commands.bisecting import OneQuantity
from flowbench.commands.bisection import bisect
from flowbench.errors import FlowbenchError
from flowbench.judge.verdict import Quantity, Verdict
from flowbench.measure.refs import placed_sides

slower = SimpleNamespace(verdict=Verdict.SLOWER, quantity=Quantity("step time"), change=None, reason="so it is")
worse = SimpleNamespace(comparisons=[slower], canary=SimpleNamespace(state="clear"))

def measure(base, head):
    with placed_sides(repository, base, head):
        return worse

repository, what, limit, number = Path(sys.argv[1]), *sys.argv[2:5]
if limit:
    resource.setrlimit(getattr(resource, limit), (int(number), resource.getrlimit(getattr(resource, limit))[1]))
try:
    if what == "search":
        print("found", *bisect(repository, "c0", "c3", OneQuantity(measure)).suspects)
    else:
        measure("c0", "c1")
except FlowbenchError as error:
    print(type(error).__name__, error)
"""


def git(where: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "flowbench" / "sides"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Four commits: a small one, two with a file of 270 kB, and one without it again."""
    where = tmp_path / "repository"
    (where / "framework").mkdir(parents=True)
    git(where, "init", "-q", "-b", "main")
    for number in range(4):
        (where / "framework" / "__init__.py").write_text(f"V = {number}")
        if number == 1:
            (where / "framework" / "data.py").write_text("#" * 270_000)
        elif number == 3:
            (where / "framework" / "data.py").unlink()
        git(where, "add", "-A")
        git(where, "commit", "-qm", f"change {number}")
        git(where, "tag", f"c{number}")
    return where


def run(repository: Path, what: str, limit: str = "", number: int = 0, mounted: str = "", first: str = "") -> str:
    """What PROGRAM prints, after the shell's `first`; with `mounted`, options of a tmpfs, its cache is a disk of its own."""
    command = [sys.executable, "-c", PROGRAM, str(repository), what, limit, str(number)]
    if mounted:
        mount = f"mount -t tmpfs -o {mounted} none {os.environ['XDG_CACHE_HOME']}"
        own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c"]
        try:
            able = subprocess.run([*own, mount], capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no unshare is installed here")
        if able.returncode != 0:
            pytest.skip(f"no disk may be mounted here: {able.stderr.strip()}")
        command = [*own, f'{mount}; {first or ":"}; exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OTHER_CACHE = "free some space or set XDG_CACHE_HOME to another folder"


@pytest.mark.parametrize(
    ("options", "full"),
    [
        ("size=200k", "0.2 of its disk's 0.2 MiB are free, ref 'c1' takes 0.3 MiB"),
        ("nr_inodes=13", "2 of its disk's 13 files are free, ref 'c1' takes 5"),
    ],
)
def test_a_disk_that_is_full_is_said_and_how_full(repository: Path, cache: Path, options: str, full: str) -> None:
    said = run(repository, "sides", mounted=options)
    assert said == f"PlaceError cannot write {cache}: No space left on device ({full}); {OTHER_CACHE}"


def test_a_search_does_not_skip_commits_for_a_full_disk(repository: Path, cache: Path) -> None:
    assert run(repository, "search", mounted="size=200k").startswith(f"PlaceError cannot write {cache}: No space left")
    said = run(repository, "search", mounted="nr_inodes=3")  # not even room for the first side's folder
    assert said.startswith(
        f"PlaceError cannot write {cache}: No space left on device (0 of its disk's 3 files are free)"
    )


def test_a_disk_that_may_not_be_written(repository: Path, cache: Path) -> None:
    said = run(repository, "sides", mounted="ro")
    assert said == f"PlaceError cannot write {cache}: Read-only file system; set XDG_CACHE_HOME to another folder"


def test_a_full_disk_of_the_repository_is_told_apart(repository: Path, cache: Path, tmp_path: Path) -> None:
    disk = tmp_path / "cache"
    clone = f"git clone -q --shared --no-checkout {repository} {disk}/clone"
    fill = f"dd if=/dev/zero of={disk}/fill 2>/dev/null; export XDG_CACHE_HOME={tmp_path}/elsewhere"
    said = run(disk / "clone", "sides", mounted="size=1m", first=f"{clone}; {fill}")
    full = "No space left on device (0.0 of its disk's 1.0 MiB are free)"
    way_out = "free some space or run flowbench in a clone that can be written"
    assert said == f"PlaceError cannot write {disk}/clone/.git: {full}; {way_out}"


@pytest.mark.parametrize("what", ["sides", "search"])
def test_a_limit_of_a_file_s_size(repository: Path, cache: Path, what: str) -> None:
    said = run(repository, what, "RLIMIT_FSIZE", 100_000)
    way_out = "raise ulimit -f, or set XDG_CACHE_HOME to another folder"
    assert said == f"PlaceError cannot write {cache}: File too large; {way_out}"


def test_no_open_file_is_left_for_git(repository: Path, cache: Path) -> None:
    said = run(repository, "sides", "RLIMIT_NOFILE", 7)
    assert said == "FlowbenchError git does not run: Too many open files: raise ulimit -n, or take fewer ranks"


def test_no_open_file_is_left_for_a_side(repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(places.errno.EMFILE, os.strerror(places.errno.EMFILE))

    monkeypatch.setattr(refs.shutil, "copy2", none_left)
    with pytest.raises(PlaceError, match="Too many open files: raise ulimit -n") as error:  # noqa: SIM117
        with placed_sides(repository, "c0", None):
            pass
    assert "XDG_CACHE_HOME" not in str(error.value)


def with_filter(repository: Path, command: str) -> None:
    """What c1 checks out goes through `command`."""
    (repository / ".git" / "info").mkdir(exist_ok=True)
    (repository / ".git" / "info" / "attributes").write_text("data.py filter=odd\n")
    git(repository, "config", "filter.odd.smudge", command)
    git(repository, "config", "filter.odd.required", "true")


def test_a_git_that_is_ended_from_outside_is_no_fault_of_the_commit(repository: Path, cache: Path) -> None:
    with_filter(repository, "kill -9 $PPID")
    said = "ref 'c1' cannot be checked out: git was ended by SIGKILL; the system may be short of memory"
    with pytest.raises(PlaceError, match=said), placed_sides(repository, "c0", "c1"):
        pass


@pytest.mark.parametrize("lost", [False, True])
def test_what_is_the_commit_s_fault_is_its_fault_with_git_s_reason(repository: Path, cache: Path, lost: bool) -> None:
    if lost:
        blob = git(repository, "rev-parse", "c1:framework/data.py")
        (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
        reason = "error: unable to read sha1 file of framework/data.py"
    else:
        with_filter(repository, "false")
        reason = "error: external filter 'false' failed"
    with (
        pytest.raises(SideError, match=f"ref 'c1' cannot be checked out: {reason}"),
        placed_sides(repository, "c0", "c1"),
    ):
        pass


# What git 2.39 says, of a full disk and of one without files left.
UNWRITTEN = "error: unable to write file framework/data.py\nfatal: Could not reset index file to revision 'HEAD'.\n"
UNMADE = "error: unable to create file framework/data.py: No space left on device\nfatal: Could not reset index file.\n"
OTHER_WORDS = "fatal: Could not reset index file to revision 'HEAD'.\n"


@pytest.mark.parametrize(
    ("words", "free_bytes", "said"),
    [
        (UNWRITTEN, 2**17, r"No space left on device \(0.1 of its disk's .*, ref 'c1' takes 0.3 MiB\)"),
        (UNWRITTEN, 2**40, "error: unable to write file framework/data.py: its disk may be full, or a quota used up"),
        (UNMADE, 2**40, "No space left on device"),
        (UNMADE.replace("No space left on device", "Disk quota exceeded"), 2**40, "Disk quota exceeded"),
        (OTHER_WORDS, 2**17, "No space left on device"),
    ],
    ids=["short", "not short", "said", "quota", "unknown words"],
)
def test_what_git_says_and_what_the_disk_says(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, words: str, free_bytes: int, said: str
) -> None:
    really = refs._run

    def no_room(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        if "add" in arguments and str(arguments[-2]).endswith("head"):
            return subprocess.CompletedProcess(arguments, 128, "", words)
        return really(directory, *arguments)

    monkeypatch.setattr(refs, "_run", no_room)
    monkeypatch.setattr(places, "_free_bytes", lambda folder: free_bytes)
    expected = rf"^cannot write {cache}: {said}.*; {OTHER_CACHE}$"
    with pytest.raises(PlaceError, match=expected), placed_sides(repository, "c0", "c1"):
        pass
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "status", "name"),
    [
        ("fatal: could not open '/c/w/.git' for writing: No space left on device", 128, "ENOSPC"),
        ("fatal: sha1 file '/r/.git/worktrees/w/index.lock' write error. Out of diskspace", 128, None),
        ("fatal: update_ref failed for ref 'HEAD': couldn't write '/r/.git/worktrees/w/HEAD.lock'", 128, None),
        ("fatal: Out of memory, malloc failed (tried to allocate 270001 bytes)", 128, "ENOMEM"),
        ("error: cannot fork() for git-remote-https: Resource temporarily unavailable", 128, "EAGAIN"),
        ("Error: cannot write data to tempfile: write /x: no space left on device", 2, "ENOSPC"),  # git-lfs
        ("", -9, "EINTR"),
    ],
)
def test_faults_of_the_machine_by_git_s_words(words: str, status: int, name: str | None) -> None:
    fault = machine_fault(words, status)
    assert fault is not None
    assert fault.errno == (getattr(places.errno, name) if name else None)


@pytest.mark.parametrize(
    "words", ["error: invalid path 'a:b'", "error: unable to create file x: File name too long", ""]
)
def test_what_is_no_fault_of_the_machine(words: str) -> None:
    assert machine_fault(words, 128) is None
