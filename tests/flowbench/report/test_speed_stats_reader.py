"""The Speed stats reader: every dialect, everything that wraps one, and any text at all."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowbench.report.speed_stats_reader import parse

SAMPLES = Path(__file__).parents[2] / "golden" / "speed_stats"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text(encoding="utf-8"))
TIME = {
    "kind": "time", "framework": "OneFlow", "model": "resnet50", "mean": 32.0, "total": 6400.0, "unit": "ms", "times": 200,
    "input_shape": [1, 3, 224, 224], "num_workers": None, "backward": None, "ddp": False, "world_size": None,
    "broadcast_buffers": True, "mark": None,
}  # fmt: skip


def entries(text: str) -> list[dict]:
    return parse(text)[0]["entries"]


def timed(labels: str = "input_shape=[1, 3, 224, 224]", head: str = "OneFlow resnet50") -> str:
    return f"{head} time: 32.0ms (= 6400.0ms / 200, {labels})"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_samples_say_what_they_are_known_to_say(name: str) -> None:
    assert parse(sample(name))[0] == EXPECTED[name]


WRAPPERS = {
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "literal line breaks": lambda text: text.replace("\n", "\\n"),
    "literal carriage returns": lambda text: text.replace("\n", "\\r\\n"),
    "JSON, escaped": json.dumps,
    "JSON, as it is": lambda text: json.dumps(text, ensure_ascii=False),
    "workflow output": lambda text: "::set-output name=stats::" + text.replace("\n", "\\n"),
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.split("\n")),
    "quoted twice": lambda text: "".join(f"> > {line}\n" for line in text.split("\n")),
    "indented": lambda text: "".join(f"   \t{line}\n" for line in text.split("\n")),
    "fenced": lambda text: f"```bash\n{text}\n```",
    "folded": lambda text: f"<details>\n <summary>Speed stats:</summary>\n\n ``` \n{text}\n ``` \n\n</details>",
    "folded on one line": lambda text: (
        "<details><summary>Speed stats:</summary>" + text.replace("\n", "<br>") + "</details>"
    ),
    "time stamps": lambda text: "".join(f"2022-03-09T03:21:44.1234567Z {line}\n" for line in text.split("\n")),
    "colours": lambda text: "".join(f"\x1b[36;1m{line}\x1b[0m\n" for line in text.split("\n")),
    "no variation selector": lambda text: text.replace("\ufe0f", ""),
    "indented marks": lambda text: text.replace("✔️ ", "  ✔️   ").replace("❌ ", "\t❌\ufe0f "),
    "byte order mark": lambda text: "\ufeff" + text,
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_wraps_a_sample_changes_nothing(name: str, wrapper: str) -> None:
    assert parse(WRAPPERS[wrapper](sample(name)))[0] == EXPECTED[name]


LABELS = {
    "input_shape=[1, 3, 224, 224]": {},
    "input_shape=[1,3,224,224]": {},
    "input_shape=(1, 3, 224, 224)": {},
    "input_shape=torch.Size([1, 3, 224, 224]), ddp": {"ddp": True},
    "input_shape=[1, 3, 224, 224], backward is enabled": {"backward": True},
    "input_shape=[1, 3, 224, 224], backward is disabled": {"backward": False},
    "input_shape=[1, 3, 224, 224], ddp": {"ddp": True},
    "input_shape=[1, 3, 224, 224], ddp, world size=2": {"ddp": True, "world_size": 2},
    "input_shape=[1, 3, 224, 224], ddp, world size=16": {"ddp": True, "world_size": 16},
    "input_shape=[1, 3, 224, 224], world size=128": {"world_size": 128},
    "input_shape=[1, 3, 224, 224], ddp_broadcast_buffers is disabled": {"broadcast_buffers": False},
    "input_shape=[1, 3, 224, 224], backward is disabled, ddp, ddp_broadcast_buffers is disabled, world size=10": {
        "backward": False, "ddp": True, "broadcast_buffers": False, "world_size": 10,
    },
    "input_shape=[16, 10]": {"input_shape": [16, 10]},
    "num_workers=8": {"input_shape": None, "num_workers": 8},
    "num_workers=12, ddp, world size=4": {"input_shape": None, "num_workers": 12, "ddp": True, "world_size": 4},
}  # fmt: skip


@pytest.mark.parametrize("labels", LABELS)
def test_labels_in_any_combination(labels: str) -> None:
    assert parse(timed(labels)) == ({"gpu_name": None, "entries": [TIME | LABELS[labels]]}, [])


@pytest.mark.parametrize(
    ("head", "framework", "model"),
    [
        ("PyTorch resnet50", "PyTorch", "resnet50"),
        ("OneFlow-PR resnet50", "OneFlow-PR", "resnet50"),
        ("torch-channels-last regnet_y_1_6gf", "torch-channels-last", "regnet_y_1_6gf"),
        ("OneFlow swin dataloader", "OneFlow", "swin dataloader"),
        ("Flow real time style transfer (small)", "Flow", "real time style transfer (small)"),
        ("飞桨 模型 甲", "飞桨", "模型 甲"),
    ],
)
def test_names_of_frameworks_and_models(head: str, framework: str, model: str) -> None:
    assert entries(timed(head=head)) == [TIME | {"framework": framework, "model": model}]


@pytest.mark.parametrize(
    ("line", "value", "num", "den"),
    [
        ("Relative speed: 1.17", 1.17, None, None),
        ("Relative speed: 1.17 (= 48.8ms / 41.8ms)", 1.17, 48.8, 41.8),
        ("Relative speed: 1.17 (= 48.8ms / 41.8ms", 1.17, 48.8, 41.8),
        ("Relative speed: 0.957 (= 0.240s / 0.251s)", 0.957, 0.24, 0.251),
        (
            "Relative speed: 0.9625150846315424 (= 0.0456 / 0.047375870000000003",
            0.9625150846315424, 0.0456, 0.047375870000000003,
        ),
        ("Relative speed: 2 (= 1e-05 / 5e-06)", 2.0, 1e-05, 5e-06),
        ("Relative speed: 1.17 (", 1.17, None, None),
        ("Relative speed: 1.17 (= 48.8ms", 1.17, None, None),
    ],
)  # fmt: skip
def test_ratio_lines(line: str, value: float, num: float | None, den: float | None) -> None:
    expected = {"kind": "relative", "value": value, "num": num, "den": den, "mark": None}
    assert parse(line) == ({"gpu_name": None, "entries": [expected]}, [])


def test_bare_seconds_keep_every_digit() -> None:
    text = "PyTorch resnet50 time: 7.039175041725966e-05 (= 0.0014078350083451932 / 20, input_shape=[8, 3, 224, 224])"
    (entry,), warnings = entries(text), parse(text)[1]
    assert (entry["mean"], entry["total"], entry["unit"]) == (7.039175041725966e-05, 0.0014078350083451932, "s")
    assert warnings == []


@pytest.mark.parametrize(
    ("line", "rank", "mib", "estimated"),
    [
        ("PyTorch GPU used (rank 0): 1701 MiB", 0, 1701, False),
        ("PyTorch GPU used (rank 0, estimated): 1701 MiB", 0, 1701, True),
        ("PyTorch GPU used (rank 12): 1043.5 MiB", 12, 1043.5, False),
        ("PyTorch GPU used (rank 1, estimated): -7 MiB", 1, -7, True),
    ],
)
def test_gpu_memory_lines(line: str, rank: int, mib: float, estimated: bool) -> None:
    expected = {
        "kind": "memory",
        "framework": "PyTorch",
        "rank": rank,
        "mib": mib,
        "estimated": estimated,
        "mark": None,
    }
    assert parse(line) == ({"gpu_name": None, "entries": [expected]}, [])


@pytest.mark.parametrize(
    "line",
    [timed(), "Relative speed: 1.17", "PyTorch GPU used (rank 0): 1701 MiB", "OneFlow: 38.0ms", "PyTorch: 0.038s"],
)
@pytest.mark.parametrize(
    ("before", "mark"),
    [("", None), ("✔️ ", "ok"), ("✔ ", "ok"), (" ✔️", "ok"), ("✅ ", "ok"), ("❌ ", "fail"), ("  ❌\ufe0f  ", "fail")],
)
def test_marks_before_any_line(line: str, before: str, mark: str | None) -> None:
    (entry,) = entries(before + line)
    assert entry["mark"] == mark
    assert entry | {"mark": None} == entries(line)[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n \n",
        "Speed stats:\n\n",
        "GPU Name:   \n",
        "CPU Name: AMD EPYC 9B14",
        "+ echo 'Relative speed: 1.17 (= 48.8ms / 41.8ms)'",
        "++ echo 'Relative speed: 1.17'",
        "> + awk '... /Relative speed/{ printf \"Relative speed: 1.17\" }'",
        "2022-03-09T03:21:44.1234567Z + printf 'Relative speed: 1.17\\n'",
        "+ result='GPU Name: GeForce GTX 1080 \n\n" + timed() + "\nRelative speed: 1.17'",
        "+ echo '::set-output name=stats::GPU Name: GeForce GTX 1080 \\n\\n" + timed() + "\\nRelative speed: 1.17'",
        "/Relative speed/{ if ($2 >= threshold) }",
        "The Relative speed: 1.17 is fine",
        "| OneFlow resnet50 | time: 32.0ms (= 6400.0ms / 200, |",
        "| Relative speed: 1.17 | 2 |",
        "$ python3 compare.py resnet50 8x3x224x224 # Relative speed: 1.17",
        "Total training time: 12.5s",
        "Elapsed: 12s\nreal: 1m2.345s\nLoss: 6.907755\nepoch: 3",
        "*****************************************\nSetting OMP_NUM_THREADS to 1\n***",
        "Relative speed: nan\nRelative speed: inf (= 1.0ms / 0.0ms)\nRelative speed: -1.0\nRelative speed: 1e999",
        "OneFlow resnet50 time: nanms (= nanms / 0, input_shape=[1, 3, 224, 224])",
        "❌",
        "build_dataset >>>>>> ImageFolder",
    ],
)
def test_noise_is_no_entry_and_no_error(text: str) -> None:
    assert parse(text) == ({"gpu_name": None, "entries": []}, [])


def test_a_trace_ends_where_its_quote_ends() -> None:
    text = "+ printf '\\n'\n+ trap 'rc=$?' ERR\n+ echo 'one\nRelative speed: 9.99\ntwo'\nRelative speed: 1.17\n"
    assert [entry["value"] for entry in entries(text)] == [1.17]
    assert [entry["value"] for entry in entries("+ don't\nRelative speed: 1.17")] == [1.17]


def test_gpu_name_is_the_first_that_is_named() -> None:
    assert parse("GPU Name:\n ✔️ GPU Name: NVIDIA H200 \nGPU Name: other")[0]["gpu_name"] == "NVIDIA H200"


@pytest.mark.parametrize(
    "line",
    [
        "OneFlow resnet50 time: 33.0ms (= 6400.0ms / 200, input_shape=[1, 3, 224, 224])",
        "OneFlow resnet50 time: 0.032s (= 64.000s / 200, num_workers=1)",
        "OneFlow resnet50 time: 1.0ms (= 1.0ms / 0, num_workers=1)",
        "OneFlow resnet50 time: 32.0ms (= 6.400s / 200, num_workers=1)",
        "Relative speed: 1.09 (= 47.9s / 52.3s)",
        "Relative speed: 1.09 (= 47.9ms / 0.0ms)",
        "OneFlow resnet50 time: 32.0ms (= 6400.0ms / 200, input_shape=[1, 3, 224, 224], phase of the moon)",
    ],
)
def test_a_contradiction_is_said_and_the_figures_stay(line: str) -> None:
    document, warnings = parse(f"heading\n{line}\n")
    assert len(document["entries"]) == 1
    assert len(warnings) == 1
    assert warnings[0].startswith("line 2: ")


@pytest.mark.parametrize(
    "line",
    [
        "OneFlow resnet50 time: 0.1ms (= 7.0ms / 50, num_workers=1)",
        "OneFlow resnet50 time: 22.5ms (= 4508.8ms / 200, num_workers=1)",
        "OneFlow resnet50 time: 32.0ms (= 6.4s / 200, num_workers=1)".replace("6.4s", "6400.0ms"),
        "Relative speed: 1.50 (= 0.0ms / 0.0ms)",
        "Relative speed: 0.08 (= 41.7ms / 517.1ms)",
    ],
)
def test_rounding_is_no_contradiction(line: str) -> None:
    assert parse(line)[1] == []


FRAGMENTS = [
    "Relative speed: ", "OneFlow resnet50 time: ", "32.0ms", " (= ", " / ", "200", ", input_shape=[1, 3, 224, 224]", ")", "\n",
    "\\n", "+ ", "'", "✔️ ", "❌ ", "> ", "GPU Name: ", "PyTorch GPU used (rank 0): ", " MiB", "1e99", "9" * 400, "0e99", "<br>",
    "<", "\x1b[", "\\u2714", "0.0", "`", "|", "\r", "world size=", "\ud800",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)))
def test_no_text_raises(text: str) -> None:
    document, warnings = parse(text)
    json.dumps(document, allow_nan=False)
    assert all(isinstance(warning, str) for warning in warnings)


@pytest.mark.parametrize(
    "piece",
    ["(", "\\", "<", "> ", "`", "* ", "\x1b[0", "+ '\n", "+ don't \\n", " time: 1", "Relative speed: ", "1", " ", "✔️", "\n",
     "OneFlow ", "<br", "\\n", "peak a", "OneFlow GPU used (rank ", "2022-03-09T", ", x", "x time: 1 (= 1 / 1", timed() + "\n"],
)  # fmt: skip
def test_a_megabyte_of_anything_is_read_at_once(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    before = time.process_time()
    parse(text)
    parse("OneFlow resnet50 time: 32.0ms (= 6400.0ms / 200, " + text)
    assert time.process_time() - before < 10
