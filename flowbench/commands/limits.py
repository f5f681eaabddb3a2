"""Where limits are read from: the file that is named, or the one that lies where the command is run."""

from __future__ import annotations

from pathlib import Path

from flowbench.errors import FlowbenchError

LIMITS = "flowbench.toml"


def limits_text(given: Path | None) -> tuple[str, str] | None:
    """The text of the limits and the name of their file; None where there are none."""
    path = given or Path(LIMITS)
    if given is None and not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise FlowbenchError(f"{path}: {getattr(error, 'strerror', None) or error}, expected limits in TOML") from None
