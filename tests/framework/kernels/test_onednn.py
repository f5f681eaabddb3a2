"""oneDNN's kernels pass the check that every table passes, and take the fast way where it matters."""

from __future__ import annotations

import pytest

from framework.device import cpu
from framework.dtype import float32, float64
from framework.kernels import onednn, reference
from tests.framework.kernels import check

pytestmark = pytest.mark.skipif(not onednn.available(), reason=onednn.why())


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64)))
def test_values(name, case, dtype):
    check.kernel(cpu, onednn.table(reference.TABLE), name, case, dtype)
