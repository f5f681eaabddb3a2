"""How operands of any strides are handed to cuBLAS, checked on the host: NumPy stands in for cuBLAS and the copies."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from framework.device import cpu
from framework.dtype import by_name, float32, float64
from framework.kernels import reference
from framework.kernels.cuda import linear
from framework.kernels.cuda.cublas import Matrix, Request
from framework.kernels.reference import elementwise, reduction
from framework.kernels.table import Table
from tests.framework.kernels import check

NAMES = ("matmul", "linear", "linear_backward")


class _Product:
    """What cuBLAS does with a request, by its column-major rules."""

    def __init__(self, request: Request) -> None:
        self.request = request

    def run(self, a: int, b: int, d: int, bias: int = 0) -> None:
        request = self.request
        left, right = _view(a, request.a, request), _view(b, request.b, request)
        product = left @ right
        if request.has_bias:
            product = product + _memory(bias, product.shape[1], request.dtype)[:, None]
        assert not request.d.transposed
        _view(d, request.d, request)[...] = product


def _view(address: int, matrix: Matrix, request: Request) -> np.ndarray:
    """The batch [count, rows, columns] that an operand stands for, transposed where the request says so."""
    assert matrix.leading >= matrix.rows
    assert address % request.alignment == 0
    count, rows, columns = request.batch, matrix.rows, matrix.columns
    last = (count - 1) * matrix.batch_stride + (columns - 1) * matrix.leading + rows
    memory = _memory(address, last, request.dtype)
    steps = [step * memory.itemsize for step in (matrix.batch_stride, 1, matrix.leading)]
    view = np.lib.stride_tricks.as_strided(memory, (count, rows, columns), steps)
    return view.transpose(0, 2, 1) if matrix.transposed else view


def _memory(address: int, count: int, dtype: str) -> np.ndarray:
    kind = by_name(dtype).numpy
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(address), kind)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(linear, "_direct", {})
    monkeypatch.setattr(linear, "elementwise", elementwise)
    monkeypatch.setattr(linear, "reduction", reduction)
    monkeypatch.setattr(linear.cublas, "product", lambda device, request: _Product(request))
    kernels = {name: getattr(linear, name) for name in NAMES}
    return Table(
        "cublas",
        kernels,
        batch_norm_mask_bytes=reference.TABLE.batch_norm_mask_bytes,
        max_pool2d_indices=reference.TABLE.max_pool2d_indices,
    )


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64), names=NAMES))
def test_operands_reach_cublas(table, name, case, dtype):
    check.kernel(cpu, table, name, case, dtype)
    # Once more, by what the first round prepared.
    check.kernel(cpu, table, name, case, dtype)
