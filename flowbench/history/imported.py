"""Old Speed stats comments as points of history: from a text, or from a JSON export of issue comments of GitHub's API."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flowbench.codec import CodecError, decode, encode
from flowbench.errors import FlowbenchError
from flowbench.record.points import ImportedPoint
from flowbench.report.speed_stats_reader import cpu_name, parse
from flowbench.report.words import counted

# A log that was pasted as it was has a time before each line.
_LOG_TIME = re.compile(r"^\s*(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?(Z|[+-]\d\d:?\d\d)", re.MULTILINE)
_MOST_REMARKS = 5


@dataclass(frozen=True)
class Imported:
    """What one file gave. `remarks` say in words what in it could not become a point."""

    points: tuple[ImportedPoint, ...]
    comments: int
    remarks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """A name for these points: the same points get the same."""
        return hashlib.sha256(json.dumps(encode(self.points), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Comment:
    body: str
    source: str
    author: str | None = None
    date: str | None = None


def read(text: str, name: str, date: str | None = None, gpu: str | None = None) -> Imported:
    """The points of a file called `name`; `date` and `gpu` say what its texts themselves do not.

    Raises FlowbenchError for a JSON file that is no export of comments, and for a date that is none.
    """
    given = _date(date) if date is not None else None
    if date is not None and given is None:
        raise FlowbenchError(f"--date {date[:40]!r} is no date, expected one like 2022-03-31 or 2022-03-31T12:00:00Z")
    comments = list(_comments(text, name))
    points: list[ImportedPoint] = []
    contradictions: list[str] = []
    without_time = 0
    for comment in comments:
        parsed, warnings = parse(comment.body)
        when = comment.date or _log_date(comment.body) or given
        found, alone = _points(
            parsed["entries"], comment, when, _machine(parsed["gpu_name"], cpu_name(comment.body), gpu)
        )
        points += found
        without_time += alone
        contradictions += [f"{comment.source}: {warning}" for warning in warnings]
    remarks = contradictions[:_MOST_REMARKS]
    if len(contradictions) > _MOST_REMARKS:
        remarks.append(f"{counted(len(contradictions) - _MOST_REMARKS, 'more remark')} of that kind on its texts")
    if without_time:
        remarks.append(f"{counted(without_time, 'relative speed')} without the times they were made of: left out")
    undated = sum(point.date is None for point in points)
    if undated:
        remarks.append(f"{counted(undated, 'point')} without a date: give it with --date, or import the API's export")
    if not points:
        remarks.append("no time was found in it")
    return Imported(tuple(points), len(comments), tuple(remarks))


def _comments(text: str, name: str) -> Iterator[_Comment]:
    body = text.removeprefix("\ufeff")
    if not body.lstrip().startswith(("[", "{")):
        yield _Comment(text, name)
        return
    for number, comment in enumerate(_flattened(_json_values(body, name))):
        if not isinstance(comment, dict) or not isinstance(comment.get("body", ""), str | None):
            raise FlowbenchError(
                f"{name}: entry {number} is no comment, expected objects with body and created_at, as"
                " GET /repos/OWNER/REPO/issues/comments gives them"
            )
        user = comment.get("user")
        author = user.get("login") if isinstance(user, dict) else None
        address = comment.get("html_url") or comment.get("url")
        yield _Comment(
            comment.get("body") or "",
            address if isinstance(address, str) else f"{name}, comment {number}",
            author if isinstance(author, str) else None,
            _date(comment.get("created_at")),
        )


def _json_values(text: str, name: str) -> Iterator[Any]:
    """One or several JSON values: pages of an API one after another, lines, or a whole file."""
    decoder, position, content = json.JSONDecoder(), 0, re.compile(r"\S")
    while match := content.search(text, position):
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError) as error:
            raise FlowbenchError(
                f"{name}: begins like JSON but is none ({str(error)[:80]}), expected issue comments as the API gives them"
            ) from None
        yield value


def _flattened(values: Iterator[Any]) -> Iterator[Any]:
    """Comments out of pages, and of pages of pages."""
    for value in values:
        if isinstance(value, list):
            yield from _flattened(iter(value))
        else:
            yield value


def _points(
    entries: list[dict[str, Any]], comment: _Comment, date: str | None, machine: dict[str, str | None]
) -> tuple[list[ImportedPoint], int]:
    """The points of one comment, and how many relative speeds in it belong to none of them."""
    points: list[ImportedPoint] = []
    # The reference's time is stated again before each engine that stands beside it; an equal sum says that it is the same.
    stated: set[str] = set()
    repeated: set[int] = set()
    alone, case = 0, 0  # `case` is where the times begin that a relative speed can be made of
    for entry in entries:
        if entry["kind"] == "time":
            words = json.dumps({**entry, "mark": None})
            if words in stated and entry["total"] is not None:
                repeated.add(len(points))
            stated.add(words)
            points.append(_point(entry, len(points), comment, date, machine))
        elif entry["kind"] == "relative":
            subjects = [index for index in range(case, len(points)) if _is_subject(points[index], entry)]
            if len(points) - case < 2 or len(subjects) != 1:
                alone += 1
            else:
                points[subjects[0]] = _with_relative(points[subjects[0]], entry["value"])
            case = len(points)
    # One that has a relative speed of its own says something new.
    return [one for one in points if one.position not in repeated or one.relative_speed is not None], alone


def _is_subject(point: ImportedPoint, entry: dict[str, Any]) -> bool:
    """Whether the ratio's denominator is this point's time; without parentheses, PyTorch is what is divided."""
    if entry["den"] is None:
        return point.framework.lower() != "pytorch"
    return entry["den"] in (point.time_ms, point.time_ms / 1000)


def _with_relative(point: ImportedPoint, value: float) -> ImportedPoint:
    return decode(ImportedPoint, encode(point) | {"relative_speed": value or None})


def _machine(gpu: str | None, cpu: str | None, given_gpu: str | None) -> dict[str, str | None]:
    """Where a text was measured: on the GPU or the CPU that it names, else on the GPU that the caller gives."""
    if gpu is None and cpu is None:
        gpu = given_gpu
    return {"gpu": gpu and gpu[:200], "cpu": None if gpu else cpu and cpu[:200]}


def _point(
    entry: dict[str, Any], position: int, comment: _Comment, date: str | None, machine: dict[str, str | None]
) -> ImportedPoint:
    case = ("input_shape", "num_workers", "backward", "ddp", "world_size", "broadcast_buffers", "times")
    tree = {name: entry[name] for name in case} | {
        "source": comment.source,
        "position": position,
        "author": comment.author,
        "date": date,
        "framework": entry["framework"][:200],
        "model": entry["model"] and entry["model"][:200],
        "time_ms": entry["mean"] * (1.0 if entry["unit"] == "ms" else 1000.0),
        "relative_speed": None,
        **machine,
    }
    try:
        return decode(ImportedPoint, tree)
    except CodecError as error:
        raise FlowbenchError(f"{comment.source}: {error}") from None


def _log_date(text: str) -> str | None:
    match = _LOG_TIME.search(text)
    return _date(match[1] + match[2]) if match else None


def _date(value: object) -> str | None:
    try:
        return datetime.fromisoformat(value).isoformat() if isinstance(value, str) else None
    except ValueError:
        return None
