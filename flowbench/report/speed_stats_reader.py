"""Reads the "Speed stats" text in every dialect that benchmark jobs have posted: text in, entries and warnings out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

Entry = dict[str, Any]

# Lines are unwrapped from the left, piece by piece: each alternative starts with a different character, so this is linear.
_WRAPPING = re.compile(
    r"\s+|>|`+|[\"\u200b\ufe0f\ufeff]|[-*•]\s+|\*{1,2}(?=\S)|<[^<>]*>|::set-output name=\w+::"
    r"|\d{4}-\d\d-\d\dT[\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)?\s"
    r"|(?P<ok>[✔✅✓])|(?P<fail>[❌✖✗✘])"
)
_ANSI_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_HTML_BREAK = re.compile(r"</?(?:br|details|summary|pre|code|p|div|blockquote)\b[^<>]*>", re.IGNORECASE)
_ESCAPED_BREAK = re.compile(r"\\[rn]")
_ESCAPED_CHARACTER = re.compile(r"\\u(?!d[89a-f])([0-9a-f]{4})", re.IGNORECASE)
_LONGEST_ENTRY = 4000

_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)"
_FIGURE = _NUMBER + r" ?(ms|s)?(?![\w.])"
_DEVICE = re.compile(r"GPU Name\s*:(.*)", re.IGNORECASE)
_CPU = re.compile(r"CPU Name\s*:(.*)", re.IGNORECASE)
_TIME = re.compile(rf"\stime:\s*{_FIGURE}\s*\(\s*=\s*{_FIGURE}\s*/\s*([0-9]{{1,15}})(?![\w.])")
_SHORT_TIME = re.compile(rf"(\w[^\s:]*):\s*{_NUMBER} ?(ms|s)")
_RELATIVE = re.compile(rf"relative speed\s*:\s*{_NUMBER}(?![\w.])\s*", re.IGNORECASE)
_QUOTIENT = re.compile(rf"\(\s*=?\s*{_FIGURE}\s*/\s*{_FIGURE}")
_MEMORY = re.compile(
    r"(\w\S*)\s+(GPU used|peak [a-z ]{3,40}?)\s*\(\s*rank ([0-9]{1,9})(\s*,\s*estimated)?\s*\)\s*:\s*"
    r"(-?[0-9]{1,15}(?:\.[0-9]{1,15})?)\s*MiB\b"
)
_SHAPE = re.compile(r"input_shape\s*=\s*(?:torch\.Size\()?[\[(]([0-9,\s]*)[\])]\)?")
_LABEL = re.compile(r"(num_workers|world[ _]size)\s*=\s*([0-9]{1,9})")
_STATE = re.compile(r"(backward|ddp_broadcast_buffers) is (enabled|disabled)")
_OUR_LABEL = re.compile(r"(precision|mode|threads|case)=\w+")


class _Line(NamedTuple):
    number: int
    mark: str | None
    body: str


def parse(text: str) -> tuple[dict[str, Any], list[str]]:
    """Read a Speed stats text: `{"gpu_name": …, "entries": […]}` and what in it contradicts itself.

    Entries come in the order of the text, figures as the text states them. Whatever is no entry is noise; no text raises.
    """
    gpu_name: str | None = None
    entries: list[Entry] = []
    warnings: list[str] = []
    for line in _without_traces(list(_lines(text))):
        device = _DEVICE.fullmatch(line.body)
        if device:
            gpu_name = gpu_name or device[1].strip() or None
            continue
        complaints: list[str] = []
        entry = _entry(line.body, complaints)
        if entry is not None:
            entries.append(entry | {"mark": line.mark})
        warnings += [f"line {line.number}: {complaint}" for complaint in complaints]
    return {"gpu_name": gpu_name, "entries": entries}, warnings


def cpu_name(text: str) -> str | None:
    """The CPU that a Speed stats text names, which it does where it was measured without a GPU."""
    named = (_CPU.fullmatch(line.body) for line in _without_traces(list(_lines(text))))
    return next((name[1].strip() for name in named if name and name[1].strip()), None)


def _lines(text: str) -> Iterator[_Line]:
    """The text's lines without what wraps them; a line break may be a real one, a tag or a literal backslash-n."""
    physical = _HTML_BREAK.sub("\v", _ANSI_ESCAPE.sub("", text)).replace("\r\n", "\n")
    for number, line in enumerate(physical.split("\n"), start=1):
        pieces = _ESCAPED_BREAK.split(line)
        for piece in pieces:
            if len(pieces) > 1:
                piece = _ESCAPED_CHARACTER.sub(lambda match: chr(int(match[1], 16)), piece)
            for part in piece.splitlines():
                yield _unwrapped(number, part)


