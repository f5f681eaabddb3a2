"""The quantities that records are made of, with the bounds within which they can be true."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from flowbench.codec import CodecError, Limit, describe

_OF_TIMES = re.compile(r"[0-9TWZ:.,+ -]+")


@dataclass(frozen=True)
class IsoTime:
    """That a text is a time as `datetime.fromisoformat` reads it; put on a field with `Annotated`.

    `zoned`: with its time zone. What others wrote long ago may lack it, or be a day alone.
    """

    zoned: bool = True

    def check(self, value: str, path: str) -> None:
        """Raise CodecError where `value` is none."""
        try:
            # Between day and time `fromisoformat` takes any character: a tag's bracket, a line's end.
            fits = _OF_TIMES.fullmatch(value) is not None
            fits = fits and (datetime.fromisoformat(value).tzinfo is not None or not self.zoned)
        except ValueError:
            fits = False
        if not fits:
            expected = "a time with its zone, such as 2026-11-29T13:00:00+00:00" if self.zoned else "a date or a time"
            raise CodecError(path, describe(value), expected)

    def schema(self, _: dict[str, Any]) -> dict[str, Any]:
        """The same in JSON schema's words, which know no time without a zone."""
        return {"format": "date-time"} if self.zoned else {}


# A step of less than a nanosecond or of more than eleven days was not measured: the clock or the file is wrong.
Milliseconds = Annotated[float, Limit(above=0, minimum=1e-6, maximum=1e9)]
Seconds = Annotated[float, Limit(above=0)]
Bytes = Annotated[int, Limit(minimum=0)]
Index = Annotated[int, Limit(minimum=0)]
Moment = Annotated[str, Limit(max_length=200), IsoTime()]
Date = Annotated[str, Limit(max_length=200), IsoTime(zoned=False)]
Text = Annotated[str, Limit(max_length=20_000)]


def instant(moment: str) -> datetime:
    """The instant that a `Moment` or a `Date` names: UTC where it has no zone, never this machine's."""
    time = datetime.fromisoformat(moment)
    return time if time.tzinfo else time.replace(tzinfo=UTC)
