"""The run document: written and read back alike, and what it refuses, each in one line that names the place."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowbench import codec
from flowbench.archive.folder import Entry
from flowbench.cell import Case, Cell
from flowbench.record.aa import AaSitting
from flowbench.record.document import DocumentError, document_schema, document_text, parse_document, read_document
from flowbench.record.noise import NoiseFloor
from flowbench.record.points import ImportedPoint, Point
from flowbench.record.profile import MOST_OPS, MemoryPoint, Profile, ProfiledOp, ProfiledTensor
from flowbench.record.run import Ending, Engine, Finding, Git, Gpu, Machine, NotMeasured, Protocol, RunDocument
from flowbench.record.sample import Memory, RankSample, Sample

CASE = Case("resnet50", (4, 3, 224, 224), "float32", "eager", 2, True, True, True, 1)
ONE, TWO = Cell.of(CASE, "one"), Cell.of(CASE, "two")


def rank(number: int) -> RankSample:
    memory = Memory(None, 7, 300, 200)
    return RankSample(number, 1, "cpu", (9.5,), (1.5 + number, 3.5 - number), (7.0, 6.5, None), memory)


def make() -> RunDocument:
    samples = (
        Sample(ONE.key, 0, 0, "2026-11-29T13:00:00.000+00:00", 3.5, "ok", None, 1e-7, (rank(0), rank(1))),
        Sample(TWO.key, 0, 1, "2026-11-29T13:00:04.000+00:00", 3.25, "failed", "died of SIGSEGV", None, ()),
    )
    return RunDocument(
        run_id="20261129-130000-abcdef",
        created="2026-11-29T13:00:00+00:00",
        flowbench_version="0.1.0",
        command=("flowbench", "run"),
        preset=None,
        reference="two",
        engines=(Engine("one", "One", "numpy", "2.0"), Engine("two", "Two", "numpy", None)),
        protocol=Protocol(2, 1, 1, 1, "mirrored", 0, 1e-4, 0.9, 2e-5, None, 60.0),
        git=Git("0" * 40, None, True),
        machine=Machine(
            "A CPU | `x`", "x86_64", 1, 2, 2, 2**34, (Gpu("NVIDIA H200", 2**37),), "580", "Linux 6", "CPython 3.11"
        ),
        versions={"numpy": "2.0"},
        cells=(ONE, TWO),
        samples=samples,
        findings=(Finding("other load", "1.0 of 2 cores — ü", ONE.key, 0),),
        not_measured=(NotMeasured("world size 4", "2 GPUs are here"),),
        ending=Ending("complete", "2026-11-29T13:01:00+00:00", None),
    )


TEXT = document_text(make())


def refused(text: str | bytes) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_document(text, "run.json")
    said = str(caught.value)
    assert said.startswith("run.json: ")
    assert "\n" not in said
    return said


def test_what_is_written_reads_back_the_same_and_fits_the_schema(tmp_path: Path) -> None:
    document = make()
    assert parse_document(TEXT) == document
    path = tmp_path / "run.json"
    path.write_text(TEXT)
    assert read_document(path) == document
    schema = document_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(json.loads(TEXT))


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    assert make().samples[0].steps_ms == (2.5, 3.5)


def test_cells_and_samples_are_found_by_case_and_cell() -> None:
    document = make()
    assert document.cases == (CASE,)
    assert document.cells_of(CASE) == (ONE, TWO)
    assert [sample.status for sample in document.samples_of(TWO)] == ["failed"]
    assert document.engine("one").display_name == "One"
    assert document.samples[0].ranks[0].memory.resident_above_bytes == 100


@pytest.mark.parametrize("field", ["steps_ms", "warmup_ms", "losses"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_that_is_not_finite_is_written(field: str, value: float) -> None:
    document = make()
    bad = replace(document.samples[0].ranks[0], **{field: (value,) if field == "warmup_ms" else (value, 1.0)})
    sample = replace(document.samples[0], ranks=(bad, document.samples[0].ranks[1]))
    with pytest.raises(ValueError, match="expected a finite number"):
        document_text(replace(document, samples=(sample, *document.samples[1:])))


def test_nothing_is_written_that_would_not_read_back() -> None:
    with pytest.raises(
        ValueError, match=r"at \$.engines\[0\].display_name: given 300 characters, expected at most 200"
    ):
        document_text(replace(make(), engines=(Engine("one", "O" * 300, "numpy", None), make().engines[1])))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '"schema_version": 1',
            '"schema_version": 2',
            "at $.schema_version: given 2, expected at most 1; a newer flowbench",
        ),
        ('"schema_version": 1', '"schema_version": "1"', "at $.schema_version: given '1', expected a whole number"),
        ('"schema_version": 1', '"schema_version": true', "at $.schema_version: given true, expected a whole number"),
        (
            '"flowbench.run"',
            '"airspeed"',
            "at $.schema: given 'airspeed', expected 'flowbench.run'; this is another tool's file",
        ),
        ("[1.5, 3.5]", "[NaN, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given nan, expected a finite number"),
        ("[1.5, 3.5]", "[1e999, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given inf, expected a finite number"),
        ("[1.5, 3.5]", "[-1.5, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given -1.5, expected more than 0"),
        ("[1.5, 3.5]", "[0, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given 0.0, expected more than 0"),
        ("[1.5, 3.5]", '["1.5", 3.5]', "at $.samples[0].ranks[0].steps_ms[0]: given '1.5', expected a number"),
        ("[1.5, 3.5]", "[true, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given true, expected a number"),
        ("[1.5, 3.5]", "1.5", "at $.samples[0].ranks[0].steps_ms: given 1.5, expected a list"),
        (
            "[1.5, 3.5]",
            "[1.5]",
            "at $.samples[0].ranks: given [1, 2] step times, expected the same number in all ranks",
        ),
        ("[1.5, 3.5]", "[1e-7, 3.5]", "at $.samples[0].ranks[0].steps_ms[0]: given 1e-07, expected at least 1e-06"),
        (
            "[1.5, 3.5]",
            "[1.5, 2e9]",
            "at $.samples[0].ranks[0].steps_ms[1]: given 2000000000.0, expected at most 1e+09",
        ),
        (
            '"steps": 2',
            '"steps": 1',
            "at $.samples[0].ranks[0].steps_ms: given 2 times, expected at most the protocol's 1 steps",
        ),
        (
            '"warmup": 1',
            '"warmup": 0',
            "at $.samples[0].ranks[0].warmup_ms: given 1 times, expected at most the protocol's 0 steps",
        ),
        (
            '"pair": 0, "position": 0',
            '"pair": 1, "position": 0',
            "at $.samples[0].pair: given 1, expected less than the protocol's 1 pairs",
        ),
        (
            '"created": "2026-11-29T13:00:00+00:00"',
            '"created": "yesterday"',
            "at $.created: given 'yesterday', expected a time",
        ),
        ('"created": "2026-11-29T13:00:00+00:00"', '"created": "2026-11-29T13:00:00"', "expected a time with its zone"),
        (
            '"finished": "2026-11-29T13:01:00+00:00"',
            '"finished": "later"',
            "at $.ending.finished: given 'later', expected a",
        ),
        (
            '"started": "2026-11-29T13:00:04.000+00:00"',
            '"started": "then"',
            "at $.samples[1].started: given 'then', expected a time with its zone",
        ),
        (
            '"comparison": null',
            (
                '"comparison": {"base": {"asked": "a", "git": null}, "head": {"asked": "b", "git": null}, "least_margin": 0.01,'
                ' "least_pairs": 6, "confirmation_pairs": 50, "noise_floors": {}, "stopped": {}}'
            ),
            "at $.comparison.confirmation_pairs: given 50, expected less than the protocol's 1 pairs",
        ),
        ('"wall_s": 3.5', '"wall_s": -3.5', "at $.samples[0].wall_s: given -3.5, expected at least 0"),
        ('"rank": 1', '"rank": 2', "at $.samples[0].ranks: given ranks [0, 2], expected ranks 0 to 1 in order"),
        ('"pairs": 1', '"pears": 1', "at $.protocol.pears: given an unknown key, expected one of steps, "),
        ('"pairs": 1, ', "", "at $.protocol.pairs: given nothing, expected this key of Protocol"),
        ('"pairs": 1', '"pairs": 1.0', "at $.protocol.pairs: given 1.0, expected a whole number"),
        ('"steps": 2', '"steps": 2, "steps": 3', "at an object's keys: given 'steps' twice, expected each once"),
        (
            '"status": "failed"',
            '"status": "fine"',
            "at $.samples[1].status: given 'fine', expected one of 'ok', 'failed', 'void'",
        ),
        (
            '"status": "failed"',
            '"status": "ok"',
            "at $.samples[1].error: given 'died of SIGSEGV', expected null for status 'ok'",
        ),
        (
            '"reference": "two"',
            '"reference": "three"',
            "at $.reference: given 'three', expected an engine of this document",
        ),
        ('{"cell": "one/', '{"cell": "uno/', "at $.samples[0].cell: given 'uno/"),
        ('{"engine": "two"', '{"engine": "one"', "twice, expected each once"),
        ('"reserved_peak_bytes": 7', '"reserved_peak_bytes": 1e3', "given 1000.0, expected a whole number"),
        (
            '"git": {"commit": "' + "0" * 40,
            '"git": {"commit": "' + "0" * 400,
            "at $.git.commit: given 400 characters, expected at",
        ),
        ('"memory_bytes": 17179869184', '"memory_bytes": ' + "9" * 5000, "integer string conversion"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert said in refused(TEXT.replace(old, new, 1))


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", '"text"', "{}", "[" * 100_000, "", "Speed stats:\n", b"\xff\xfe\x00"]
)
def test_other_files_are_refused(content: str | bytes) -> None:
    assert "expected" in refused(content)


@pytest.mark.parametrize("length", [*range(1, len(TEXT) - 3, 37)])
def test_a_document_cut_anywhere_is_refused(length: int) -> None:
    assert "cut in half" in refused(TEXT[:length])


def test_a_byte_order_mark_changes_nothing() -> None:
    assert parse_document("\ufeff" + TEXT) == make()
    assert parse_document(b"\xef\xbb\xbf" + TEXT.encode()) == make()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="No such file"):
        read_document(tmp_path / "none.json")
    with pytest.raises(DocumentError, match="Is a directory"):
        read_document(tmp_path)


PROFILE = Profile(
    cell=ONE.key,
    step_ms=12.5,
    ops_ms=11.5,
    ops=(ProfiledOp("conv2d", "float32[4, 64, 56, 56]", "layer1.0.conv1", 3, 7.5),),
    peak_bytes=3000,
    peak_at_ms=6.25,
    tensors=(ProfiledTensor("conv2d", "float32[4, 64, 56, 56]", "layer1.0.conv1", 2, 2000),),
    timeline=(MemoryPoint(0.0, 1000), MemoryPoint(6.25, 3000), MemoryPoint(12.5, 1000)),
    missing=(),
)


def test_a_profile_is_kept_and_a_document_from_before_there_were_any_is_read() -> None:
    document = replace(make(), profiles=(PROFILE, replace(PROFILE, cell=TWO.key)))
    text = document_text(document)
    assert parse_document(text) == document
    assert document.profile_of(ONE) == PROFILE
    assert make().profile_of(ONE) is None
    jsonschema.Draft202012Validator(document_schema()).validate(json.loads(text))
    older = json.loads(TEXT)
    del older["profiles"]
    assert parse_document(json.dumps(older)) == make()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cell": "other"}, "at $.profiles[0].cell: given 'other', expected the key of a cell"),
        ({"ops": PROFILE.ops * (MOST_OPS + 1)}, "at $.profiles[0].ops: given 21 entries, expected at most 20"),
        ({"timeline": PROFILE.timeline[::-1]}, "at $.profiles[0].timeline: given points out of order"),
        (
            {"peak_at_ms": None},
            "at $.profiles[0].peak_at_ms: given null, expected a time exactly where there is a peak",
        ),
    ],
)
def test_a_profile_that_cannot_be_is_refused(changes: dict[str, object], said: str) -> None:
    tree = json.loads(document_text(replace(make(), profiles=(PROFILE,))))
    tree["profiles"][0] |= json.loads(json.dumps({name: codec.encode(value) for name, value in changes.items()}))
    assert said in refused(json.dumps(tree))


def test_two_profiles_of_one_cell_are_refused() -> None:
    with pytest.raises(codec.CodecError, match=r"at \$.profiles: given .* twice, expected each once"):
        replace(make(), profiles=(PROFILE, PROFILE))


def test_numbers_and_texts_that_no_tool_could_take_are_refused_wherever_they_stand() -> None:
    def places(tree: object, place: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], object]]:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
        for key, value in items:
            yield from places(value, (*place, key))
        if isinstance(tree, str | int) and not isinstance(tree, bool):
            yield place, tree

    tree = json.loads(document_text(replace(make(), profiles=(PROFILE,))))
    found = list(places(tree))
    assert len(found) > 50
    for place, value in found:
        bad = "half a \ud800" if isinstance(value, str) else 10**400
        changed = json.loads(json.dumps(tree))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = bad
        said = refused(json.dumps(changed))
        said.encode()


def test_a_world_size_of_any_number_is_only_compared() -> None:
    tree = json.loads(TEXT)
    key = replace(ONE, world_size=2**60).key
    tree["cells"][0]["world_size"] = 2**60
    tree["samples"][0]["cell"] = key
    assert f"given ranks [0, 1], expected ranks 0 to {2**60 - 1} in order" in refused(json.dumps(tree))


@pytest.mark.parametrize(
    ("record", "field", "zoned"),
    [
        (RunDocument, "created", True),
        (Ending, "finished", True),
        (Sample, "started", True),
        (AaSitting, "started", True),
        (NoiseFloor, "measured", True),
        (Entry, "created", True),
        (Point, "created", True),
        (ImportedPoint, "date", False),  # comments and logs are as they were written
    ],
)
def test_times_of_all_records_are_times(record: type, field: str, zoned: bool) -> None:
    hint = typing.get_type_hints(record, include_extras=True)[field]
    moment, day = "2026-11-29T13:00:00+00:00", "2026-11-29"
    assert codec.decode(hint, moment) == moment
    for other in ("then", "", "2026-11-31", "2026-11-29<13:00:00Z", *([day] if zoned else [])):
        with pytest.raises(codec.CodecError, match=rf"at \$\.{field}: given '{other}', expected a (time|date)"):
            codec.decode(hint, other, f"$.{field}")
    if not zoned:
        assert codec.decode(hint, day) == day


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    tree = json.loads(TEXT)
    place = tree
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        parent, place = place, place[key]
        if not isinstance(place, dict | list) or not place or data.draw(st.booleans()):
            break
    parent[key] = data.draw(JSON)
    said = ""
    try:
        parse_document(json.dumps(tree), "run.json")
    except DocumentError as error:
        said = str(error)
    assert "\n" not in said
