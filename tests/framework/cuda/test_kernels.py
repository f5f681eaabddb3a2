"""CUDA's kernels pass the check that every table passes, can be captured, and leave none of the reference's out."""

from __future__ import annotations

import numpy as np
import pytest

import framework as flow
from framework.dtype import bfloat16, float32, float64
from framework.vm import Array, cuda, machine, runtime
from tests.framework.kernels import check
from tests.framework.kernels.cases import Alias, InOut

pytestmark = pytest.mark.gpu

BFLOAT16_EPSILON = 2.0**-8
# Drawn bit by bit from one formula; their own tests compare them.
DRAWN = ("random_uniform", "random_normal")


@pytest.fixture(autouse=True)
def _precise(settings):
    """Full float32, and no time spent on choosing algorithms."""
    settings.cudnn.allow_tf32 = False
    settings.cudnn.timed_plans = 1


def _device():
    return flow.device("cuda")


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64)))
def test_values(name, case, dtype):
    check.kernel(_device(), runtime(_device()).table, name, case, dtype)


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(bfloat16,)))
def test_values_of_bfloat16(name, case, dtype):
    check.kernel(_device(), runtime(_device()).table, name, case, dtype, epsilon=BFLOAT16_EPSILON)


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases())
def test_every_kernel_can_be_captured(name, case, dtype):
    if any(isinstance(output, InOut | Alias) for output in case.outputs):
        pytest.skip("a second run would update what the first one did")
    kernels = runtime(_device())

    def replayed(instruction, run):
        if instruction.kernel is not kernels.table.kernels[name]:
            run()
            return
        run()
        _replay(kernels.compute.pointer, run)

    with machine.observed(replayed):
        check.kernel(_device(), kernels.table, name, case, dtype)


def _replay(stream: int, run) -> None:
    api = cuda.api()
    api.streamBeginCapture(stream, api.streamCaptureModeGlobal)
    try:
        run()
    finally:
        graph = api.streamEndCapture(stream)
    executable = api.graphInstantiate(graph)
    api.graphLaunch(executable, stream)
    api.streamSynchronize(stream)
    api.graphExecDestroy(executable)
    api.graphDestroy(graph)


CONVOLUTIONS = {
    "first of a ResNet": ((4, 3, 64, 64), (16, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1),
    "first, odd image": ((2, 3, 33, 31), (8, 3, 3, 3), (2, 2), (1, 1), (1, 1), 1),
    "first, no padding": ((2, 1, 28, 28), (8, 1, 5, 5), (2, 2), (0, 0), (1, 1), 1),
    "3×3": ((4, 32, 14, 14), (64, 32, 3, 3), (1, 1), (1, 1), (1, 1), 1),
    "1×1 with stride": ((4, 64, 14, 14), (128, 64, 1, 1), (2, 2), (0, 0), (1, 1), 1),
    "grouped": ((4, 32, 14, 14), (64, 8, 3, 3), (1, 1), (1, 1), (1, 1), 4),
    "depthwise": ((4, 32, 14, 14), (32, 1, 3, 3), (1, 1), (1, 1), (1, 1), 32),
    "dilated": ((2, 16, 20, 20), (16, 16, 3, 3), (1, 1), (2, 2), (2, 2), 1),
    "odd channels": ((2, 5, 9, 9), (7, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),
}


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_against_float64(settings, case, allow_tf32):
    settings.cudnn.allow_tf32 = allow_tf32
    settings.cudnn.timed_plans = 3
    for got, expected in _convolve(*CONVOLUTIONS[case]):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < (1e-3 if allow_tf32 else 2e-5)


def test_a_batch_is_cut_where_only_that_fits_the_workspace(settings):
    settings.cudnn.allow_tf32 = True
    settings.cudnn.timed_plans = 2
    settings.cudnn.workspace_bytes = 2 * 1024 * 1024
    for got, expected in _convolve((8, 3, 96, 96), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1), 1):
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-3


def _convolve(x_shape, weight_shape, stride, padding, dilation, groups):
    """(result, reference in float64) of forward and both backward passes."""
    random = np.random.default_rng(7)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x, weight = random.standard_normal(x_shape), random.standard_normal(weight_shape)
    pairs = []
    results = {}
    for device, dtype in ((_device(), flow.float32), (flow.device("cpu"), flow.float64)):
        images = flow.tensor(x, dtype=dtype, device=device, requires_grad=True)
        weights = flow.tensor(weight, dtype=dtype, device=device, requires_grad=True)
        y = flow.nn.functional.conv2d(images, weights, **geometry)
        gradient = np.random.default_rng(8).standard_normal(y.shape)
        y.backward(flow.tensor(gradient, dtype=dtype, device=device))
        results[device.type] = [t.detach().to("cpu").numpy() for t in (y, images.grad, weights.grad)]
    pairs += zip(results["cuda"], results["cpu"], strict=True)
    return pairs


def test_deterministic_convolutions_repeat_their_bits(settings):
    settings.deterministic = True
    settings.cudnn.allow_tf32 = True
    first, second = (_convolve((8, 64, 28, 28), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1), 1) for _ in range(2))
    for (a, _), (b, _) in zip(first, second, strict=True):
        assert np.array_equal(a, b)


def test_matrix_products_in_full_float32_unless_tf32_is_allowed(settings):
    random = np.random.default_rng(3)
    a, b = random.standard_normal((300, 500)), random.standard_normal((500, 200))
    errors = []
    for settings.cuda.matmul.allow_tf32 in (False, True):
        c = flow.tensor(a, dtype=flow.float32, device="cuda") @ flow.tensor(b, dtype=flow.float32, device="cuda")
        errors.append(np.linalg.norm(c.to("cpu").numpy() - a @ b) / np.linalg.norm(a @ b))
    assert errors[0] < 1e-6 < errors[1] < 1e-3


def test_batched_products_with_broadcast_and_transposed_operands():
    random = np.random.default_rng(4)
    for a_shape, b_shape in (
        ((2, 3, 4, 5), (5, 6)),
        ((3, 4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 1)),
        ((1, 5), (5, 1)),
    ):
        a, b = random.standard_normal(a_shape), random.standard_normal(b_shape)
        on_device = [flow.tensor(v, dtype=flow.float64, device="cuda") for v in (a, b)]
        assert np.allclose((on_device[0] @ on_device[1]).to("cpu").numpy(), a @ b, rtol=1e-12)
        swapped = on_device[1].transpose(-1, -2) if b.ndim > 1 else on_device[1]
        assert np.allclose((swapped @ on_device[0].transpose(-1, -2)).to("cpu").numpy(), np.swapaxes(a @ b, -1, -2))


def test_a_kernel_that_is_missing_is_named():
    with pytest.raises(AttributeError, match="cuda:0 has no kernel called 'fold_paper'"):
        runtime(_device()).fold_paper(Array)
