"""What is kept on disk between processes, in the user's cache folder: one file for each entry, found by a digest."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path


def folder() -> Path:
    """Where entries lie: `flow` in $XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flow"


def read(kind: str, key: str) -> bytes | None:
    """The entry of a kind under `key`; None where there is none."""
    try:
        return _path(kind, key).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as refused:
        _warn(refused)
        return None


def write(kind: str, key: str, content: bytes) -> None:
    """Keeps an entry. Other processes see all of it or nothing; where the disk refuses, a warning says so."""
    path = _path(kind, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as whole:
            whole.write(content)
        os.replace(whole.name, path)
    except OSError as refused:
        _warn(refused)


def _path(kind: str, key: str) -> Path:
    return folder() / kind / hashlib.sha256(key.encode()).hexdigest()[:40]


def _warn(refused: OSError) -> None:
    warnings.warn(f"the cache in {folder()} cannot be used, so every process starts slower: {refused}", stacklevel=3)
