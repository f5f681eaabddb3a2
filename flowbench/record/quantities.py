"""The quantities that records are made of, with the bounds within which they can be true."""

from __future__ import annotations

from typing import Annotated

from flowbench.codec import Limit

# A step of less than a nanosecond or of more than eleven days was not measured: the clock or the file is wrong.
Milliseconds = Annotated[float, Limit(above=0, minimum=1e-6, maximum=1e9)]
Seconds = Annotated[float, Limit(above=0)]
Bytes = Annotated[int, Limit(minimum=0)]
Index = Annotated[int, Limit(minimum=0)]
Text = Annotated[str, Limit(max_length=20_000)]
