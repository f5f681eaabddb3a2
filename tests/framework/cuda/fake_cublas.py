"""What cuBLAS does with a request, on the host: NumPy multiplies what lies at the addresses, by column-major rules."""

from __future__ import annotations

import ctypes

import numpy as np

from framework.device import Device, cpu
from framework.dtype import by_name
from framework.kernels.cuda.cublas import Matrix, Request


class FakeProduct:
    """Stands for a product of cuBLASLt's, and for the plan that runs it."""

    def __init__(self, request: Request, workspace_bytes: int = 0, device: Device = cpu) -> None:
        self.request = request
        self.workspace_bytes = workspace_bytes
        self.device = device

    def run(self, a: int, b: int, d: int, bias: int = 0) -> None:
        request = self.request
        left, right = _view(a, request.a, request), _view(b, request.b, request)
        product = left @ right
        if request.has_bias:
            product = product + _memory(bias, product.shape[1], request.dtype)[:, None]
        assert not request.d.transposed
        _view(d, request.d, request)[...] = product

    def learn(self, a: int, b: int, d: int, bias: int = 0) -> None:
        """There are no launches to look at."""

    def launch(self, stream: int, a: int, b: int, d: int, workspace: int) -> None:
        self.run(a, b, d)

    def text(self) -> bytes:
        return repr(self.request).encode()


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
