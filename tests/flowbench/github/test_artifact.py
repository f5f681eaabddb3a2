"""The artifact reader: what an honest run wrote is read, everything else is refused in one line, and quickly."""

from __future__ import annotations

import io
import json
import random
import stat
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowbench.github.artifact import MOST_BYTES, ArtifactError, read_artifact
from flowbench.record.document import document_text
from flowbench.record.run import Engine, RunDocument


def archive(tmp_path: Path, files: dict[str | zipfile.ZipInfo, bytes]) -> Path:
    path = tmp_path / "hostile.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        read_artifact(path)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.isprintable()
    assert "refused" in said
    return said


def test_a_zip_of_one_document_and_the_document_itself_are_read(
    document: RunDocument, artifact: Callable[..., Path], tmp_path: Path
) -> None:
    assert read_artifact(artifact(document)) == document
    plain = tmp_path / "run.json"
    plain.write_text(document_text(document))
    assert read_artifact(plain) == document


@pytest.mark.parametrize(
    "name", ["../run.json", "/etc/run.json", "a/run.json", "..\\run.json", "run.sh", "run\n.json", "..json"]
)
def test_names_that_lead_elsewhere_are_refused(name: str, document: RunDocument, tmp_path: Path) -> None:
    assert "plain name" in refused(archive(tmp_path, {zipfile.ZipInfo(name): document_text(document).encode()}))


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("run.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    assert "a link or a folder" in refused(archive(tmp_path, {link: b"/etc/passwd"}))


def test_two_gigabytes_of_zeros_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("run.json", "w", force_zip64=True) as member,
    ):
        for _ in range(2048):
            member.write(bytes(2**20))
    tracemalloc.start()
    assert f"{2**31} bytes when unpacked" in refused(path)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_a_size_that_lies_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, {"run.json": bytes(MOST_BYTES + 10)})
    content = path.read_bytes()
    lying = content.replace((MOST_BYTES + 10).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    assert lying != content
    path.write_bytes(lying)
    refused(path)


def test_ten_thousand_files_are_refused(tmp_path: Path) -> None:
    assert "10000 files" in refused(archive(tmp_path, {f"{number}.json": b"{}" for number in range(10_000)}))
    assert "0 files" in refused(archive(tmp_path, {}))


def test_large_files_that_are_no_archive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert "expected at most" in refused(path)


def test_wrong_schemas_and_figures_that_are_none_are_refused(document: RunDocument, tmp_path: Path) -> None:
    tree = json.loads(document_text(document))
    odd = [
        {**tree, "schema": "other"},
        {**tree, "pull_request": 13},
        {**tree, "samples": [{**tree["samples"][0], "wall_s": float("nan")}]},
        {**tree, "cells": tree["cells"] * 2},
        [],
    ]
    for one in odd:
        refused(archive(tmp_path, {"run.json": json.dumps(one).encode()}))
    refused(archive(tmp_path, {"run.json": b"[" * 100_000}))
    refused(archive(tmp_path, {"run.json": b"\xff\xfe"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"engines": (Engine("flow-eager", "<script>alert(1)</script>", "framework", None),)},
        {"versions": {"<img src=x>": "1"}},
        {"preset": "a\x1b[31m"},
        {"run_id": "<!-- flowbench run=99999 -->"},
    ],
)
def test_names_with_markup_are_refused(changes: dict[str, object], artifact: Callable[..., Path]) -> None:
    assert "has markup in it" in refused(artifact(**changes))


def test_damaged_archives_are_refused(artifact: Callable[..., Path], tmp_path: Path) -> None:
    whole = artifact().read_bytes()
    path = tmp_path / "damaged.zip"
    for cut in range(4, len(whole), 97):
        path.write_bytes(whole[:cut])
        refused(path)
    with pytest.raises(ArtifactError, match="No such file"):
        read_artifact(tmp_path / "none.zip")


def test_encrypted_and_oddly_packed_archives_are_refused(document: RunDocument, tmp_path: Path) -> None:
    path = tmp_path / "odd.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("run.json", document_text(document))
    assert "its compression" in refused(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("run.json", document_text(document))
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert "encrypted" in refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), damage=st.integers(1, 40), packed=st.booleans())
def test_any_damage_is_read_or_refused_in_one_line(
    seed: int, damage: int, packed: bool, document: RunDocument, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    text = document_text(document).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("run.json", text)
    content = bytearray(buffer.getvalue() if packed else text)
    for _ in range(damage):
        content[draw.randrange(len(content))] = draw.randrange(256)
    path = tmp_path / "fuzzed"
    path.write_bytes(content)
    said = ""
    try:
        read_artifact(path)
    except ArtifactError as error:
        said = str(error)
    assert said.isprintable()  # one line, and nothing that a terminal would obey


def test_a_large_honest_artifact_is_read(document: RunDocument, artifact: Callable[..., Path]) -> None:
    cells = tuple(replace(document.cells[0], input_shape=(size, 3, 224, 224)) for size in range(1, 201))
    samples = tuple(replace(document.samples[0], cell=cell.key, pair=pair) for cell in cells for pair in range(2))
    large = replace(document, cells=cells, samples=samples)
    assert read_artifact(artifact(large)) == large
