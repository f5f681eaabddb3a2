"""Ranks that a launcher starts: torchrun and mpirun for real, srun as a script that does what srun does on one machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowbench.cell import Case, Cell
from flowbench.cli.measure import run
from flowbench.errors import FlowbenchError
from flowbench.measure import launchers
from flowbench.measure.launchers import LAUNCHERS, PARENT, TOKEN, Launched, launch_command, meet, read_place
from flowbench.measure.plan import Request, plan_run
from flowbench.measure.processes import last_words, marked
from flowbench.measure.rank_group import GroupResult
from flowbench.measure.rank_process import chunks
from flowbench.measure.ranks import run_group
from flowbench.measure.wire import Job

pytestmark = pytest.mark.usefixtures("toys")
MARK = f"test-of-launchers-{os.getpid()}"  # not that of another run of these tests
MPIRUN = ("--allow-run-as-root", "--oversubscribe")


def group(engine: str, launcher: str, *options: str, world_size: int = 2) -> GroupResult:
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", world_size, True, True, True, 1)
    job = Job(Cell.of(case, engine), 0, 3, 1, 0, 1e-4, 0.9, launcher=launcher, launcher_options=options)
    result = run_group(job, MARK)
    assert not marked(MARK)
    return result


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A srun on the path: the script beside this file."""
    script = tmp_path / "srun"
    script.write_text(f"#!{sys.executable}\n" + (Path(__file__).parent / "fake_srun.py").read_text())
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun is installed here")


def check(result: GroupResult) -> None:
    assert result.error is None
    assert [rank.rank for rank in result.ranks] == [0, 1]
    assert len({rank.losses for rank in result.ranks}) == 2
    assert result.left_behind == ()


def test_ranks_by_torchrun() -> None:
    pytest.importorskip("torch")
    check(group("toy", "torchrun"))


@needs_mpirun
def test_ranks_by_mpirun() -> None:
    check(group("flow-eager", "mpirun", *MPIRUN))


@pytest.mark.usefixtures("srun")
def test_ranks_by_a_script_that_stands_for_srun() -> None:
    result = group("flow-eager", "srun", "--partition=main")
    check(result)
    assert result.disagreement is None


@pytest.mark.usefixtures("srun")
def test_a_launched_rank_that_dies_fails_the_group_under_its_name() -> None:
    result = group("toy-second-dies", "srun")
    assert (result.error or "").startswith(
        "rank 1: its connection ended in phase steps, after step 1, without a result"
    )


@pytest.mark.usefixtures("srun")
def test_a_launched_rank_whose_connection_is_reset_fails_the_group_under_its_name() -> None:
    result = group("toy-second-reset", "srun")
    assert (result.error or "").startswith("rank 1: its connection ended in phase ")  # unread, its last words are lost


def test_what_is_read_from_a_reset_connection_is_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        assert list(chunks(ours.fileno())) == [b""]


@pytest.mark.usefixtures("srun")
def test_a_launcher_may_print_more_than_a_pipe_holds_before_its_ranks_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "CALL_S", 60.0)
    check(group("flow-eager", "srun", "--partition=chatty"))


@pytest.mark.usefixtures("srun")
def test_a_launched_rank_that_raises_is_heard() -> None:
    said = group("toy-second-raises", "srun").error
    assert said is not None
    assert said.startswith("rank 1: ValueError: rank 1 of 2 will not (in phase build, raised at odd_engines.py:")


@pytest.mark.usefixtures("srun")
def test_a_launcher_that_refuses_is_quoted() -> None:
    assert group("toy", "srun", "--partition=none").error == (
        "the launcher ended with status 1 before rank 0 called; its last words: srun: error: invalid partition specified: none"
    )


def test_ranks_that_are_started_here_call_within_the_time_that_any_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(launchers, "launch_command", lambda *_: asleep)
    case = Case("linear", (2, 3, 4, 4), "float32", "eager", 2, True, True, True, 1)
    job = Job(Cell.of(case, "toy"), 0, 3, 1, 0, 1e-4, 0.9, launcher="torchrun")
    result = run_group(job, MARK, silence_s=0.25)
    assert result.error == "rank 0 has not called within 0.25 s of the launcher's start"
    assert not marked(MARK)


def test_the_command_line_knows_every_launcher() -> None:
    (option,) = [parameter for parameter in run.params if parameter.name == "launcher"]
    assert option.type.choices == LAUNCHERS


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_is_not_there_is_named_by_the_plan(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else found(name))
    asked = Request(preset="smoke", engines=("toy",), reference="none", models=("linear",), launcher=launcher)
    with pytest.raises(FlowbenchError, match=f"launcher {launcher} is not installed here.*leave --launcher out"):
        plan_run(replace(asked, world_sizes=(2,)), ("test",))
    with pytest.raises(
        FlowbenchError, match=f"--launcher {launcher} starts ranks that train together, and no cell here"
    ):
        plan_run(replace(asked, world_sizes=(1,)), ("test",))


def test_an_option_of_no_launcher_is_refused_by_the_plan() -> None:
    asked = Request(preset="smoke", engines=("toy",), reference="none", models=("linear",), world_sizes=(2,))
    assert plan_run(asked, ("test",)).protocol.launcher_options == ()
    with pytest.raises(FlowbenchError, match="--launcher-option --host=a,b is for --launcher, which is not given"):
        plan_run(replace(asked, launcher_options=("--host=a,b",)), ("test",))


@pytest.mark.usefixtures("srun")
def test_a_caller_without_the_token_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched("srun", ("--partition=none",), 1, {**os.environ})
    try:
        port = launched._server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'{"token": "guess", "rank": 0, "world_size": 1, "local_rank": 0, "port": 1}\n')
            assert isinstance(launched.calls(lambda: None), str)
    finally:
        launched.end()
        os.close(launched.output)


