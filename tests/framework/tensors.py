"""Small tensors for tests."""

from __future__ import annotations

import framework as flow


def leaf(*values: float) -> flow.Tensor:
    """A float32 vector that requires a gradient."""
    return flow.tensor([float(value) for value in values], requires_grad=True)
