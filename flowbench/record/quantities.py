"""The quantities that records are made of, with the bounds within which they can be true."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from flowbench.codec import CodecError, Limit, describe


@dataclass(frozen=True)
class IsoTime:
    """That a text is a moment as `datetime.fromisoformat` reads it, with its time zone; put on a field with `Annotated`."""

    def check(self, value: str, path: str) -> None:
        """Raise CodecError where `value` is none."""
        try:
            zoned = datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            zoned = False
        if not zoned:
            raise CodecError(path, describe(value), "a time with its zone, such as 2026-11-29T13:00:00+00:00")

    def schema(self, _: dict[str, Any]) -> dict[str, Any]:
        """The same in JSON schema's words."""
        return {"format": "date-time"}


# A step of less than a nanosecond or of more than eleven days was not measured: the clock or the file is wrong.
Milliseconds = Annotated[float, Limit(above=0, minimum=1e-6, maximum=1e9)]
Seconds = Annotated[float, Limit(above=0)]
Bytes = Annotated[int, Limit(minimum=0)]
Index = Annotated[int, Limit(minimum=0)]
Moment = Annotated[str, Limit(max_length=200), IsoTime()]
Text = Annotated[str, Limit(max_length=20_000)]
