"""The command line: what it accepts, and one line with exit code 2 for what it does not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jsonschema
import pytest

from flowbench.cell import Case, Cell
from flowbench.cli.entry_point import main
from flowbench.cli.report import FORMATS
from flowbench.engines.flow import FlowEager
from flowbench.presets import PRESETS

SMALL = ("--model", "linear", "--input-shape", "3x4x4", "--reference", "none", "--engine", "toy")


def test_a_run_prints_and_writes_its_reports(flowbench: Callable, tmp_path: Path) -> None:
    status, out, err = flowbench(
        "run", *SMALL, "toy-talks", "--batch-size", "4", "2", "--steps", "3", "--pairs", "2", "--threads", "1",
        "--reference", "toy",
    )  # fmt: skip
    assert status == 0, err
    written = sorted(path.suffix for path in (tmp_path / "reports/out").iterdir())
    assert written == [".html", ".json", ".md", ".txt"]
    assert "Toy" in out
    assert out.splitlines()[-1].startswith("written: reports/out/")
    lines = err.splitlines()
    assert lines[0].startswith("run document: reports/out/")
    assert lines[1].startswith("[1/8] linear [4, 3, 4, 4] toy-talks, pair 1 of 2, about ")
    assert "ms per step (median of 3)" in lines[2]
    assert len(lines) == 1 + 2 * 8
    assert "\x1b" not in out + err
    (document,) = (tmp_path / "reports/out").glob("*.json")
    (text,) = (tmp_path / "reports/out").glob("*.txt")
    for form in FORMATS:
        status, out, err = flowbench("report", str(document), "--format", form, "-o", "report")
        assert (status, out, err) == (0, "", "")
        assert (tmp_path / "report").stat().st_size > 100
        status, out, err = flowbench("report", str(document), "--format", form)
        if form == "parquet":
            assert (status, out, err) == (
                2,
                "",
                "flowbench: parquet is no text for a terminal: name a file for it with -o FILE\n",
            )
        else:
            assert (status, err) == (0, "")
            assert out.encode() == (tmp_path / "report").read_bytes()
    status, out, err = flowbench("report", str(document), "--format", "speed-stats")
    assert out == text.read_text()
    status, out, err = flowbench("parse", str(text))
    assert (status, err) == (0, "")
    assert len([entry for entry in json.loads(out)["entries"] if "4, 4" in str(entry) or entry.get("input_shape")]) >= 4


def test_the_classic_setting_prints_the_classic_table(flowbench: Callable) -> None:
    small = (
        "--model",
        "linear",
        "--input-shape",
        "3x4x4",
        "--engine",
        "toy-talks",
        "--reference",
        "toy",
        "--device",
        "cpu",
    )
    status, out, err = flowbench(
        "run", "--preset", "seed", *small, "--batch-size", "2", "1", "--steps", "2", "--pairs", "1", "--threads", "1"
    )
    assert status == 0, err
    assert "Mean ms of a step, subject / Toy → relative speed" in out
    (row,) = [line for line in out.splitlines() if line.startswith("| Odd, linear, 3x4x4, one process")]
    assert row.count("→") == 2


def test_a_dry_run_lists_cells_and_time_and_writes_nothing(flowbench: Callable, tmp_path: Path) -> None:
    status, out, err = flowbench("run", *SMALL, "--batch-size", "4", "2", "1", "--pairs", "5", "--dry-run")
    assert (status, err) == (0, "")
    assert [line.partition(": ")[0].strip() for line in out.splitlines()[2:5]] == [
        f"linear [{size}, 3, 4, 4] toy" for size in (4, 2, 1)
    ]
    assert "3 cells, about " in out.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.usefixtures("gpu_box")
def test_every_preset_has_a_dry_run(preset: str, flowbench: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlowEager, "unsupported", lambda self, case: None)
    status, out, _ = flowbench("run", "--preset", preset, "--engine", "flow-eager", "--reference", "none", "--dry-run")
    assert status == 0
    assert out.startswith(f"preset {preset}: ")


@pytest.mark.parametrize(
    "given",
    [("--batch-size", "4", "2"), ("--batch-size", "4", "--batch-size", "2"), ("--batch-size=4", "--batch-size", "2")],
)
def test_an_option_takes_several_values_or_is_repeated(given: tuple[str, ...], flowbench: Callable) -> None:
    status, out, _ = flowbench("run", *SMALL, *given, "--dry-run")
    assert status == 0
    assert "2 cells" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--preset", "smok"), "unknown preset 'smok': did you mean 'smoke'?"),
        (("--engine", "flow-eger"), "unknown engine 'flow-eger': did you mean 'flow-eager'?"),
        (("--engine", "xyzzy"), "unknown engine 'xyzzy': known are flow-eager, "),
        (("--engine", "toy-no-module"), "engine 'toy-no-module' does not load from 'no_such_module:Engine': ModuleNotFoundError"),
        (("--reference", "torch-egar"), "did you mean 'torch-eager'?"),
        (("--model", "resnet51"), "unknown model 'resnet51': did you mean 'resnet50'?"),
        (("--batch-size", "0"), "0 is not in the range"),
        (("--batch-size", "-3"), "-3 is not in the range"),
        (("--batch-size", "four"), "'four' is not a valid integer"),
        (("--batch-size", "2.5"), "'2.5' is not a valid integer"),
        (("--batch-size", "99999999999999999999"), "is not in the range"),
        (("--batch-size", "999999", "--engine", "flow-eager", "--reference", "none"), "alone need 1,122 GiB, this machine has"),
        (("--input-shape", "3x224"), "'3x224' is not three whole numbers from 1, expected CxHxW, for example 3x224x224"),
        (("--input-shape", "3x0x4"), "expected CxHxW"),
        (("--input-shape", "3x32x32", "--batch-size", "1"), "would see 1 value per channel, expected at least 2"),
        (("--steps", "0"), "0 is not in the range"),
        (("--pairs", "nan"), "'nan' is not a valid integer"),
        (("--threads", "0"), "0 is not in the range"),
        (("--gpu-memory-limit", "0"), "'0' is no size, expected bytes, KiB, MiB or GiB, for example 8GiB"),
        (("--gpu-memory-limit", "8GB"), "'8GB' is no size"),
        (("--gpu-memory-limit", "8GiB"), "a limit of GPU memory was given, but this runs on the CPU"),
        (("--device", "cuda"), "no GPU answers here"),
        (("--device", "tpu"), "'tpu' is not one of 'cpu', 'cuda'"),
        (("--timeout", "0"), "'0' is no number of seconds, expected more than 0"),
        (("--timeout", "nan"), "'nan' is no number of seconds"),
        (("--wall-cap", "soon"), "'soon' is no number of seconds"),
        (("--step", "3"), "No such option"),
        (("resnet50",), "unexpected extra argument"),
        (("--engine", "toy-missing", "--reference", "none"), "a_library_that_is_nowhere is not installed (python -m pip install"),
        (("--engine", "toy", "--reference", "none"), "nothing can be measured here: resnet50 [4, 3, 224, 224] toy: the toy knows"),
        (("--resume", "nowhere.json"), "nowhere.json: No such file or directory"),
        ((*SMALL, "--out", "/proc/out"), "cannot write /proc/out/"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str, flowbench: Callable) -> None:
    status, out, err = flowbench("run", *arguments)
    assert status == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("flowbench: ")
    assert said in err


def test_an_argument_behind_an_option_of_many_values_is_told_where_it_belongs(flowbench: Callable) -> None:
    status, out, err = flowbench("compare", "--batch-size", "1", "HEAD~1")
    assert (status, out) == (2, "")
    assert err.rstrip().endswith(
        "'HEAD~1' is not a valid integer range. All that follows --batch-size is taken for it: BASE and HEAD come before."
    )
    assert "come before" not in flowbench("compare", "--pairs", "HEAD~1")[2], "an option of one value takes no other"
    assert "come before" not in flowbench("run", "--batch-size", "HEAD~1")[2], "there is no argument"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"schema": "flowbench.run", "schema_version": 99}'])
def test_a_report_of_something_else_is_one_line(content: bytes, flowbench: Callable, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    status, out, err = flowbench("report", "x.json")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("flowbench: x.json: ")


def test_the_schema_is_printed_and_is_one(flowbench: Callable) -> None:
    status, out, _ = flowbench("schema")
    assert status == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(out))


def test_parse_reads_standard_input(repository: Path) -> None:
    text = "Speed stats:\nGPU Name: A GPU\n\nPyTorch resnet50 time: 9.0ms (= 90.0ms / 20, input_shape=[1, 3, 2, 2], backward is enabled)\n"
    done = subprocess.run(
        [sys.executable, "-m", "flowbench", "parse", "-"], input=text, capture_output=True, text=True, cwd=repository
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["gpu_name"] == "A GPU"
    assert len(done.stderr.splitlines()) == 1  # 90 / 20 is not 9


def test_without_arguments_the_help_is_printed_as_help(flowbench: Callable) -> None:
    helped, text, _ = flowbench("--help")
    status, out, err = flowbench()
    assert (helped, status, out, err) == (0, 2, "", text)
    assert len(text.splitlines()) > 10


def test_a_text_without_a_speed_stats_line_is_no_error_but_said(flowbench: Callable, tmp_path: Path) -> None:
    (tmp_path / "comment.txt").write_text("Thanks, looks good to me.\n")
    status, out, err = flowbench("parse", "comment.txt")
    assert status == 0
    assert json.loads(out) == {"gpu_name": None, "entries": []}
    assert err == "flowbench: comment.txt: no Speed stats line was found in it\n"


@pytest.mark.parametrize("arguments", ["schema", "--help", "--version"])
@pytest.mark.parametrize(
    ("place", "said"),
    [("> /dev/full", "No space left on device; free some space or send"), (">&-", "is closed; send it elsewhere")],
)
def test_output_that_cannot_be_written_is_one_line(arguments: str, place: str, said: str, repository: Path) -> None:
    command = f"{sys.executable} -m flowbench {arguments} {place}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, cwd=repository)
    if arguments != "schema" and place == ">&-":
        assert (done.returncode, done.stderr) == (0, "")  # click prints these to nobody
        return
    assert done.returncode == 2
    assert done.stderr.startswith("flowbench: cannot write to standard output: ")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_finished_run_whose_report_cannot_be_printed_stays(start: Callable, tmp_path: Path) -> None:
    arguments = ("run", *SMALL, "--batch-size", "2", "--steps", "2", "--pairs", "1", "--threads", "1")
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
        err = process.stderr.read()
        assert process.wait() == 2
    assert err.splitlines()[-1].startswith("flowbench: cannot write to standard output: No space left on device")
    assert "Traceback" not in err
    assert sorted(path.suffix for path in (tmp_path / "reports/out").iterdir()) == [".html", ".json", ".md", ".txt"]


def test_a_deleted_working_directory_is_one_line(repository: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    command = f"mkdir {gone}; cd {gone}; rmdir {gone}; {sys.executable} -m flowbench doctor"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flowbench: the working directory cannot be used: No such file or directory; ")
    assert len(done.stderr.splitlines()) == 1


def test_help_whose_reader_has_gone_changes_no_exit_code(repository: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flowbench", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=repository)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_stops_reading_changes_no_exit_code(repository: Path) -> None:
    command = f"{sys.executable} -m flowbench schema | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=repository)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_on_a_terminal_progress_is_one_live_line(site: Path, repository: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{repository}", "TERM": "xterm", "COLUMNS": "120"}
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "flowbench", "run", *SMALL, "--batch-size", "2", "--steps", "3", "--pairs", "2"]
    process = subprocess.Popen(command, stdout=its_end, stderr=its_end, cwd=tmp_path, env=environment)
    os.close(its_end)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal reads as an error
        while chunk := os.read(terminal, 65536):
            shown += chunk
    os.close(terminal)
    assert process.wait() == 0
    assert b"\x1b[" in shown
    assert b"[1/2] linear [2, 3, 4, 4] toy, pair 1 of 2" in shown
    assert b"ms per step (median of 3)" in shown


def test_help_loads_nothing_heavy(repository: Path) -> None:
    heavy = ("numpy", "rich", "torch", "framework", "psutil", "pandas", "jinja2")
    code = (
        "import sys\nfrom flowbench.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit as stop:\n"
        f"    print(stop.code, [name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_parent_loads_no_framework(repository: Path) -> None:
    code = (
        "import sys\nfrom flowbench.cli import main\ntry:\n    main(['run', '--dry-run'])\nexcept SystemExit as stop:\n"
        "    print(stop.code, [name for name in ('torch', 'framework', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repository)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_different_cells_never_share_a_key() -> None:
    base = Case("a", (1, 2, 3, 4), "float32", "eager", 1, False, True, True, 2)
    variants = [
        base,
        Case("a/1x2x3x4", (1, 2, 3, 4), "float32", "eager", 1, False, True, True, 2),
        Case("a", (12, 3, 4), "float32", "eager", 1, False, True, True, 2),
        Case("a", (1, 2, 3, 4), "bfloat16", "eager", 1, False, True, True, 2),
        Case("a", (1, 2, 3, 4), "float32", "graph", 1, False, True, True, 2),
        Case("a", (1, 2, 3, 4), "float32", "eager", 16, False, True, True, 2),
        Case("a", (1, 2, 3, 4), "float32", "eager", 1, True, True, True, 2),
        Case("a", (1, 2, 3, 4), "float32", "eager", 1, False, False, True, 2),
        Case("a", (1, 2, 3, 4), "float32", "eager", 1, False, True, False, 2),
        Case("a", (1, 2, 3, 4), "float32", "eager", 1, False, True, True, 1),
    ]
    cells = [Cell.of(case, engine) for case in variants for engine in ("e", "e/a")]
    assert len({cell.key for cell in cells}) == len(cells)
    assert [cell.case for cell in cells[::2]] == variants


@pytest.mark.parametrize(
    "arguments",
    [
        ["bisect", "a", "b", "--cell", ""],
        ["explain", "run.json", " "],
        ["history", "--cell", ""],
        ["history", "--machine", ""],
    ],
)
def test_an_empty_pattern_is_not_taken_for_all(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "fits everything, expected a part of a name, or * for all" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["r", "o/", "https://github.com/o/r", "o/r/pulls", ""])
def test_a_repository_is_named_by_its_owner_and_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["comment", "--artifact", "run.json", "--run-id", "5"], ["dispatch", "--event", "event.json"]):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--repo", name])
        assert stop.value.code == 2
        assert f"{name!r} is no repository of GitHub's, expected OWNER/NAME" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_a_system_that_has_no_process_or_file_left_is_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("flowbench.commands.doctor.examine", refuse)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowbench: {os.strerror(number)}: ")
    assert "take fewer ranks" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "PATH"],
        ["compare", "HEAD", "PATH"],
        ["history", "--store", "PATH"],
        ["store", "push", "--store", "PATH"],
        ["store", "prune", "--store", "PATH", "--older-than", "1"],
        ["run", "--resume", "PATH"],
        ["report", "PATH"],
        ["dispatch", "--event", "PATH", "--repo", "o/r"],
        ["comment", "--artifact", "PATH", "--repo", "o/r", "--run-id", "1"],
    ],
)
@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EACCES])
def test_a_path_that_nothing_can_be_at_is_one_line(
    arguments: list[str], number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "x" * 5000 if number == errno.ENAMETOOLONG else "closed"
    stat = os.stat

    def closed(where: object, *others: object, **options: object) -> os.stat_result:
        if str(where) == "closed":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(where))
        return stat(where, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", closed)
    with pytest.raises(SystemExit) as stop:
        main([path if word == "PATH" else word for word in arguments])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flowbench: {path}: ")