def hello(launched: Launched) -> bytes:
    """What the rank says that `waiting` waits for."""
    place = {"rank": 0, "world_size": 1, "local_rank": 0, "port": 1}
    return json.dumps(place | {"token": launched._token}).encode() + b"\n"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Launched, int]]:
    """A launcher that starts nothing, for one rank, and the port at which it waits for that."""
    asleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr(launchers, "launch_command", lambda *_: asleep)
    launched = Launched("torchrun", (), 1, {**os.environ})
    yield launched, launched._server.getsockname()[1]
    launched.end()
    os.close(launched.output)


def is_hung_up(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


def test_callers_that_say_nothing_or_little_hold_up_nobody(waiting: tuple[Launched, int]) -> None:
    launched, port = waiting
    with contextlib.ExitStack() as strangers:
        callers = [strangers.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        rank: list[socket.socket] = []
        looks = 0

        def watch() -> None:
            """One caller is silent, one drips, one says half; then the rank comes, in two pieces."""
            nonlocal looks
            looks += 1
            callers[1].send(b"x")
            callers[2].send(b"{" if looks == 1 else b" ")
            if looks == 5:
                rank.append(strangers.enter_context(socket.create_connection(("127.0.0.1", port))))
                rank[0].send(b" ")
            if looks == 8:
                rank[0].sendall(hello(launched))

        calls = launched.calls(watch, wait_s=30)
        assert not isinstance(calls, str), calls
        assert [(call.rank, call.address, call.port) for call in calls] == [(0, "127.0.0.1", 1)]
        assert looks < 100
        calls[0].connection.sendall(b"job")
        assert rank[0].recv(3) == b"job"
        calls[0].connection.close()
        assert callers[0].recv(1) == b""  # the others were hung up on


def test_a_caller_may_take_its_time_and_no_longer(
    waiting: tuple[Launched, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, port = waiting
    monkeypatch.setattr(launchers, "_HELLO_S", 0.3)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        hung_up: list[bool] = []
        told = launched.calls(lambda: hung_up.append(is_hung_up(silent)), wait_s=1.5)
        assert told == "rank 0 has not called within 1.5 s of the launcher's start"
    assert not hung_up[0]
    assert hung_up[-1]


def test_of_too_many_callers_the_first_make_room(
    waiting: tuple[Launched, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, port = waiting
    monkeypatch.setattr(launchers, "_MOST_CALLERS", 2)
    with contextlib.ExitStack() as connected:
        *callers, rank = [connected.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(5)]
        looks, open_ones = iter(range(1000)), []

        def watch() -> None:
            if next(looks) == 10:  # all have been let in
                open_ones.extend(caller for caller in callers if not is_hung_up(caller))
                rank.sendall(hello(launched))

        calls = launched.calls(watch, wait_s=30)
        assert not isinstance(calls, str), calls
        calls[0].connection.close()
        assert open_ones == callers[-1:]


@pytest.mark.parametrize(
    "said",
    [
        b"[" * 4000 + b"\n",
        b"5\n",
        b"\xff\n",
        b"x" * 5000,
        b"{TOKEN, 'rank': 1e999}\n",
        b"{TOKEN, 'rank': 0, 'world_size': Infinity}\n",
        b"{TOKEN, 'rank': 1, 'world_size': 1, 'local_rank': 0, 'port': 1}\n",
        b"{TOKEN, 'rank': 0, 'world_size': 1}\n",
        "{'token': 'ä', 'rank': 0}\n".encode(),
    ],
)
def test_whatever_a_stranger_says_it_is_hung_up_on(waiting: tuple[Launched, int], said: bytes) -> None:
    launched, port = waiting
    said = said.replace(b"TOKEN", f"'token': '{launched._token}'".encode()).replace(b"'", b'"')
    with (
        socket.create_connection(("127.0.0.1", port)) as stranger,
        socket.create_connection(("127.0.0.1", port)) as rank,
    ):
        stranger.sendall(said)
        looks = iter(range(1000))
        calls = launched.calls(lambda: rank.sendall(hello(launched)) if next(looks) == 3 else None, wait_s=30)
        assert not isinstance(calls, str), calls
        assert [call.rank for call in calls] == [0]
        calls[0].connection.close()
        with contextlib.suppress(ConnectionResetError):  # hung up on with words unread
            assert stranger.recv(1) == b""


def test_the_token_is_not_on_the_command_line() -> None:
    command = " ".join(launch_command("torchrun", (), 2, [PARENT, TOKEN]))
    assert "FLOWBENCH" not in command


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, (1, 2, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_LOCAL_RANK": "1"}, (1, 2, 1)),
    ],
)
def test_every_launchers_words_are_understood(variables: dict[str, str], place: tuple[int, int, int]) -> None:
    assert read_place(variables) == place
    environment = {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    meet("10.0.0.1:29500", environment)
    assert environment == {
        "RANK": str(place[0]),
        "WORLD_SIZE": str(place[1]),
        "LOCAL_RANK": str(place[2]),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_a_process_that_no_launcher_started_is_told_so() -> None:
    with pytest.raises(RuntimeError, match="does not say which rank this is"):
        read_place({})


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", ""),
        ("\n---\n\n", ""),
        ("Traceback:\n  a line\nValueError: no\n", "; its last words: ValueError: no"),
        ("starting\n" + "-" * 60 + "\nIt was refused.\n\nGive --allow\nto allow it.\n" + "-" * 60 + "\n", "; its last words: Give --allow to allow it."),
        ("x" * 900, "; its last words: " + "x" * 500),
    ],
)  # fmt: skip
def test_the_last_words_are_a_line_or_what_a_frame_ends_with(printed: str, words: str) -> None:
    assert last_words(printed.encode()) == words
