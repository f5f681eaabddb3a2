"""The commands people type: `nox -s bench`, `compare`, `tests` and `lint`, over one environment that they share.

torch is gigabytes, so every session uses `.nox/shared`: made once, and installed into again only when pyproject.toml
changes. `nox --no-venv -s bench` uses an installed Python as it is, nox's own or the PATH's, and installs nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
PROJECT = ROOT / "pyproject.toml"
SHARED = ROOT / ".nox" / "shared"
STAMP = SHARED / "installed.json"
OLDEST_PYTHON = (3, 11)
CUDA_13_DRIVER = 580
CUDA_12_DRIVER = 525
NVIDIA_SMI_S = 60.0
MOST_TEST_PROCESSES = 8  # a gigabyte each, and many tests start processes of their own

nox.options.sessions = ["tests", "lint"]


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure Flow against PyTorch and print the report; what follows `--` goes to `flowbench run`."""
    flowbench(session, "run")


@nox.session(venv_backend="none")
def compare(session: nox.Session) -> None:
    """Measure two git refs, or a ref and the working tree, in one sitting; what follows `--` goes to `flowbench compare`."""
    flowbench(session, "compare")


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the whole test suite, shared by a process per core; what follows `--` goes to pytest instead, in one process."""
    python = environment(session, ["torch", "report", "github", "history", "dev"], for_machine=True)
    # A GPU is for one test at a time.
    if session.posargs or nvidia_driver() is not None or not imports(python, "xdist"):
        session.run(python, "-m", "pytest", "-q", *session.posargs, external=True)
        return
    cores = usable_cores()
    processes = min(cores, MOST_TEST_PROCESSES)
    # `worksteal` leaves neighbours together, which share fixtures. Threads that spin while they wait would take the cores from
    # the other processes' tests.
    threads = {"OMP_NUM_THREADS": str(max(2, cores // processes)), "OMP_WAIT_POLICY": "passive"}
    spread = ["-n", str(processes), "--dist", "worksteal"]
    session.run(python, "-m", "pytest", "-q", *spread, external=True, env=threads)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style, types, the rules between rooms and the workflows; needs no network and no torch."""
    python = environment(session, ["dev"])
    workflows = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(".github/workflows/*.yml"))]
    actions = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(".github/actions/*/action.yml"))]
    tool = Path(python).parent
    for command in (
        [python, "-m", "ruff", "check", "."],
        [python, "-m", "ruff", "format", "--check", "."],
        [python, "-m", "mypy"],
        # Its cache does not notice that a folder became a package.
        [str(tool / "lint-imports"), "--no-cache"],
        [str(tool / "zizmor"), "--offline", "--quiet", "--persona=pedantic", *workflows, *actions],
        [python, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows],
        [python, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-actions", *actions],
    ):
        session.run(*command, external=True)


def flowbench(session: nox.Session, command: str) -> None:
    """Run a command of flowbench with what follows `--`; nox ends with its exit code, where it is not 0."""
    python = environment(session, ["torch", "report"], for_machine=True)
    try:
        # Ctrl-C reaches flowbench too: it ends its ranks and closes the run document, for which nox has to wait.
        session.run(
            python,
            "-m",
            "flowbench",
            command,
            *session.posargs,
            external=True,
            interrupt_timeout=60,
            terminate_timeout=10,
        )
    except nox.command.CommandFailed as failed:
        # nox itself says 1 for whatever failed, which would read as "a regression was found".
        returned = re.fullmatch(r"Returned code (-?\d+)", failed.reason or "")
        if returned is None:
            raise
        code = int(returned[1])
        sys.exit(code if code > 0 else 128 - code)


def imports(python: str, module: str) -> bool:
    """Whether a Python, which with --no-venv may be anyone's, can import a module."""
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment(session: nox.Session, extras: Sequence[str], *, for_machine: bool = False) -> str:
    """The Python to run with, `extras` installed, and with `for_machine` what this machine's devices need."""
    if uses_own_python(sys.argv):
        return installed_python(session)
    wanted = list(extras)
    if for_machine:
        picked, reason = machine_extras(sys.platform, platform.machine(), nvidia_driver())
        session.log(f"extras for this machine: {', '.join(picked) or 'none'} ({reason})")
        wanted += picked
    python = SHARED / "bin" / "python"
    with alone(session):
        create(session, python)
        install(session, python, wanted)
    return str(python)


@contextlib.contextmanager
def alone(session: nox.Session) -> Iterator[None]:
    """Waits while another nox makes the shared environment, then keeps others waiting: two at once would break it."""
    name = SHARED.relative_to(ROOT)
    with contextlib.ExitStack() as opened:
        try:
            SHARED.parent.mkdir(exist_ok=True)
            lock = opened.enter_context(SHARED.with_suffix(".lock").open("a+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                session.log(f"another nox (process {lock.read().strip() or 'unknown'}) makes {name}: waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            print(os.getpid(), file=lock, flush=True)
        except OSError as error:  # a checkout that may only be read, a file system without locks
            session.log(f"{name} cannot be locked ({error.strerror}): let no other nox make it at the same time")
        yield


def uses_own_python(arguments: Sequence[str]) -> bool:
    """Whether the nox command line asks for no virtual environment, which nox does not tell a session."""
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    chosen = [after for flag, after in pairwise(own) if flag in ("-fb", "--force-venv-backend")]
    return "--no-venv" in own or "--force-venv-backend=none" in own or "none" in chosen


def installed_python(session: nox.Session) -> str:
    """The first Python that has what flowbench needs at least: the one nox runs on, or one on the PATH."""
    import tomllib  # not in a Python that is too old, which is to be told so

    needed = [re.split(r"[^\w-]", line)[0] for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]
    missing = f"None in map(importlib.util.find_spec, {needed!r}) or sys.version_info < {OLDEST_PYTHON}"
    candidates = dict.fromkeys(filter(None, [sys.executable, shutil.which("python"), shutil.which("python3")]))
    for python in candidates:
        ask = [python, "-c", f"import importlib.util, sys; sys.exit({missing})"]
        if subprocess.run(ask, check=False).returncode == 0:
            session.log(f"--no-venv: {python} serves as it is, nothing is installed")
            return python
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return session.error(
        f"--no-venv needs a Python {oldest} or newer with {', '.join(needed)}; none of {', '.join(candidates)} is one."
        " Ways out: install them there (python -m pip install .), or leave --no-venv out:"
        f" nox -s {session.name}"
    )


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver, such as `580.65.06`; None where no GPU answers, within a minute."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def machine_extras(system: str, processor: str, driver: str | None) -> tuple[list[str], str]:
    """The extras that serve a machine's devices, and why these."""
    extras: list[str] = []
    reasons: list[str] = []
    if driver is None:
        reasons.append("no NVIDIA GPU answers")
    else:
        major = int(driver.split(".")[0])
        if major >= CUDA_13_DRIVER:
            extras.append("cuda13")
            reasons.append(f"NVIDIA driver {driver} runs CUDA 13")
        elif major >= CUDA_12_DRIVER:
            extras.append("cuda12")
            reasons.append(f"NVIDIA driver {driver} runs CUDA 12; CUDA 13 needs {CUDA_13_DRIVER} or newer")
        else:
            reasons.append(f"NVIDIA driver {driver} is older than {CUDA_12_DRIVER}, which CUDA 12 needs")
    if system == "linux" and processor == "x86_64":
        extras.append("cpu")
        reasons.append("x86-64 Linux has oneDNN")
    else:
        reasons.append(f"oneDNN's wheel is for x86-64 Linux, not {system} on {processor}: NumPy serves")
    return extras, "; ".join(reasons)


def create(session: nox.Session, python: Path) -> None:
    """Makes the shared environment where there is none, or none of this Python's version that starts."""
    version = sys.version_info[:2]
    if version < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        session.error(
            f"nox runs on Python {version[0]}.{version[1]}, but {oldest} or newer is needed:"
            f" python{oldest} -m pip install nox && python{oldest} -m nox -s {session.name}"
        )
    if python.exists():
        ask = [str(python), "-c", "import pip, sys; print(*sys.version_info[:2])"]  # pip comes last into it
        answer = subprocess.run(ask, capture_output=True, text=True, check=False)
        if answer.stdout.split() == [str(number) for number in version]:
            return
        session.log("the shared environment is of another Python, or only half made: it is made anew")
    session.run(sys.executable, "-m", "venv", "--clear", str(SHARED), external=True)


def install(session: nox.Session, python: Path, wanted: Sequence[str]) -> None:
    """Installs this checkout, editable, with the extras wanted and those already there; nothing where they all are."""
    project = hashlib.sha256(PROJECT.read_bytes()).hexdigest()
    stamp = json.loads(STAMP.read_text()) if STAMP.exists() else {"project": None, "extras": []}
    extras = sorted({*wanted, *stamp["extras"]})
    if stamp == {"project": project, "extras": extras}:
        return
    session.log(f"installing {', '.join(extras)} into {SHARED.relative_to(ROOT)}; torch takes minutes and 6 GB of disk")
    STAMP.unlink(missing_ok=True)
    # `compat` puts this folder on the path; the default installs an import hook, which slows every start of Python.
    command = ["-m", "pip", "install", "--config-settings", "editable_mode=compat"]
    command += [] if sys.stdout.isatty() else ["-qq"]  # a log wants pip's errors, a person its progress
    # torch pins its CUDA libraries exactly: asked for together with CuPy's, pip may fall back to an old torch instead.
    first = "torch" in extras and any(extra.startswith("cuda") for extra in extras)
    steps = [["torch"], extras] if first else [extras]
    try:
        for step in steps:
            session.run(str(python), *command, "--editable", f".[{','.join(step)}]", external=True)
    except nox.command.CommandFailed:
        session.error(
            "the installation failed, pip says why above. Ways out: make room (about 7 GB) and run it again; set"
            " PIP_INDEX_URL to a mirror you reach; or, with a Python that has NumPy and torch already, run"
            f" `python -m pip install .` and `nox --no-venv -s {session.name}`."
        )
    whole = STAMP.with_suffix(".new")
    whole.write_text(json.dumps({"project": project, "extras": extras}))
    whole.replace(STAMP)
