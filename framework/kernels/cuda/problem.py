"""What an algorithm is looked for: a convolution of one kind, and the settings that restrict the choice."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from framework import backends
from framework.dtype import by_name

FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward_input", "backward_weight"
# What a convolution of any size may use.
_SMALL_WORKSPACE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Problem:
    """A convolution to find an algorithm for. All operands lie NHWC; `y` is the output's shape, padding is symmetric."""

    kind: str
    dtype: str
    x: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    y: tuple[int, int, int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """What restricts the choice; see `framework.backends`."""

    allow_tf32: bool
    deterministic: bool
    workspace_bytes: int
    timed_plans: int


def current_settings() -> Settings:
    """Those of `framework.backends` now."""
    cudnn_settings = backends.cudnn
    return Settings(
        cudnn_settings.allow_tf32,
        backends.deterministic,
        cudnn_settings.workspace_bytes,
        cudnn_settings.timed_plans,
    )


def workspace_limit(problem: Problem, wanted: Settings) -> int:
    """The most scratch memory for a convolution, in bytes: for a small one, a fast algorithm must not set a step's peak."""
    operands = sum(prod(shape) for shape in (problem.x, problem.weight, problem.y)) * by_name(problem.dtype).itemsize
    return min(wanted.workspace_bytes, max(_SMALL_WORKSPACE_BYTES, 2 * operands))
