"""What the tests on CUDA devices share: they are skipped, with the reason, where there is none."""

from __future__ import annotations

import pytest

import framework as flow


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not flow.cuda.is_available():
        pytest.skip(flow.cuda.why() or "")


@pytest.fixture
def settings():
    """The settings of cuDNN and of matrix products, put back afterwards."""
    cudnn, matmul = flow.backends.cudnn, flow.backends.cuda.matmul
    before = (
        cudnn.allow_tf32,
        cudnn.workspace_bytes,
        cudnn.timed_plans,
        matmul.allow_tf32,
        flow.backends.deterministic,
    )
    yield flow.backends
    cudnn.allow_tf32, cudnn.workspace_bytes, cudnn.timed_plans, matmul.allow_tf32, flow.backends.deterministic = before
