"""What every test may ask for, and how property tests behave on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run, and no deadline: a neighbour's load must not fail a test.
settings.register_profile("house", derandomize=True, deadline=None)
settings.load_profile("house")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent
