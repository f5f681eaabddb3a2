"""The reference kernels: in every layout, in float32 and float64, they give what they give in float64, row-major."""

from __future__ import annotations

import pytest

from framework.device import cpu
from framework.dtype import DType, float32, float64
from framework.kernels import reference
from tests.framework.kernels import check
from tests.framework.kernels.cases import CASES, Case


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64)))
def test_values_in_every_layout(name: str, case: Case, dtype: DType) -> None:
    check.kernel(cpu, reference.TABLE, name, case, dtype)


def test_every_kernel_has_cases() -> None:
    assert set(reference.TABLE.kernels) == set(CASES)
