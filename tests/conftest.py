"""What every test may ask for, and how property tests behave on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The same examples at every run, and no deadline: a neighbour's load must not fail a test.
settings.register_profile("house", derandomize=True, deadline=None)
settings.load_profile("house")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the tests (pytest-xdist), those that need a GPU stay together: one at a time has it to itself."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent
