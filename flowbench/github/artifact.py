"""The artifact of a run, which anybody may have written: a zip with one JSON file, or that file. Nothing is ever unpacked."""

from __future__ import annotations

import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from flowbench.errors import FlowbenchError
from flowbench.record.document import DocumentError, parse_document
from flowbench.record.run import RunDocument

# A sitting of 500 cells is a tenth of this.
MOST_BYTES = 20 * 2**20
_MARKUP = re.compile(r"[<>\x00-\x1f\x7f]")
_ZIP_BEGINS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")


class ArtifactError(FlowbenchError):
    """An artifact that is refused: nothing of it is shown or posted."""


def read_artifact(path: Path) -> RunDocument:
    """The run document in an artifact; raises ArtifactError in one line for everything else."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ArtifactError(f"{path}: refused: {size} bytes, expected at most {MOST_BYTES}")
        with path.open("rb") as file:
            begins = file.read(4)
        content = _only_file(path) if begins in _ZIP_BEGINS else path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror or error}, expected a run's artifact") from None
    try:
        document = parse_document(content, f"{path}: refused")
    except DocumentError as error:
        raise ArtifactError(_printable(str(error))) from None
    for name in _names(document):
        if _MARKUP.search(name):
            raise ArtifactError(f"{path}: refused: the name {_printable(name)[:80]!r} has markup in it")
    return document


def _names(document: RunDocument) -> Iterator[str]:
    """What is a name in the document: reports escape all of it, and no honest one has a tag in it."""
    yield from (document.run_id, document.created, document.flowbench_version, document.preset or "")
    for engine in document.engines:
        yield from (engine.name, engine.display_name, engine.library, engine.version or "")
    yield from (cell.model for cell in document.cells)
    yield from (text for text in vars(document.machine).values() if isinstance(text, str))
    yield from (gpu.name for gpu in document.machine.gpus)
    yield from (*document.versions, *document.versions.values())
    sides = () if document.comparison is None else (document.comparison.base, document.comparison.head)
    yield from (side.asked for side in sides)
    for git in (document.git, *(side.git for side in sides)):
        yield from (git.commit, git.branch or "") if git is not None else ()


def _only_file(path: Path) -> bytes:
    """The content of the archive's one file, read up to the limit whatever its header claims."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) != 1:
                raise ArtifactError(f"{path}: refused: an archive of {len(members)} files, expected one JSON file")
            (member,) = members
            _check_member(path, member)
            with archive.open(member) as file:
                content = file.read(MOST_BYTES + 1)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        said = _printable(f"{error}")[:120]
        raise ArtifactError(f"{path}: refused: a damaged archive ({said}), expected a zip with one JSON file") from None
    if len(content) > MOST_BYTES:
        raise ArtifactError(f"{path}: refused: its file is larger than it says, expected at most {MOST_BYTES} bytes")
    return content


def _check_member(path: Path, member: zipfile.ZipInfo) -> None:
    name = member.filename
    reason = None
    if "/" in name or "\\" in name or ".." in name or not name.endswith(".json") or not name.isprintable():
        reason = "expected a plain name that ends with .json"
    elif stat.S_ISLNK(member.external_attr >> 16) or member.is_dir():
        reason = "it is a link or a folder, expected a file"
    elif member.flag_bits & 0x1:
        reason = "it is encrypted"
    elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        reason = "its compression is not one that is read here, expected deflate"
    elif member.file_size > MOST_BYTES:
        reason = f"{member.file_size} bytes when unpacked, expected at most {MOST_BYTES}"
    if reason is not None:
        raise ArtifactError(f"{path}: refused: file {_printable(name)[:80]!r}: {reason}")


def _printable(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
