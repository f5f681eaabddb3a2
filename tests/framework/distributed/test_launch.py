"""The launch module with real processes: what it passes on, what it says last, and that nothing is left behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from framework.distributed import rank_processes
from framework.distributed.endings import answers_at
from tests.framework.distributed.ranks import PRELUDE, environment, free_port

# By this the processes of a test are found again, whoever their parent is by then.
MARK = "FLOW_LAUNCH_TEST"
INIT = "dist.init_process_group(timeout=30)\nrank, size = dist.get_rank(), dist.get_world_size()\n"


class Launch:
    """One call of the launch module, on a script in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        code: str,
        *options: str,
        script_arguments: tuple[str, ...] = (),
        run: tuple[str, ...] = ("-m", "framework.distributed.launch"),
    ) -> None:
        script = folder / "script.py"
        script.write_text(PRELUDE + dedent(code))
        self.mark = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, *run, *options, str(script), *script_arguments],
            env=environment(**{MARK: self.mark}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        """Its exit code, and what it wrote to standard output and to standard error."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def wait_for(self, path: Path) -> None:
        """Until a rank has made a file."""
        until = time.monotonic() + 60
        while not path.exists():
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < until
            time.sleep(0.01)

    def left(self) -> list[int]:
        """The processes that still run of those it started, and itself; waits a little for those that just end."""
        until = time.monotonic() + 10
        while (found := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.02)
        return found


def holding_s(patience: float) -> tuple[str, ...]:
    """What runs a launch that holds tracebacks back for so long, however busy the machine is."""
    imports = "import sys; from framework.distributed import launch, rank_processes"
    return "-c", f"{imports}; rank_processes._HOLD_S = {patience}; sys.exit(launch.main())"


def marked(mark: str) -> list[int]:
    """The living processes that carry a mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not is_zombie and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended while we looked
    return found


def test_ranks_get_their_place_and_arguments(tmp_path: Path) -> None:
    code = """
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
        print(*[os.environ[name] for name in names], sys.argv[1:])
        print("warning", file=sys.stderr)
    """
    launch = Launch(tmp_path, code, "--nproc-per-node", "2", script_arguments=("--lr", "0.1", "-m"))
    status, out, err = launch.finish()
    assert status == 0
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {rank} {rank} 2 2 127.0.0.1 ['--lr', '0.1', '-m']" for rank in range(2)
    ]
    assert sorted(err.splitlines()) == ["[rank 0] warning", "[rank 1] warning"]


