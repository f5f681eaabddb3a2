"""Strict reading and writing of frozen dataclasses as JSON, and their JSON schema, all from the same type hints."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
_Decoder = Callable[[Any, str], Any]
_BEYOND = 2**63  # tables and other tools' integers end here, and ratios can be taken of what is below
_SCHEMA_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class CodecError(ValueError):
    """A value that does not fit its type: `path` says where, `given` what was found, `expected` what belongs there."""

    def __init__(self, path: str, given: str, expected: str) -> None:
        super().__init__(f"at {path}: given {given}, expected {expected}")
        self.path, self.given, self.expected = path, given, expected


@dataclass(frozen=True)
class Limit:
    """Bounds of a number or of a length, put on a field with `Annotated`."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    max_length: int | None = None

    def check(self, value: Any, path: str) -> None:
        """Raise CodecError where `value` is out of bounds."""
        if self.above is not None and value <= self.above:
            raise CodecError(path, describe(value), f"more than {self.above:g}")
        if self.minimum is not None and value < self.minimum:
            raise CodecError(path, describe(value), f"at least {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise CodecError(path, describe(value), f"at most {self.maximum:g}")
        if self.max_length is not None and len(value) > self.max_length:
            what = "characters" if isinstance(value, str) else "entries"
            raise CodecError(path, f"{len(value)} {what}", f"at most {self.max_length}")

    def schema(self, of: dict[str, Any]) -> dict[str, Any]:
        """The bounds in JSON schema's words, for a value of the schema `of`."""
        words = {"minimum": self.minimum, "maximum": self.maximum, "exclusiveMinimum": self.above}
        words |= {"maxItems" if of.get("type") == "array" else "maxLength": self.max_length}
        return {word: bound for word, bound in words.items() if bound is not None}


def decode(hint: Any, value: Any, path: str = "$") -> Any:
    """Turn parsed JSON into `hint`'s type; raises CodecError at the first thing that does not fit."""
    return _decoder(hint)(value, path)


def encode(value: Any) -> Any:
    """Turn records into what `json.dumps(..., allow_nan=False)` writes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of `hint`; records are collected in `definitions` and referred to."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        name = hint.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _record_schema(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        bounded = schema(arguments[0], definitions)
        for limit in arguments[1:]:
            bounded |= limit.schema(bounded)
        return bounded
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema(argument, definitions) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": schema(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": schema(arguments[1], definitions)}
    return {"type": _SCHEMA_TYPES[hint]}


def describe(value: Any) -> str:
    """A short name of a JSON value for an error line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)[:40]


@functools.cache
def _decoder(hint: Any) -> _Decoder:
    """What turns JSON into `hint`'s type: a document has hundreds of thousands of values, but few types."""
    if dataclasses.is_dataclass(hint):
        return functools.partial(_decode_record, hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return functools.partial(_decode_limited, _decoder(arguments[0]), arguments[1:])
    if origin in (Union, types.UnionType):
        return functools.partial(_decode_optional, _decoder(_without_null(hint)))
    if origin is Literal:
        return functools.partial(_decode_choice, arguments)
    if origin is tuple:
        return functools.partial(_decode_tuple, _decoder(arguments[0]), _limits_of_floats(arguments[0]))
    if origin is dict:
        return functools.partial(_decode_dict, _decoder(arguments[1]))
    return functools.partial(_decode_scalar, hint)


@functools.cache
def _hints(record: type) -> dict[str, Any]:
    return typing.get_type_hints(record, include_extras=True)


@functools.cache
def _decoders(record: type) -> dict[str, _Decoder]:
    return {key: _decoder(hint) for key, hint in _hints(record).items()}


@functools.cache
def _required(record: Any) -> list[str]:
    """The keys that have to be there: all but those that came later, whose field has a default."""
    return [
        field.name
        for field in dataclasses.fields(record)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]


def _decode_record(record: Any, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise CodecError(path, describe(value), f"an object ({record.__name__})")
    decoders = _decoders(record)
    for key in value:
        if key not in decoders:
            raise CodecError(f"{path}.{key[:60]}", "an unknown key", "one of " + ", ".join(decoders))
    for key in _required(record):
        if key not in value:
            raise CodecError(f"{path}.{key}", "nothing", f"this key of {record.__name__}")
    decoded = {key: decoder(value[key], f"{path}.{key}") for key, decoder in decoders.items() if key in value}
    try:
        return record(**decoded)
    except CodecError as error:
        raise CodecError(error.path.replace("$", path, 1), error.given, error.expected) from None


def _decode_limited(decoder: _Decoder, limits: tuple[Any, ...], value: Any, path: str) -> Any:
    decoded = decoder(value, path)
    for limit in limits:
        if decoded is not None:
            limit.check(decoded, path)
    return decoded


def _decode_optional(decoder: _Decoder, value: Any, path: str) -> Any:
    return None if value is None else decoder(value, path)


def _decode_choice(choices: tuple[str, ...], value: Any, path: str) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise CodecError(path, describe(value), "one of " + ", ".join(map(repr, choices)))
    return value


def _decode_dict(decoder: _Decoder, value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CodecError(path, describe(value), "an object")
    for key in value:
        _check_text(key, path)
    return {key: decoder(item, f"{path}.{key}") for key, item in value.items()}


def _decode_tuple(decoder: _Decoder, of_floats: tuple[Limit, ...] | None, value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise CodecError(path, describe(value), "a list")
    if of_floats is not None and _are_plain_numbers(of_floats, value):
        return tuple(value)
    return tuple(decoder(item, f"{path}[{index}]") for index, item in enumerate(value))


def _limits_of_floats(hint: Any) -> tuple[Limit, ...] | None:
    """The bounds of a type of numbers with fractions, null or not; None for another type."""
    limits: tuple[Limit, ...] = ()
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = _without_null(hint)
    if typing.get_origin(hint) is typing.Annotated:
        hint, *more = typing.get_args(hint)
        limits = tuple(more)
    return limits if hint is float else None


def _are_plain_numbers(limits: tuple[Limit, ...], values: list[Any]) -> bool:
    """Whether `values` are all finite floats within `limits`, which is so of nearly all of a document: found at once."""
    if not values or set(map(type, values)) != {float} or not all(map(math.isfinite, values)):
        return False
    try:
        for limit in limits:
            limit.check(min(values), "")
            limit.check(max(values), "")
    except CodecError:
        return False  # the slow way says which one
    return True


def _without_null(hint: Any) -> Any:
    """The one type of a union that may be null."""
    (other,) = (argument for argument in typing.get_args(hint) if argument is not type(None))
    return other


def _decode_scalar(hint: Any, value: Any, path: str) -> Any:
    fits = isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if not fits:
        raise CodecError(path, describe(value), _NAMES[hint])
    if hint is float and not math.isfinite(value):
        raise CodecError(path, str(value), "a finite number")
    if hint is int and abs(value) >= _BEYOND:
        raise CodecError(path, describe(value), "a whole number of less than 64 bits")
    if hint is str:
        _check_text(value, path)
    return value


def _check_text(value: str, path: str) -> None:
    """JSON can have half of a character (`\\ud800`), which no file and no terminal takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CodecError(path, describe(value), "text of whole characters") from None


def _record_schema(record: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": (record.__doc__ or "").strip().split("\n\n")[0].replace("\n", " "),
        "properties": {key: schema(hint, definitions) for key, hint in _hints(record).items()},
        "required": _required(record),
        "additionalProperties": False,
    }