def _unwrapped(number: int, line: str) -> _Line:
    position, marks = 0, set()
    while match := _WRAPPING.match(line, position):
        position = match.end()
        marks |= {match.lastgroup} - {None}
    mark = "fail" if "fail" in marks else "ok" if "ok" in marks else None
    return _Line(number, mark, line[position:].rstrip(' \t\xa0`*"\\'))


def _without_traces(lines: list[_Line]) -> Iterator[_Line]:
    """Leave out commands traced by a shell (`+ command`), with all lines of a quoted argument."""
    closing = _next_open_quotes(lines)
    index = 0
    while index < len(lines):
        body = lines[index].body
        if body.startswith(("+ ", "++")) or body == "+":
            if _leaves_quote_open(body) and closing[index] is not None:
                index = closing[index]
        elif not body.startswith("|") and len(body) <= _LONGEST_ENTRY:
            yield lines[index]
        index += 1


def _next_open_quotes(lines: list[_Line]) -> list[Any]:
    """For each line, the index of the next later line with an odd number of quotes, or None."""
    following: list[int | None] = [None] * len(lines)
    nearest = None
    for index in range(len(lines) - 1, -1, -1):
        following[index] = nearest
        if _leaves_quote_open(lines[index].body):
            nearest = index
    return following


def _leaves_quote_open(body: str) -> bool:
    return (body.count("'") - body.count("\\'")) % 2 == 1


def _entry(body: str, complaints: list[str]) -> Entry | None:
    for reader in (_relative, _memory, _time, _short_time):
        entry = reader(body, complaints)
        if entry is not None:
            return entry
    return None


def _relative(body: str, complaints: list[str]) -> Entry | None:
    match = _RELATIVE.match(body)
    if match is None:
        return None
    rest = body[match.end() :]
    value = _finite(match[1])
    if value is None or (rest and not rest.startswith("(")):
        return None
    entry: Entry = {"kind": "relative", "value": value, "num": None, "den": None}
    quotient = _QUOTIENT.match(rest)
    if quotient is None:
        return entry
    num, den = _finite(quotient[1]), _finite(quotient[3])
    if num is None or den is None:
        return entry
    scale = _in_ms(quotient[2] or quotient[4]) / _in_ms(quotient[4] or quotient[2])
    if not _agrees(match[1], quotient[1], quotient[3], scale):
        said = rest.lstrip("(= ").rstrip(")")
        complaints.append(
            f"Relative speed {match[1]} contradicts its parentheses, {said} = {_divided(num * scale, den)}"
        )
    return entry | {"num": num, "den": den}


def _time(body: str, complaints: list[str]) -> Entry | None:
    match = _TIME.search(body)
    if match is None:
        return None
    framework, _, model = body[: match.start()].strip().partition(" ")
    mean, total, times = _finite(match[1]), _finite(match[3]), int(match[5])
    if not re.match(r"\w", framework) or mean is None or total is None:
        return None
    mean_unit, total_unit = match[2] or match[4] or "s", match[4] or match[2] or "s"
    scale = _in_ms(total_unit) / _in_ms(mean_unit)
    name = body[: match.start()].strip()
    if not _agrees(match[1], match[3], match[5], scale, whole=True):
        complaints.append(
            f"the time of {name}, {match[1]}{match[2] or ''}, contradicts its parentheses, "
            f"{match[3]}{match[4] or ''} / {times} = {_divided(total * scale, times)}"
        )
    elif mean_unit != total_unit:
        complaints.append(
            f"the time of {name} is in {mean_unit}, its total in {total_unit}: the total is kept as it stands"
        )
    entry = _time_entry(framework, model.strip() or None, mean, mean_unit, total=total, times=times)
    return entry | _labels(body[match.end() :], complaints)


