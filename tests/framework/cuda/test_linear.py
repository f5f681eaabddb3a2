"""How operands of any strides are handed to cuBLAS, checked on the host: NumPy stands in for cuBLAS and the copies."""

from __future__ import annotations

import pytest

from framework.device import cpu
from framework.dtype import float32, float64
from framework.kernels import reference
from framework.kernels.cuda import linear
from framework.kernels.reference import elementwise, reduction
from framework.kernels.table import Table
from tests.framework.cuda.fake_cublas import FakeProduct
from tests.framework.kernels import check

NAMES = ("matmul", "linear", "linear_backward")


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(linear, "_direct", {})
    monkeypatch.setattr(linear, "elementwise", elementwise)
    monkeypatch.setattr(linear, "reduction", reduction)
    monkeypatch.setattr(linear, "_plan", lambda device, request: FakeProduct(request))
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
