"""What an eager operation costs the host: tiny tensors, autograd recording, Flow beside PyTorch.

Both run in this process, one after the other: an operation on four numbers starts no threads and touches no cache.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

BAR_US = 10.0
OPERATIONS = ("add", "multiply", "relu", "matmul")


def flow_operation(name: str) -> Callable[[], object]:
    """One operation of Flow on 2×2 tensors whose gradients are wanted."""
    flow = pytest.importorskip("framework")
    a, b = (flow.ones(2, 2).requires_grad_() for _ in range(2))
    calls = {"add": lambda: a + b, "multiply": lambda: a * b, "relu": lambda: flow.relu(a), "matmul": lambda: a @ b}
    return calls[name]


def torch_operation(name: str) -> Callable[[], object]:
    """The same operation of PyTorch."""
    torch = pytest.importorskip("torch")
    a, b = (torch.ones(2, 2).requires_grad_() for _ in range(2))
    calls = {"add": lambda: a + b, "multiply": lambda: a * b, "relu": lambda: torch.relu(a), "matmul": lambda: a @ b}
    return calls[name]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch(benchmark, operation: str) -> None:
    benchmark.group = f"eager {operation}, 2×2, recording"
    benchmark(torch_operation(operation))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_flow(benchmark, operation: str) -> None:
    benchmark.group = f"eager {operation}, 2×2, recording"
    benchmark(flow_operation(operation))
    if benchmark.enabled:
        median_us = benchmark.stats.stats.median * 1e6
        assert median_us <= BAR_US, (
            f"{operation} takes {median_us:.1f} µs, the bar is {BAR_US:g} (is the machine busy?)"
        )
