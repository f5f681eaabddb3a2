"""What the framework's tests share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import framework as flow


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """No garbage of earlier tests, and none is collected while a test counts the memory that tensors hold: what an
    exception or a cycle kept alive would be freed at any moment, and be taken from this test's count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for Flow, for PyTorch and for NumPy: on a busy machine threads that wait for each other take ten times
    as long as one that does all the work."""
    torch = sys.modules.get("torch")
    mine, theirs = flow.get_num_threads(), torch.get_num_threads() if torch else 1
    try:
        from threadpoolctl import threadpool_limits
    except ImportError:
        blas = nullcontext()
    else:
        blas = threadpool_limits(1, user_api="blas")
    with blas:
        flow.set_num_threads(1)
        if torch:
            torch.set_num_threads(1)
        yield
        flow.set_num_threads(mine)
        if torch:
            torch.set_num_threads(theirs)
