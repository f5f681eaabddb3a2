"""Gradients of pointwise convolutions as matrix products through cuBLASLt, which is faster than cuDNN for some shapes.

A window of 1×1 that moves by 1 makes each gradient one product. By columns, as cuBLAS counts, NHWC operands with C channels
of x, K of y and P pixels are the matrices x [C, P], weight [C, K] and y [K, P], all dense.
"""

from __future__ import annotations

from framework.device import Device
from framework.kernels.cuda import cublas, launches, plan
from framework.kernels.cuda.cublas import CublasError, Matrix, Product, Request
from framework.kernels.cuda.problem import BACKWARD_INPUT, BACKWARD_WEIGHT, Problem, Settings, workspace_limit

# For each kind, which of x, weight and y are the factors and the product: grad_x = weight · grad_y, grad_weight = x · grad_yᵀ.
# Forward is not: in a step of ResNet50 cuBLASLt gained nothing there, and each candidate delays the first step.
_ROLES = {BACKWARD_INPUT: (1, 2, 0), BACKWARD_WEIGHT: (0, 2, 1)}
_ALIGNMENT = 16


class Plan(plan.Plan):
    """One of cuBLASLt's algorithms for a gradient."""

    __slots__ = ("_product", "_roles")
    library = "cuBLASLt"

    def __init__(self, kind: str, product: Product) -> None:
        super().__init__(product.device, product.workspace_bytes)
        self._product = product
        self._roles = _ROLES[kind]

    @classmethod
    def of_text(cls, problem: Problem, wanted: Settings, device: Device, text: bytes) -> Plan:
        """The plan that `text` gave on a like device. Raises ValueError or CublasError where it is none for `problem`."""
        return cls(problem.kind, cublas.restored(device, _request(problem, wanted), text))

    def text(self) -> bytes:
        """For `of_text`."""
        return self._product.text()

    def _run_by_library(self, stream: int, at: launches.Addresses) -> None:
        a, b, d = self._roles
        self._product.launch(stream, at[a], at[b], at[d], at[3])


def applies(problem: Problem, wanted: Settings) -> bool:
    """Whether a convolution is a product that is worth timing.

    Where bits are to repeat, none is: how cuBLASLt adds up the parts of a sum that it cuts is not told.
    """
    return (
        problem.kind in _ROLES
        and problem.dtype in ("float32", "bfloat16")
        and problem.weight == (problem.y[1], problem.x[1], 1, 1)
        and (problem.stride, problem.padding) == ((1, 1), (0, 0))
        and wanted.timed_plans > 1
        and not wanted.deterministic
    )


def suggestions(problem: Problem, wanted: Settings, device: Device) -> list[Plan]:
    """Up to `timed_plans` plans within the workspace, cuBLASLt's best guess first; none where it takes no such product."""
    try:
        found = cublas.suggestions(
            device, _request(problem, wanted), wanted.timed_plans, workspace_limit(problem, wanted)
        )
    except CublasError:
        return []
    return [Plan(problem.kind, product) for product in found]


def _request(problem: Problem, wanted: Settings) -> Request:
    batch, channels, height, width = problem.x
    pixels, results = batch * height * width, problem.y[1]
    x = _matrix(channels, pixels)
    weight = _matrix(channels, results)
    y = _matrix(results, pixels, transposed=problem.kind == BACKWARD_WEIGHT)
    a, b, d = ((x, weight, y)[role] for role in _ROLES[problem.kind])
    return Request(a, b, d, 1, problem.dtype, wanted.allow_tf32, False, _ALIGNMENT)


def _matrix(rows: int, columns: int, *, transposed: bool = False) -> Matrix:
    return Matrix(rows, columns, rows, transposed, 0)