def test_machines_count_on_and_output_can_stay_as_it_is(tmp_path: Path) -> None:
    # A line in one piece: without a prefix nobody keeps the ranks' lines apart.
    code = 'import os; os.write(1, f\'{os.environ["RANK"]} {os.environ["WORLD_SIZE"]}\\n\'.encode())'
    (tmp_path / "a_module.py").write_text(code)
    several = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", str(free_port())]
    answer = subprocess.run(
        [
            sys.executable,
            "-m",
            "framework.distributed.launch",
            "--nproc-per-node",
            "2",
            "--no-prefix",
            *several,
            "-m",
            "a_module",
        ],
        env=environment(PYTHONPATH=f"{environment()['PYTHONPATH']}{os.pathsep}{tmp_path}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (answer.returncode, sorted(answer.stdout.split("\n"))) == (0, ["", "2 4", "3 4"]), answer.stderr


FAULTS = {
    # name: (code after init, exit code, what the last lines say)
    "exception": ("if rank == 1: raise ValueError('my message')\ndist.barrier()", 1, "ValueError: my message"),
    "exit code": ("sys.exit(7) if rank == 1 else dist.barrier()", 7, "rank 1 failed with exit code 7"),
    "killed at the start barrier": (
        "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()",
        137,
        "rank 1 was ended by SIGKILL",
    ),
    "killed in forward": (
        """
        model = flow.nn.Linear(4, 4)
        x = flow.ones(2, 4)
        for step in range(3):
            if rank == 1 and step == 1:
                model.forward = lambda x: os.kill(os.getpid(), 9)
            dist.all_reduce(model(x))
        """,
        137,
        "rank 1 was ended by SIGKILL",
    ),
    "killed in backward": (
        """
        x = flow.ones(2, 4, requires_grad=True)
        for step in range(3):
            if rank == 1 and step == 1:
                x.register_hook(lambda grad: os.kill(os.getpid(), 9))
            (x * x).sum().backward()
            dist.all_reduce(x.grad)
        """,
        137,
        "rank 1 was ended by SIGKILL",
    ),
    "killed in a collective": (
        """
        import threading
        if rank == 1:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), 9)).start()
        big = flow.ones(3_000_000)
        while True:
            dist.all_reduce(big, "avg")
        """,
        137,
        "rank 1 was ended by SIGKILL",
    ),
    "out of memory": (
        """
        if rank == 1:
            flow.cpu.set_memory_limit(64 << 20)
        held = flow.zeros(100 << 20, dtype=flow.uint8)
        dist.barrier()
        """,
        1,
        "OutOfMemoryError",
    ),
    "deaf to SIGTERM": (
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        dist.barrier()
        if rank == 1:
            raise ValueError("my message")
        while True:
            time.sleep(60)
        """,
        1,
        "ValueError: my message",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_failure_is_seen_last_and_nothing_is_left(tmp_path: Path, fault: str) -> None:
    code, wanted, words = FAULTS[fault]
    launch = Launch(tmp_path, INIT + dedent(code), "--nproc-per-node", "2", run=holding_s(600))
    status, _, err = launch.finish()
    assert status == wanted, err
    summary = err[err.rindex("launch: rank 1 ") :]
    assert words in summary, err
    assert not any(line.startswith("[rank") for line in summary.splitlines())
    assert "[rank 1] " not in err  # what it says there is said once
    assert launch.left() == []


def test_ranks_have_less_than_ten_seconds_to_end_by_themselves() -> None:
    assert 0 < rank_processes.GRACE_S < 10


LAST_WORDS = {
    # name: (what rank 1 does, what is passed on, what the launcher says last: patterns)
    "a script that does not compile": (
        "os.execv(sys.executable, [sys.executable, '-c', '1 +'])",
        "",
        r"launch: rank 1 failed with exit code 1; .*\. What it wrote last:\n  File .*\nSyntaxError: invalid syntax\n",
    ),
    "a crash": (
        "import faulthandler; faulthandler.enable(); faulthandler._sigsegv()",
        "",
        r"launch: rank 1 was ended by SIGSEGV; .*\. What it wrote last:\nFatal Python error: Segmentation fault\n.*",
    ),
    "no traceback": (
        "sys.exit('no data\\nat /data')",
        r"\[rank 1\] no data\n\[rank 1\] at /data\n",
        r"launch: rank 1 failed with exit code 1; the other ranks were ended\. Its last line: at /data\n",
    ),
    "one of many bytes": (
        "sys.exit('x' * 1000)",
        r"\[rank 1\] x{1000}\n",
        r"launch: rank 1 failed with exit code 1; the other ranks were ended\. Its last line: x{300}…\n",
    ),
    "too much to hold": (
        "raise ValueError('\\n'.join(['x' * 1000] * 100))",
        r"\[rank 1\] Traceback .*(\[rank 1\] x{1000}\n){99}",
        r"launch: rank 1 failed with exit code 1; the other ranks were ended\. Its last line: x{300}…\n",
    ),
    "nothing": ("os._exit(3)", "", r"launch: rank 1 failed with exit code 3; the other ranks were ended\n"),
}


@pytest.mark.parametrize("case", LAST_WORDS)
def test_last_words_come_once(tmp_path: Path, case: str) -> None:
    code, passed_on, said = LAST_WORDS[case]
    script = f"if os.environ['RANK'] == '1':\n    {code}\ntime.sleep(60)"
    status, _, err = Launch(tmp_path, script, "--nproc-per-node", "2", run=holding_s(600)).finish()
    assert status, err
    begin = err.index("launch: ")
    assert re.fullmatch(passed_on, err[:begin], re.DOTALL), err
    assert re.fullmatch(said, err[begin:], re.DOTALL), err


def test_a_traceback_that_does_not_end_its_rank_is_passed_on_in_its_place(tmp_path: Path) -> None:
    code = """
        import traceback
        rank = os.environ["RANK"]
        print("before", file=sys.stderr)
        try:
            raise ValueError(f"of rank {rank}")
        except ValueError:
            traceback.print_exc()
        print("behind", file=sys.stderr)
        if rank == "1":
            time.sleep(2)
            sys.exit(7 if sys.argv[1] == "fail" else 0)
    """
    for how in ("go on", "fail"):
        # With no patience what rank 1 wrote is seen before it ends.
        run = holding_s(0) if how == "fail" else holding_s(600)
        status, _, err = Launch(tmp_path, code, "--nproc-per-node", "2", script_arguments=(how,), run=run).finish()
        for rank in range(2):
            lines = [line for line in err.splitlines() if line.startswith(f"[rank {rank}] ")]
            assert lines[:2] == [f"[rank {rank}] before", f"[rank {rank}] Traceback (most recent call last):"]
            assert lines[-2:] == [f"[rank {rank}] ValueError: of rank {rank}", f"[rank {rank}] behind"]
        said = "launch: rank 1 failed with exit code 7; the other ranks were ended. Its last line: behind\n"
        assert (status, "launch: " in err) == ((0, False) if how == "go on" else (7, True))
        assert how == "go on" or err.endswith(said)


def test_lines_end_alike_however_they_come() -> None:
    text = b"one\n\n two\r\n\r 10%|\r\r 20%|\r\n\rlast"
    wanted = [b"one\n", b"\n", b" two\r\n", b"\r", b" 10%|\r\r", b" 20%|\r\n", b"\r", b"last\n"]
    for size in range(1, len(text)):
        output: Any = rank_processes._Output(None, None, None, is_error=False)  # type: ignore[arg-type]
        lines = [line for at in range(0, len(text), size) for line in output.take(text[at : at + size])]
        assert lines + output.rest() == wanted


def test_a_progress_bar_is_seen_as_it_goes_on(tmp_path: Path) -> None:
    code = """
        for percent in range(0, 30, 10):
            print(f"\\r{percent}%|", end="", file=sys.stderr)
        until = time.monotonic() + 60
        while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
            time.sleep(0.02)
        print("here" if time.monotonic() < until else "too late", file=sys.stderr)
    """
    seen = tmp_path / "seen"
    launch = Launch(tmp_path, code, script_arguments=(str(seen),))
    assert launch.process.stderr is not None
    written = b""
    while written.count(b"\r") < 2:
        written += (more := os.read(launch.process.stderr.fileno(), 1000))
        assert more, launch.finish()
    # The newest waits for what ends it.
    assert written == b"[rank 0] 0%|\r[rank 0] 10%|\r"
    seen.touch()
    assert launch.finish() == (0, "", "[rank 0] 20%|here\n")


def test_what_is_written_over_a_progress_bar_erases_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('\\r90%|#########', end='\\rdone\\nend\\n')")
    here, there = os.openpty()
    with open(here, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "framework.distributed.launch", str(tmp_path / "script.py")]
        subprocess.run(command, env=environment(), stdout=there, stderr=there, check=True)
        written = terminal.read(1000)
        os.close(there)
    assert written == b"[rank 0] 90%|#########\r\x1b[K[rank 0] done\r\n[rank 0] end\r\n"


NEVER_COMES = {
    # name: (which rank ends, code in which it does and the others wait for it)
    "rank 0 before the start": (0, "if os.environ['RANK'] == '0': sys.exit()\ndist.init_process_group(timeout=300)"),
    "rank 1 before the start": (1, "if os.environ['RANK'] == '1': sys.exit()\ndist.init_process_group(timeout=300)"),
    "before values are gathered": (
        1,
        "dist.init_process_group(timeout=300)\nos._exit(0) if dist.get_rank() == 1 else dist.all_gather_object(1)",
    ),
    "before a value is sent": (
        1,
        "dist.init_process_group(timeout=300)\nos._exit(0) if dist.get_rank() == 1 else dist.broadcast_object(1, src=1)",
    ),
}


@pytest.mark.parametrize("case", NEVER_COMES)
def test_who_waits_for_a_rank_that_ended_well_is_told(tmp_path: Path, case: str) -> None:
    gone, code = NEVER_COMES[case]
    launch = Launch(tmp_path, code, "--nproc-per-node", "3")
    status, _, err = launch.finish()  # long before the time of 300 s is over
    assert status == 1, err
    assert re.search(rf"DistributedError: rank {gone}( of 3)? ended without coming", err[err.rindex("launch: ") :]), err
    assert launch.left() == []


def test_those_of_another_machine_are_told_too(tmp_path: Path) -> None:
    # Two launches on this machine stand for two machines: each knows its own ranks alone.
    code = "if os.environ['RANK'] == '3': sys.exit()\ndist.init_process_group(timeout=300)"
    place = ["--nnodes", "2", "--master-addr", "localhost", "--master-port", str(free_port())]
    launches = []
    for machine in range(2):
        folder = tmp_path / str(machine)
        folder.mkdir()
        launches.append(Launch(folder, code, "--nproc-per-node", "2", *place, "--node-rank", str(machine)))
    for launch in launches:
        status, _, err = launch.finish()
        assert status == 1, err
        assert "DistributedError: rank 3 of 4 ended without coming" in err, err


def test_ranks_may_end_well_at_different_times(tmp_path: Path) -> None:
    code = """
        if sys.argv[1] == "together":
            dist.init_process_group(timeout=60)
            rank = dist.get_rank()
            some = dist.new_group([0, 2])
            if rank != 1:
                time.sleep(1.5 * rank)  # rank 0 waits long enough to ask who has ended
                assert dist.all_gather_object(rank, some) == [0, 2]
            dist.destroy_process_group()
        else:
            time.sleep(0.5 * int(os.environ["RANK"]))
        print("done")
    """
    for how in ("together", "alone"):
        status, out, err = Launch(tmp_path, code, "--nproc-per-node", "3", script_arguments=(how,)).finish()
        assert status == 0, err
        assert out.count("done") == 3


def test_only_its_own_ranks_are_told_who_has_ended(tmp_path: Path) -> None:
    code = """
        from framework.distributed.endings import ended_ranks
        if os.environ["RANK"] == "1":
            sys.exit()
        while ended_ranks() != {1}:
            time.sleep(0.02)
        open("told", "w").close()
        time.sleep(60)
    """
    port = free_port()
    launch = Launch(
        tmp_path, f"os.chdir({str(tmp_path)!r})\n" + dedent(code), "--nproc-per-node", "2", "--master-port", str(port)
    )
    launch.wait_for(tmp_path / "told")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(answers_at("127.0.0.1", port, 0))
        assert stranger.recv(100) == b""
    launch.process.terminate()
    assert launch.finish()[0] == 143


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '1000'])\nsys.exit(3 if os.environ['RANK'] == '1' else 0)"
    launch = Launch(tmp_path, code, "--nproc-per-node", "2")
    assert launch.finish()[0] == 3
    assert launch.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    code = """
        import signal
        def note(number, frame):
            print("rank got", signal.Signals(number).name, flush=True)
            sys.exit(0)
        signal.signal(signal.SIGINT, note)
        signal.signal(signal.SIGTERM, note)
        dist.barrier()
        (open(sys.argv[1], "w").close() if rank == 0 else None)
        time.sleep(1000)
    """
    ready = tmp_path / "ready"
    launch = Launch(tmp_path, INIT + dedent(code), "--nproc-per-node", "2", script_arguments=(str(ready),))
    launch.wait_for(ready)
    launch.process.send_signal(number)
    status, out, err = launch.finish()
    assert status == 128 + number
    assert sorted(out.splitlines()) == [f"[rank {rank}] rank got {number.name}" for rank in range(2)]
    assert err.splitlines()[-1] == f"launch: ended by {number.name}, and the ranks with it"
    assert launch.left() == []


def test_a_second_interrupt_waits_no_longer(tmp_path: Path) -> None:
    code = """
        import signal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        open(sys.argv[1] + os.environ["RANK"], "w").close()
        time.sleep(1000)
    """
    ready = tmp_path / "ready"
    # Ranks that are given ten minutes to end, so that only the second signal can be what ends them.
    patient = "import sys; from framework.distributed import launch, rank_processes as r; r.GRACE_S = 600; sys.exit(launch.main())"
    launch = Launch(tmp_path, code, "--nproc-per-node", "2", script_arguments=(str(ready),), run=("-c", patient))
    for rank in range(2):
        launch.wait_for(Path(f"{ready}{rank}"))
    launch.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130
    assert launch.left() == []


def test_a_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    code = INIT + "dist.barrier()\nopen(sys.argv[1] + str(rank), 'w').close()\ntime.sleep(1000)\n"
    ready = tmp_path / "ready"
    launch = Launch(tmp_path, code, "--nproc-per-node", "2", script_arguments=(str(ready),))
    for rank in range(2):
        launch.wait_for(Path(f"{ready}{rank}"))
    assert len(marked(launch.mark)) == 4  # the launcher, its guard and two ranks
    launch.process.kill()
    launch.finish()
    assert launch.left() == []


def test_a_port_in_use_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        launch = Launch(tmp_path, "", "--nproc-per-node", "2", "--master-port", str(port))
        status, out, err = launch.finish()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"port {port} cannot be had" in err


def test_a_port_of_another_launch_is_said_before_its_ranks_listen(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    ready, port = tmp_path / "ready", str(free_port())
    options = ("--nproc-per-node", "2", "--master-port", port)
    waits = "open(sys.argv[1], 'w').close()\ntime.sleep(1000)"
    first = Launch(folders[0], waits, *options, script_arguments=(str(ready),))
    first.wait_for(ready)
    status, out, err = Launch(folders[1], "", *options).finish()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"port {port} is another launch's on this machine" in err
    first.process.terminate()
    assert first.finish()[0] == 143
    # And it is free again.
    assert Launch(folders[1], "", *options).finish()[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nproc-per-node", "0"], "takes a number from 1 to 4096"),
        (["--nproc-per-node", "4097"], "takes a number from 1 to 4096, or `gpu`; got '4097'"),
        (["--nproc-per-node", "9" * 5000], "takes a number from 1 to 4096"),
        (["--nproc-per-node", "²"], "takes a number from 1 to 4096"),
        (["--nproc-per-node", "x"], "takes a number from 1 to 4096"),
        (["--nnodes", "2", "--node-rank", "2"], "machines count from 0"),
        (["--nnodes", "2"], "need --master-addr and --master-port"),
        (["--master-port", "70000"], "is no port"),
        (["nowhere.py"], "there is no file nowhere.py"),
        (["--nproc-per-nod", "2"], "--nproc-per-nod"),
        (["--nproc_per_node", "x"], "takes a number from 1 to 4096"),
        (
            ["--standalone", "--nnodes", "2"],
            "--standalone is for one machine, --nnodes 2 for several: leave one of them out",
        ),
        (
            ["--rdzv_backend=c10d"],
            "--rdzv_backend is torchrun's, and not here: leave it out: the ranks of one machine find",
        ),
        (["--rdzv-endpoint", "a:1"], "--rdzv-endpoint is torchrun's, and not here: leave it out"),
        (
            ["--max_restarts", "3"],
            "--max_restarts is torchrun's, and not here: leave it out: the first rank that fails",
        ),
        (["-r", "3"], "-r is torchrun's, and not here: send the launcher's own output to a file"),
        (["--no_python"], "--no_python is torchrun's, and not here: leave it out, and give a Python script"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    options: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from framework.distributed.launch import main

    monkeypatch.setattr("framework.distributed.launch.run", lambda plan: pytest.fail("ranks were started"))
    with pytest.raises(SystemExit) as ended:
        main([*options, __file__])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--standalone", "--nproc_per_node=2"], (2, 0, 2)),
        ("--nproc_per_node 2 --nnodes=3 --node_rank 1 --master_addr 10.0.0.1 --master_port 5".split(), (2, 2, 6)),
    ],
)
def test_a_command_of_torchruns_does_the_same(
    options: list[str], wanted: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from framework.distributed.launch import main

    plans: list[rank_processes.Plan] = []
    monkeypatch.setattr("framework.distributed.launch.run", lambda plan: plans.append(plan) or 0)
    # What follows the script is the script's, whatever it is called.
    assert main([*options, __file__, "--nproc_per_node", "9", "--tee"]) == 0
    (plan,) = plans
    assert (plan.local_size, plan.first_rank, plan.world_size) == wanted
    assert plan.command == (sys.executable, __file__, "--nproc_per_node", "9", "--tee")
    if wanted[2] == 6:
        assert (plan.variables["MASTER_ADDR"], plan.variables["MASTER_PORT"]) == ("10.0.0.1", "5")
    main([*options, "--module", "a_module"])
    assert plans[1].command == (sys.executable, "-m", "a_module")


def test_a_script_that_is_not_given_is_the_one_thing_missing(capfd: pytest.CaptureFixture[str]) -> None:
    from framework.distributed.launch import main

    with pytest.raises(SystemExit) as ended:
        main(["--nproc-per-node", "2"])
    assert ended.value.code == 2
    assert capfd.readouterr().err == "launch: the following arguments are required: SCRIPT; --help says more\n"


class Told(list[int]):
    """In the guard's place: holds the ranks that it is told of, and does something as each is started."""

    def __init__(self, then: Callable[[int], object]) -> None:
        self.then = then

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def add(self, group: int) -> None:
        self.append(group)
        self.then(group)


def ends(process: int) -> None:
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("code", "then", "status", "words"),
    [
        ("import time; time.sleep(60)", lambda _: signal.raise_signal(signal.SIGTERM), 143, "ended by SIGTERM"),
        ("raise SystemExit(7)", ends, 7, "rank 0 failed with exit code 7\n"),
    ],
)
def test_no_more_ranks_are_started_once_it_is_over(
    code: str,
    then: Callable[[int], object],
    status: int,
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told(then)
    monkeypatch.setattr(rank_processes, "Guard", lambda: told)
    plan = rank_processes.Plan((sys.executable, "-S", "-c", code), 3, 0, 3, {}, prefix=True)
    assert rank_processes.run(plan) == status
    assert len(told) == 1
    assert words in capfd.readouterr().err


@pytest.mark.parametrize(("limit", "status"), [("-Sn 16", 0), ("-n 40", 2)])
def test_the_limit_of_open_files_is_raised_or_named(tmp_path: Path, limit: str, status: int) -> None:
    (tmp_path / "script.py").write_text("print('here')")
    launch = f"exec {sys.executable} -m framework.distributed.launch --nproc-per-node 4 script.py"
    answer = subprocess.run(
        ["sh", "-c", f"ulimit {limit}; {launch}"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert answer.returncode == status, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ([f"[rank {rank}] here" for rank in range(4)] if status == 0 else [])
    if status:
        assert answer.stderr.startswith(
            "launch: the output of 4 ranks takes 72 open files, the limit here is 40 (ulimit"
        )
        assert answer.stderr.count("\n") == 1


@pytest.mark.parametrize("limit", [5, 7, 9, 20])
def test_without_pipes_few_open_files_do_and_fewer_are_named(tmp_path: Path, limit: int) -> None:
    (tmp_path / "script.py").write_text("import os; os.write(1, b'here\\n')")
    launch = f"exec {sys.executable} -m framework.distributed.launch --no-prefix --nproc-per-node 2 script.py"
    answer = subprocess.run(
        ["sh", "-c", f"ulimit -n {limit}; {launch}"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )  # fmt: skip
    if limit >= 20:
        assert (answer.returncode, answer.stdout) == (0, "here\nhere\n"), answer.stderr
    else:
        assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1)
        assert answer.stderr.startswith(f"launch: too few open files: {limit} are allowed here (ulimit -n)")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (">/dev/full", "launch: cannot write to standard output (No space left on device): the ranks were ended\n"),
        ("| true", "launch: cannot write to standard output (Broken pipe): the ranks were ended\n"),
        (
            ">&-",
            "launch: standard output is closed, and the ranks' output goes there: send it elsewhere, or --no-prefix",
        ),
        ("2>&-", ""),
        ("2>&1 | true", ""),
    ],
)
def test_output_that_nobody_takes_ends_the_ranks(tmp_path: Path, where: str, said: str) -> None:
    (tmp_path / "script.py").write_text("import time\nprint('here')\ntime.sleep(300)")
    launch = f"{sys.executable} -m framework.distributed.launch --nproc-per-node 2 script.py"
    pipe = where.endswith("| true")
    line = f"{{ {launch} {where.removesuffix('| true')}; echo $? >status; }} {'| true' if pipe else ''}"
    answer = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, env=environment(**{MARK: str(tmp_path)}), capture_output=True, text=True, check=False
    )  # fmt: skip
    assert (tmp_path / "status").read_text() == "2\n"
    assert answer.stderr.startswith(said)
    assert answer.stderr.count("\n") == bool(said)
    assert not marked(str(tmp_path))


def test_a_rank_that_the_system_does_not_start_ends_the_others(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen
    started: list[subprocess.Popen[bytes]] = []

    def refuse_the_third(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        if len(started) == 3:  # the guard, and two ranks
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(rank_processes.subprocess, "Popen", refuse_the_third)
    plan = rank_processes.Plan((sys.executable, "-S", "-c", "import time; time.sleep(60)"), 4, 0, 4, {}, prefix=True)
    assert rank_processes.run(plan) == 2
    said = "launch: rank 2 could not be started (Resource temporarily unavailable); the others were ended\n"
    assert capfd.readouterr().err == said
    assert all(process.poll() is not None for process in started)


def test_fifty_launches_leave_nothing(tmp_path: Path) -> None:
    code = (
        INIT
        + "dist.all_reduce(flow.ones(1000))\nprint('port', os.environ['MASTER_PORT'], flush=True)\n"
        + "os.kill(os.getpid(), 9) if sys.argv[1] == '1' and rank else None\n"
    )
    before = set(os.listdir("/dev/shm"))
    ports: set[int] = set()

    def launch(number: int) -> tuple[int, list[int]]:
        folder = tmp_path / str(number)
        folder.mkdir()
        # Every fifth is killed.
        one = Launch(folder, code, "--nproc-per-node", "2", script_arguments=("1" if number % 5 == 0 else "0",))
        status, out, _ = one.finish()
        ports.update(int(line.rpartition("port ")[2]) for line in out.splitlines())
        return status, one.left()

    # Some at a time: they must not take each other's ports either.
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(launch, range(50)))
    assert ended == [(137 if number % 5 == 0 else 0, []) for number in range(50)]
    # Other programs of this machine may come and go; ours would carry its own name.
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "flow" in name}
    assert ports
    for port in ports:
        with socket.socket() as other:
            # Connections that ended a moment ago may linger; who listens would be refused all the same.
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("", port))
