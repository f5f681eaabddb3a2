"""noxfile.py: what it picks for a machine, when it installs, and what it leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

noxfile = pytest.importorskip("noxfile", reason="nox is not installed here")


class Session:
    """A nox session's double: remembers commands instead of running them."""

    name = "bench"

    posargs = ("main", "--pairs", "6")

    def __init__(self, fails: bool = False, reason: str | None = None) -> None:
        self.commands: list[tuple[str, ...]] = []
        self.environments: list[object] = []
        self.lines: list[str] = []
        self.fails, self.reason = fails, reason

    def log(self, line: str) -> None:
        self.lines.append(line)

    def run(self, *command: str, **options: object) -> None:
        self.commands.append(command)
        self.environments.append(options.get("env"))
        if self.fails:
            raise noxfile.nox.command.CommandFailed(self.reason)

    def error(self, line: str) -> None:
        raise RuntimeError(line)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a pyproject.toml and an empty shared environment, which noxfile takes for its own."""
    (tmp_path / "pyproject.toml").write_text("[project]\ndependencies = ['numpy>=1.26', 'a_package_nobody_has']\n")
    shared = tmp_path / ".nox" / "shared"
    shared.mkdir(parents=True)
    monkeypatch.setattr(noxfile, "ROOT", tmp_path)
    monkeypatch.setattr(noxfile, "PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(noxfile, "SHARED", shared)
    monkeypatch.setattr(noxfile, "STAMP", shared / "installed.json")
    return tmp_path


@pytest.mark.parametrize(
    ("system", "processor", "driver", "extras", "reason"),
    [
        ("linux", "x86_64", None, ["cpu"], "no NVIDIA GPU"),
        ("linux", "x86_64", "580.65.06", ["cuda13", "cpu"], "runs CUDA 13"),
        ("linux", "x86_64", "595.1", ["cuda13", "cpu"], "runs CUDA 13"),
        ("linux", "x86_64", "579.99", ["cuda12", "cpu"], "CUDA 13 needs 580"),
        ("linux", "aarch64", "525.60.13", ["cuda12"], "NumPy serves"),
        ("linux", "x86_64", "470.82", ["cpu"], "older than 525"),
        ("darwin", "arm64", None, [], "NumPy serves"),
    ],
)
def test_extras_follow_the_machine(
    system: str, processor: str, driver: str | None, extras: list[str], reason: str
) -> None:
    picked, why = noxfile.machine_extras(system, processor, driver)
    assert picked == extras
    assert reason in why


def test_every_extra_that_may_be_picked_exists(repository: Path) -> None:
    known = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cpu", "cuda12", "cuda13", "torch", "report", "github", "dev"} <= set(known)


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        (["nox", "--no-venv", "-s", "bench"], True),
        (["nox", "-fb", "none", "-s", "bench"], True),
        (["nox", "--force-venv-backend=none"], True),
        (["nox", "-s", "bench"], False),
        (["nox", "-s", "bench", "--", "--no-venv"], False),
        (["nox", "-s", "bench", "--", "--model", "none"], False),
    ],
)
def test_no_venv_is_read_from_nox_own_arguments(arguments: list[str], own: bool) -> None:
    assert noxfile.uses_own_python(arguments) is own


def test_no_venv_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nox", "--no-venv", "-s", "bench"])
    session = Session()
    assert noxfile.environment(session, ["torch"], for_machine=True) == sys.executable
    assert session.commands == []


def test_no_venv_without_what_is_needed_names_the_way_out(checkout: Path) -> None:
    with pytest.raises(RuntimeError, match=r"numpy, a_package_nobody_has; none of .* is one. Ways out: .*nox -s bench"):
        noxfile.installed_python(Session())


def test_installs_once_and_again_when_pyproject_changes(checkout: Path) -> None:
    session = Session()
    noxfile.install(session, Path("python"), ["torch", "cpu"])
    noxfile.install(session, Path("python"), ["cpu"])
    assert [command[-1] for command in session.commands] == [".[cpu,torch]"]
    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    noxfile.install(session, Path("python"), ["dev"])
    assert session.commands[-1][-1] == ".[cpu,dev,torch]", "what another session needs stays installed"
    assert len(session.commands) == 2


def test_a_second_nox_waits_while_a_first_makes_the_environment(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a process, killed while it makes it; the second begins to make it only then."""
    making = (
        "import noxfile, sys, types, pathlib, time\n"
        "noxfile.ROOT = pathlib.Path(sys.argv[1]); noxfile.SHARED = noxfile.ROOT / '.nox' / 'shared'\n"
        "with noxfile.alone(types.SimpleNamespace(log=print)):\n"
        "    print('making', flush=True); time.sleep(1000)\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", making, str(checkout)],
        cwd=Path(noxfile.__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout is not None
    second = Session()
    made_while_waiting: list[tuple[str, ...]] = []

    def log(line: str) -> None:
        second.lines.append(line)
        if "waiting" in line:
            made_while_waiting.extend(second.commands)
            first.kill()

    monkeypatch.setattr(second, "log", log)
    monkeypatch.setattr(sys, "argv", ["nox", "-s", "bench"])
    try:
        assert first.stdout.readline() == "making\n"
        noxfile.environment(second, ["torch"])
    finally:
        first.kill()
        first.communicate()
    assert f"another nox (process {first.pid}) makes .nox/shared: waiting for it" in second.lines
    assert made_while_waiting == []
    assert [command[1:3] for command in second.commands] == [("-m", "venv"), ("-m", "pip")]
    third = Session()
    with noxfile.alone(third):
        assert third.lines == [], "the lock ends with the making"


def test_an_environment_that_cannot_be_locked_is_made_all_the_same(checkout: Path) -> None:
    (checkout / ".nox" / "shared.lock").mkdir()
    session = Session()
    with noxfile.alone(session):
        assert session.lines == [
            ".nox/shared cannot be locked (Is a directory): let no other nox make it at the same time"
        ]


def test_torch_comes_before_the_libraries_of_cuda(checkout: Path) -> None:
    session = Session()
    noxfile.install(session, Path("python"), ["torch", "cuda13"])
    assert [command[-1] for command in session.commands] == [".[torch]", ".[cuda13,torch]"]


def test_a_failed_installation_is_not_taken_for_done_and_names_the_way_out(checkout: Path) -> None:
    noxfile.STAMP.write_text(json.dumps({"project": "older", "extras": ["cpu"]}))
    with pytest.raises(RuntimeError, match=r"nox --no-venv -s bench"):
        noxfile.install(Session(fails=True), Path("python"), ["torch"])
    assert not noxfile.STAMP.exists()
    session = Session()
    noxfile.install(session, Path("python"), ["torch"])
    assert len(session.commands) == 1


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, "1", "2"), (2, "2", "2"), (16, "8", "2"), (64, "8", "8")]
)
def test_the_whole_suite_is_shared_by_a_process_per_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: str, threads: str
) -> None:
    monkeypatch.setattr(noxfile, "environment", lambda *_, **__: "python")
    monkeypatch.setattr(noxfile, "imports", lambda python, module: True)
    monkeypatch.setattr(noxfile, "nvidia_driver", lambda: None)
    monkeypatch.setattr(noxfile, "usable_cores", lambda: cores)
    session = Session()
    session.posargs = ()
    noxfile.tests(session)
    assert session.commands == [("python", "-m", "pytest", "-q", "-n", processes, "--dist", "worksteal")]
    assert session.environments == [{"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}]


@pytest.mark.parametrize(
    ("given", "driver", "spreads"),
    [(("tests/test_house.py", "--pdb"), None, True), ((), "580.65", True), ((), None, False)],
)
def test_a_part_all_beside_a_gpu_and_all_without_xdist_run_in_one_process(
    monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], driver: str | None, spreads: bool
) -> None:
    monkeypatch.setattr(noxfile, "environment", lambda *_, **__: "python")
    monkeypatch.setattr(noxfile, "imports", lambda python, module: spreads)
    monkeypatch.setattr(noxfile, "nvidia_driver", lambda: driver)
    session = Session()
    session.posargs = given
    noxfile.tests(session)
    assert session.commands == [("python", "-m", "pytest", "-q", *given)]


def test_a_python_is_asked_what_it_can_import() -> None:
    assert noxfile.imports(sys.executable, "json")
    assert not noxfile.imports(sys.executable, "a_package_nobody_has")


def test_an_environment_of_another_python_is_made_anew(checkout: Path) -> None:
    python = noxfile.SHARED / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 3 9\n")
    python.chmod(0o755)
    session = Session()
    noxfile.create(session, python)
    assert session.commands == [(sys.executable, "-m", "venv", "--clear", str(noxfile.SHARED))]


def test_an_environment_that_was_only_half_made_is_made_anew(checkout: Path) -> None:
    """Killed between its Python and its pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(noxfile.SHARED)], check=True)
    python = noxfile.SHARED / "bin" / "python"
    session = Session()
    noxfile.create(session, python)
    assert session.commands == [(sys.executable, "-m", "venv", "--clear", str(noxfile.SHARED))]


def test_a_driver_that_does_not_answer_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(noxfile, "NVIDIA_SMI_S", 0.1)
    assert noxfile.nvidia_driver() is None


def test_an_old_python_is_told_the_way_out(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile, "OLDEST_PYTHON", (9, 1))
    with pytest.raises(RuntimeError, match=r"python9\.1 -m pip install nox"):
        noxfile.create(Session(), noxfile.SHARED / "bin" / "python")


@pytest.mark.parametrize(
    ("reason", "code"), [("Returned code 75", 75), ("Returned code 1", 1), ("Returned code -9", 137)]
)
def test_flowbenchs_exit_code_is_noxs(reason: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["nox", "--no-venv", "-s", "compare"])
    session = Session(fails=True, reason=reason)
    with pytest.raises(SystemExit) as stop:
        noxfile.flowbench(session, "compare")
    assert stop.value.code == code
    assert session.commands == [(sys.executable, "-m", "flowbench", "compare", "main", "--pairs", "6")]
    with pytest.raises(noxfile.nox.command.CommandFailed, match="not found"):
        noxfile.flowbench(Session(fails=True, reason="Program python3.11 not found"), "compare")


def test_compare_through_nox_itself(repository: Path) -> None:
    command = [sys.executable, "-m", "nox", "--no-venv", "-s", "compare", "--", "no-such-ref"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert any(line.startswith("flowbench: ") for line in (done.stdout + done.stderr).splitlines())