def _short_time(body: str, _: list[str]) -> Entry | None:
    match = _SHORT_TIME.fullmatch(body)
    mean = _finite(match[2]) if match else None
    # Nothing but the digits tells `Flow: 38.0ms` from `Elapsed: 12s`: this dialect has one for ms and three for s.
    if match is None or mean is None or _decimals(match[2]) != {"ms": 1, "s": 3}[match[3]]:
        return None
    return _time_entry(match[1], None, mean, match[3])


def _time_entry(
    framework: str, model: str | None, mean: float, unit: str, total: float | None = None, times: int | None = None
) -> Entry:
    return {
        "kind": "time",
        "framework": framework,
        "model": model,
        "mean": mean,
        "total": total,
        "unit": unit,
        "times": times,
        "input_shape": None,
        "num_workers": None,
        "backward": None,
        "ddp": False,
        "world_size": None,
        "broadcast_buffers": True,
    }


def _labels(text: str, complaints: list[str]) -> Entry:
    """What the labels after the count say; only the keys that they mention."""
    said: Entry = {}
    shape = _SHAPE.search(text)
    if shape:
        sizes = shape[1].replace(",", " ").split()
        said["input_shape"] = [int(size) for size in sizes] if all(len(size) < 16 for size in sizes) else None
        text = text[: shape.start()] + text[shape.end() :]
    unknown: list[str] = []
    for label in text.partition(")")[0].split(","):
        label = label.strip()
        number, state = _LABEL.fullmatch(label), _STATE.fullmatch(label)
        if number:
            said[number[1].replace(" ", "_")] = int(number[2])
        elif state:
            said["backward" if state[1] == "backward" else "broadcast_buffers"] = state[2] == "enabled"
        elif label == "ddp":
            said["ddp"] = True
        elif label and not _OUR_LABEL.fullmatch(label):
            unknown.append(label)
    if unknown:
        others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
        complaints.append(f"label {unknown[0][:80]!r}{others} is not understood and left out")
    return said


def _memory(body: str, _: list[str]) -> Entry | None:
    match = _MEMORY.match(body)
    if match is None:
        return None
    mib = float(match[5]) if "." in match[5] else int(match[5])
    entry: Entry = {
        "kind": "memory",
        "framework": match[1],
        "rank": int(match[3]),
        "mib": mib,
        "estimated": match[4] is not None,
    }
    return entry if match[2] == "GPU used" else entry | {"what": match[2]}


def _agrees(value: str, num: str, den: str, scale: float, whole: bool = False) -> bool:
    """Whether `value` can be the rounded `num * scale / den`, each rounded to the digits it is written with."""
    slack_value, slack_num = _half_digit(value), _half_digit(num)
    slack_den = 0.0 if whole else _half_digit(den)
    low = (float(num) - slack_num) * scale / (float(den) + slack_den) if float(den) + slack_den > 0 else 0.0
    high = (float(num) + slack_num) * scale / (float(den) - slack_den) if float(den) > slack_den else math.inf
    if whole and float(den) == 0:
        return False
    slack = slack_value + 1e-9 * max(float(value), 1e-300)
    return low - slack <= float(value) <= high + slack


def _half_digit(number: str) -> float:
    exponent = re.search(r"[eE]([+-]?[0-9]+)", number)
    return 0.5 * 10.0 ** ((int(exponent[1]) if exponent else 0) - _decimals(number))


def _decimals(number: str) -> int:
    return len(re.split("[eE]", number)[0].partition(".")[2])


def _divided(num: float, den: float) -> str:
    return f"{num / den:.4g}" if den else "nothing that can be divided"


def _in_ms(unit: str | None) -> float:
    return 1.0 if unit == "ms" else 1000.0


def _finite(number: str) -> float | None:
    value = float(number)
    return value if math.isfinite(value) else None
