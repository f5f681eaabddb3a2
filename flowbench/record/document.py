"""The run document as a file: strictly read, strictly written, and its JSON schema."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from flowbench.codec import CodecError, decode, describe, encode, schema
from flowbench.errors import FlowbenchError
from flowbench.record.run import RunDocument

SCHEMA = "flowbench.run"
SCHEMA_VERSION = 1
_BYTE_ORDER_MARK = "\ufeff"  # some editors put it before what they save


class DocumentError(FlowbenchError):
    """A file that is no run document this version can read."""


def parse_document(text: str | bytes, source: str = "document") -> RunDocument:
    """Read a run document; DocumentError names `source`, the place in it, given and expected."""
    try:
        body = (text if isinstance(text, str) else text.decode("utf-8")).removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{source}: not UTF-8 text (byte {error.start}), expected a run document as flowbench writes it"
        ) from None
    try:
        return _from_tree(json.loads(body, parse_constant=float, object_pairs_hook=_refuse_duplicates))
    except json.JSONDecodeError as error:
        whole = body.rstrip().endswith("}") and error.pos < len(body.rstrip())
        cut = body.lstrip().startswith("{") and not whole
        what = "the file ends in the middle (cut in half?)" if cut else f"not JSON: {error.msg}"
        raise DocumentError(
            f"{source}: line {error.lineno}, column {error.colno}: {what}, expected a whole run document"
        ) from None
    except CodecError as error:
        raise DocumentError(f"{source}: {error}") from None
    except RecursionError:
        raise DocumentError(f"{source}: nested too deeply, expected a run document as flowbench writes it") from None
    except ValueError as error:  # whole numbers of thousands of digits, which Python refuses to convert
        raise DocumentError(f"{source}: {error}") from None


def read_document(path: str | Path) -> RunDocument:
    """Read a run document from a file; raises DocumentError in one line where it cannot be read."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: {error.strerror or error}, expected a readable run document") from None
    return parse_document(content, str(path))


def document_text(document: RunDocument) -> str:
    """The document as JSON, one cell, sample or finding a line; raises ValueError for what would not read back."""
    tree = encode(document)
    decode(RunDocument, tree)
    tree = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **tree}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in tree.items()) + "\n}\n"


def document_schema() -> dict[str, Any]:
    """The JSON schema (2020-12) of the run document."""
    definitions: dict[str, Any] = {}
    schema(RunDocument, definitions)
    root = definitions.pop("RunDocument")
    header = {"schema": {"const": SCHEMA}, "schema_version": {"const": SCHEMA_VERSION}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{SCHEMA} {SCHEMA_VERSION}",
        **root,
        "properties": header | root["properties"],
        "required": [*header, *root["required"]],
        "$defs": definitions,
    }


def _from_tree(tree: Any) -> RunDocument:
    if not isinstance(tree, dict):
        raise CodecError("$", describe(tree), "an object, as flowbench writes it")
    name, version = tree.pop("schema", None), tree.pop("schema_version", None)
    if name != SCHEMA:
        raise CodecError(
            "$.schema", "nothing" if name is None else describe(name), f"{SCHEMA!r}; this is another tool's file"
        )
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CodecError("$.schema_version", describe(version), f"a whole number from 1 to {SCHEMA_VERSION}")
    if version > SCHEMA_VERSION:
        raise CodecError(
            "$.schema_version", str(version), f"at most {SCHEMA_VERSION}; a newer flowbench wrote it, update this one"
        )
    return decode(RunDocument, tree)


def _lines(value: Any) -> str:
    dump = functools.partial(json.dumps, allow_nan=False, ensure_ascii=False)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {dump(item)}" for item in value) + "\n ]"
    return dump(value)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise CodecError("an object's keys", f"{describe(twice)} twice", "each once")
    return tree
