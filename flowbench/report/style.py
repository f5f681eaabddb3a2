"""How a report may look: the colours and characters a terminal can show, the templates a user has put in place of ours."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Colour = Literal["red", "green", "yellow", "bold"]
_CODES: Mapping[Colour, str] = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}
_LIKE = {
    "…": "...",
    "→": "->",
    "×": "x",
    "–": "-",
    "−": "-",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "✓": "*",
    "✕": "x",
    "±": "+/-",
}
# The characters beyond ASCII that reports write of themselves.
SPECIAL = "".join(_LIKE)
_TABLE = {ord(character): like for character, like in _LIKE.items()}


@dataclass(frozen=True)
class Style:
    """`templates` maps names (`templating.TEMPLATES`) to texts; `colour` and `ascii_only` are for a terminal."""

    colour: bool = False
    ascii_only: bool = False
    templates: Mapping[str, str] = field(default_factory=dict)

    def paint(self, text: str, colour: Colour | None) -> str:
        """`text` in a colour, where colours are wanted."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and colour and text else text

    def shown(self, text: str) -> str:
        """`text` in characters that can be shown: in ASCII, `é` is `e` and what has no likeness is `?`."""
        if not self.ascii_only:
            return text
        plain = unicodedata.normalize("NFKD", text.translate(_TABLE))
        return (
            "".join(letter for letter in plain if not unicodedata.combining(letter)).encode("ascii", "replace").decode()
        )
