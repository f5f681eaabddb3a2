"""Old Speed stats comments as history: texts of all dialects, exports of GitHub's API, and what is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowbench import history
from flowbench.archive.folder import Archive
from flowbench.errors import FlowbenchError
from flowbench.history import imported

SAMPLES = Path(__file__).parents[2] / "golden" / "speed_stats"
TEXT = """Speed stats:
GPU Name: GeForce GTX 1080

PyTorch resnet50 time: 140.1ms (= 7005.0ms / 50, input_shape=[16, 3, 224, 224], backward is enabled)
OneFlow resnet50 time: 128.0ms (= 6400.0ms / 50, input_shape=[16, 3, 224, 224], backward is enabled)
Relative speed: 1.09 (= 140.1ms / 128.0ms)

OneFlow resnet50 time: 154.5ms (= 7725.0ms / 50, input_shape=[16, 3, 224, 224], backward is enabled, ddp, world size=2)
PyTorch resnet50 time: 162.0ms (= 8100.0ms / 50, input_shape=[16, 3, 224, 224], backward is enabled, ddp, world size=2)
Relative speed: 1.05 (= 162.0ms / 154.5ms)
"""


def comment(body: str | None, number: int = 7, **changes: object) -> dict[str, object]:
    address = f"https://github.com/o/r/pull/1#issuecomment-{number}"
    user = {"login": "bot", "id": 1}
    return {"html_url": address, "created_at": "2022-03-31T08:00:00Z", "user": user, "body": body, **changes}


def test_a_text_becomes_points_with_gpu_cell_and_times() -> None:
    read = imported.read(TEXT, "old.txt", date="2022-03-31")
    labels = [(point.label, point.time_ms, point.relative_speed) for point in read.points]
    assert labels == [
        ("resnet50 [16, 3, 224, 224] PyTorch", 140.1, None),
        ("resnet50 [16, 3, 224, 224] OneFlow", 128.0, 1.09),
        ("resnet50 [16, 3, 224, 224], ddp, world size=2 OneFlow", 154.5, 1.05),
        ("resnet50 [16, 3, 224, 224], ddp, world size=2 PyTorch", 162.0, None),
    ]
    assert {(point.gpu, point.date, point.source) for point in read.points} == {
        ("GeForce GTX 1080", "2022-03-31T00:00:00", "old.txt")
    }
    assert read.remarks == ()


def test_a_text_of_a_cpu_names_its_machine_which_no_gpu_given_for_others_replaces() -> None:
    text = TEXT.replace("GPU Name: GeForce GTX 1080", "CPU Name: A CPU, 2 cores")
    points = imported.read(text, "old.txt", gpu="another GPU").points
    assert {(point.gpu, point.cpu, point.machine) for point in points} == {(None, "A CPU, 2 cores", "A CPU, 2 cores")}
    nowhere = text.replace("CPU Name: A CPU, 2 cores", "")
    assert {point.machine for point in imported.read(nowhere, "old.txt").points} == {"unknown machine"}
    assert {point.machine for point in imported.read(nowhere, "old.txt", gpu="a GPU").points} == {"a GPU"}


def test_a_reference_that_stands_before_each_engine_is_one_point() -> None:
    head = "GPU Name: V100\n\nPyTorch resnet50 time: 140.1ms (= 7005.0ms / 50, input_shape=[16, 3, 224, 224], backward is enabled)\n"
    other = TEXT.splitlines()[4].replace("OneFlow", "Other").replace("128.0", "140.1").replace("6400.0", "7005.0")
    read = imported.read(f"{TEXT}\n{head}{other}\nRelative speed: 1.00 (= 140.1ms / 140.1ms)\n", "t", date="2022-03-31")
    assert [(point.position, point.framework, point.time_ms) for point in read.points] == [
        (0, "PyTorch", 140.1),
        (1, "OneFlow", 128.0),
        (2, "OneFlow", 154.5),
        (3, "PyTorch", 162.0),
        (5, "Other", 140.1),  # 4 is 0 again
    ]


def test_seconds_become_milliseconds_and_keep_their_ratio() -> None:
    text = (
        "PyTorch resnet50 time: 0.140s (= 7.005s / 50, input_shape=[16, 3, 224, 224], backward is enabled)\n"
        "OneFlow resnet50 time: 0.128s (= 6.400s / 50, input_shape=[16, 3, 224, 224], backward is enabled)\n"
        "Relative speed: 1.09 (= 0.140s / 0.128s)\n"
    )
    points = imported.read(text, "t").points
    assert [(point.time_ms, point.relative_speed) for point in points] == [(140.0, None), (128.0, 1.09)]


PAGES = {
    "a list": json.dumps([comment(TEXT), comment("LGTM", 8), comment(None, 9)]),
    "pages one after another": json.dumps([comment(TEXT)]) + json.dumps([comment("LGTM", 8), comment(None, 9)]),
    "pages in a list": json.dumps([[comment(TEXT)], [comment("LGTM", 8), comment(None, 9)]]),
    "lines": "\n".join(json.dumps(one) for one in (comment(TEXT), comment("LGTM", 8), comment(None, 9))),
}


@pytest.mark.parametrize("shape", PAGES)
def test_exports_of_the_api_are_read_with_their_dates(shape: str) -> None:
    read = imported.read(PAGES[shape], "export.json")
    assert (len(read.points), read.comments, read.remarks) == (4, 3, ())
    (point, *_) = read.points
    assert point.source == "https://github.com/o/r/pull/1#issuecomment-7"
    assert (point.author, point.date) == ("bot", "2022-03-31T08:00:00+00:00")


def test_a_pasted_log_says_when_it_was() -> None:
    log = "\n".join(f"2021-12-01T10:11:12.1234567Z {line}" for line in TEXT.splitlines())
    assert {point.date for point in imported.read(log, "log").points} == {"2021-12-01T10:11:12+00:00"}


def test_what_cannot_be_a_point_is_said() -> None:
    read = imported.read("Relative speed: 1.17 (= 48.8ms / 41.8ms)\nFlow: 38.0ms\n", "t", gpu="V100")
    assert [(point.label, point.gpu) for point in read.points] == [("unnamed model Flow", "V100")]
    assert read.remarks == (
        "1 relative speed without the times they were made of: left out",
        "1 point without a date: give it with --date, or import the API's export",
    )
    assert imported.read("hello", "t").remarks == ("no time was found in it",)


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("*.txt")))
def test_every_dialect_gives_a_point_for_each_of_its_times(name: str) -> None:
    from flowbench.report.speed_stats_reader import parse

    text = (SAMPLES / name).read_text()
    times = [entry for entry in parse(text)[0]["entries"] if entry["kind"] == "time"]
    assert len(imported.read(text, name).points) == len(times)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"body": 3}]', "entry 0 is no comment"),
        ("[1]", "entry 0 is no comment"),
        ('[{"body": "x"', "begins like JSON but is none"),
        ("[" * 5000, "begins like JSON but is none"),
    ],
)
def test_other_json_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(FlowbenchError, match=said) as caught:
        imported.read(text, "export.json")
    assert str(caught.value).startswith("export.json: ")


def test_a_date_that_is_none_is_refused() -> None:
    with pytest.raises(FlowbenchError, match="--date 'spring' is no date"):
        imported.read(TEXT, "t", date="spring")


def test_importing_twice_changes_nothing_and_overlapping_exports_give_each_point_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    one = json.dumps([comment(TEXT)])
    both = json.dumps([comment(TEXT), comment(TEXT, 8, created_at="2022-04-01T08:00:00Z")])
    said, _ = history.import_files(store, [("one.json", one)], None, None)
    assert said == "one.json: 4 points of 4 cells from 1 text"
    said, _ = history.import_files(store, [("one.json", one), ("both.json", both)], None, None)
    assert said.splitlines()[0].endswith("they were there already")
    assert len(Archive(store).contents().imported) == 8
    with pytest.raises(FlowbenchError):
        history.import_files(store, [("new.txt", TEXT), ("bad.json", "[1]")], None, None)
    assert len(Archive(store).contents().imported) == 8  # nothing of a call that failed


def test_imported_points_stand_apart(tmp_path: Path) -> None:
    history.import_files(tmp_path, [("old.json", json.dumps([comment(TEXT)]))], None, None)
    text, notes = history.show(tmp_path, "OneFlow", "1080", "table")
    assert notes == []
    assert text.startswith("Imported from old Speed stats comments; not measured by flowbench")
    assert "2022-03-31 08:00" in text
    assert "PyTorch" not in text
    tree = json.loads(history.show(tmp_path, None, None, "json")[0])
    assert {one["imported"] for one in tree["series"]} == {True}
