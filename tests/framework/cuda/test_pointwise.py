"""Gradients of pointwise convolutions by cuBLASLt: the right product, of the right operands; values against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.device import cpu
from framework.kernels.cuda import convolution, plans, pointwise
from framework.kernels.cuda.cublas import CublasError, Request
from framework.kernels.cuda.problem import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Problem,
    Settings,
    current_settings,
    workspace_limit,
)
from framework.vm import Array, borrowed, cuda, runtime
from tests.framework.cuda.fake_cublas import FakeProduct

KINDS = (BACKWARD_INPUT, BACKWARD_WEIGHT)
WANTED = Settings(allow_tf32=True, deterministic=False, workspace_bytes=1 << 28, timed_plans=8)
# Batch, channels of x and of y, height, width.
SIZES = {
    "usual": (4, 64, 128, 14, 14),
    "many pixels": (8, 64, 256, 56, 56),
    "many channels": (2, 512, 2048, 7, 7),
    "odd": (3, 13, 27, 9, 5),
    "even, but no multiple of 4": (2, 6, 10, 4, 4),
    "one of each": (1, 1, 1, 1, 1),
}


def _problem(kind: str, size: tuple[int, ...] = SIZES["usual"], dtype: str = "float32") -> Problem:
    batch, channels, results, height, width = size
    x, weight, y = (batch, channels, height, width), (results, channels, 1, 1), (batch, results, height, width)
    return Problem(kind, dtype, x, weight, y, (1, 1), (0, 0), (1, 1))


def _values(problem: Problem) -> list[np.ndarray]:
    """Random x [pixels, C], weight [K, C] and y [pixels, K] in float64, as they lie in memory."""
    random = np.random.default_rng(5)
    (batch, channels, height, width), results = problem.x, problem.y[1]
    pixels = batch * height * width
    return [random.standard_normal(shape) for shape in ((pixels, channels), (results, channels), (pixels, results))]


def _expected(problem: Problem, values: list[np.ndarray]) -> tuple[int, np.ndarray]:
    """Which of x, weight and y the gradient is, and what it is."""
    x, weight, y = values
    return (0, y @ weight) if problem.kind == BACKWARD_INPUT else (1, y.T @ x)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


# ---- on any machine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_gradient_is_the_product_of_the_right_operands(kind: str, size: str, monkeypatch: Any) -> None:
    asked: list[Any] = []

    def suggestions(device: Any, request: Request, most: int, workspace_bytes: int) -> list[FakeProduct]:
        asked.append((request, most, workspace_bytes))
        return [FakeProduct(request)]

    monkeypatch.setattr(pointwise.cublas, "suggestions", suggestions)
    monkeypatch.setattr(cuda, "launching_on", lambda device: 3)
    problem = _problem(kind, SIZES[size])
    values = _values(problem)
    place, expected = _expected(problem, values)
    # NumPy's memory lies at multiples of 16.
    given = [value.astype(np.float32) for value in values]
    given[place][...] = np.nan
    (plan,) = pointwise.suggestions(problem, WANTED, cpu)
    plan.run(*[array.ctypes.data for array in given])
    assert _error(given[place], expected) < 1e-5
    ((request, most, workspace_bytes),) = asked
    assert (request.dtype, request.allow_tf32, most) == ("float32", True, 8)
    assert workspace_bytes == workspace_limit(problem, WANTED)


@pytest.mark.parametrize("kind", KINDS)
def test_it_serves_pointwise_convolutions_alone(kind: str) -> None:
    problem = _problem(kind)
    assert pointwise.applies(problem, WANTED)
    assert pointwise.applies(replace(problem, dtype="bfloat16", dilation=(2, 2)), WANTED)
    grouped = replace(problem, weight=(128, 16, 1, 1))
    depthwise = replace(problem, weight=(64, 1, 1, 1), y=problem.x)
    window = replace(problem, weight=(128, 64, 3, 3), padding=(1, 1))
    tall = replace(problem, weight=(128, 64, 3, 1), y=(4, 128, 12, 14))
    wide = replace(problem, weight=(128, 64, 1, 3), y=(4, 128, 14, 12))
    strided = replace(problem, y=(4, 128, 7, 7), stride=(2, 2))
    padded = replace(problem, y=(4, 128, 16, 16), padding=(1, 1))
    precise = replace(problem, dtype="float64")
    others = (replace(problem, kind=FORWARD), grouped, depthwise, window, tall, wide, strided, padded, precise)
    assert [pointwise.applies(other, WANTED) for other in others] == [False] * len(others)


@pytest.mark.parametrize("settings", [replace(WANTED, deterministic=True), replace(WANTED, timed_plans=1)])
def test_it_serves_neither_repeated_bits_nor_who_has_nothing_timed(settings: Settings) -> None:
    assert not pointwise.applies(_problem(BACKWARD_INPUT), settings)


def test_what_cublas_does_not_take_has_no_suggestions(monkeypatch: Any) -> None:
    def refuse(*_: Any) -> list[Any]:
        raise CublasError("cublasLtMatmulAlgoGetHeuristic", 15)

    monkeypatch.setattr(pointwise.cublas, "suggestions", refuse)
    assert pointwise.suggestions(_problem(BACKWARD_INPUT), WANTED, cpu) == []


# ---- on a GPU

gpu = pytest.mark.gpu


class OnDevice:
    """The operands of a problem on the GPU; the gradient is no number until it is written."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device = flow.device("cuda")
        dtype = {"float32": flow.float32, "bfloat16": flow.bfloat16}[problem.dtype]
        self._tensors = [flow.tensor(value, dtype=dtype, device="cuda") for value in _values(problem)]
        self.place, self.expected = _expected(problem, [self._values_of(place) for place in range(3)])
        self.forget()

    def forget(self) -> None:
        """Lets the gradient be no number again, elsewhere in memory."""
        old = self._tensors[self.place]
        self._tensors[self.place] = flow.full(old.shape, float("nan"), dtype=old.dtype, device="cuda")

    @property
    def addresses(self) -> tuple[int, int, int]:
        flow.cuda.synchronize()
        x, weight, y = (tensor.array.ptr for tensor in self._tensors)
        return x, weight, y

    def gradient(self) -> np.ndarray:
        cuda.api().streamSynchronize(cuda.stream_pointer(self.device))
        return self._values_of(self.place)

    def _values_of(self, place: int) -> np.ndarray:
        return self._tensors[place].to(flow.float32).to("cpu").numpy().astype(np.float64)

    def plans(self, wanted: Settings) -> list[pointwise.Plan]:
        found = pointwise.suggestions(self.problem, wanted, self.device)
        # Of products whose columns are no multiples of 16 bytes cuBLASLt need not have any.
        is_odd = any(channels % 8 for channels in (self.problem.x[1], self.problem.y[1]))
        assert (0 if is_odd else 1) <= len(found) <= wanted.timed_plans
        assert all(plan.workspace_bytes <= workspace_limit(self.problem, wanted) for plan in found)
        return found

    @contextmanager
    def room_for(self, plan: pointwise.Plan) -> Iterator[None]:
        with borrowed(self.device, plan.workspace_bytes) as scratch, plan.working_in(scratch):
            yield


def _bound(on_device: OnDevice, wanted: Settings) -> float:
    """The error that is allowed: of bfloat16, little more than rounding the result alone costs."""
    if on_device.problem.dtype == "bfloat16":
        rounded = flow.bfloat16.decode(flow.bfloat16.encode(on_device.expected))
        return 1.2 * _error(rounded, on_device.expected) + 1e-6
    return 2e-3 if wanted.allow_tf32 else 2e-5


@gpu
@pytest.mark.parametrize(("dtype", "allow_tf32"), [("float32", False), ("float32", True), ("bfloat16", True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_every_suggestion_against_float64(size: str, kind: str, dtype: str, allow_tf32: bool) -> None:
    operands, wanted = OnDevice(_problem(kind, SIZES[size], dtype)), replace(WANTED, allow_tf32=allow_tf32)
    for plan in operands.plans(wanted):
        operands.forget()
        with operands.room_for(plan):
            plan.run(*operands.addresses)
            assert _error(operands.gradient(), operands.expected) < _bound(operands, wanted)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["usual", "many pixels", "many channels"])
def test_what_was_learned_gives_the_same_elsewhere(size: str, kind: str) -> None:
    operands, learned = OnDevice(_problem(kind, SIZES[size])), 0
    for plan in operands.plans(WANTED):
        with operands.room_for(plan):
            plan.run(*operands.addresses)
            by_cublas = operands.gradient()
            plan.learn(*operands.addresses)
            learned += plan._launches is not None
            operands.forget()
            plan.run(*operands.addresses)
            assert _error(operands.gradient(), by_cublas) < 1e-6
    assert learned


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_learned", [False, True])
def test_it_can_be_captured(kind: str, is_learned: bool) -> None:
    operands = OnDevice(_problem(kind))
    plan = operands.plans(WANTED)[0]
    api, stream = cuda.api(), cuda.stream_pointer(operands.device)
    with operands.room_for(plan):
        plan.run(*operands.addresses)
        if is_learned:
            plan.learn(*operands.addresses)
        expected = operands.gradient()
        operands.forget()
        addresses = operands.addresses
        api.streamBeginCapture(stream, api.streamCaptureModeGlobal)
        try:
            plan.run(*addresses)
        finally:
            graph = api.streamEndCapture(stream)
        executable = api.graphInstantiate(graph)
        assert np.isnan(operands.gradient()).all()
        api.graphLaunch(executable, stream)
        assert _error(operands.gradient(), expected) < 1e-6
    api.graphExecDestroy(executable)
    api.graphDestroy(graph)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_made_from_its_text_is_the_same(kind: str) -> None:
    operands = OnDevice(_problem(kind))
    for plan in operands.plans(WANTED):
        again = pointwise.Plan.of_text(operands.problem, WANTED, operands.device, plan.text())
        assert (again.text(), again.workspace_bytes) == (plan.text(), plan.workspace_bytes)
        operands.forget()
        with operands.room_for(again):
            again.run(*operands.addresses)
            assert _error(operands.gradient(), operands.expected) < 2e-3


@gpu
def test_gradients_through_products_that_were_chosen_and_kept(settings: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(convolution, "_choices", {})
    time = plans._time
    # Products are always faster.
    monkeypatch.setattr(plans, "_time", lambda plan, *given: time(plan, *given) + 1000 * (plan.library != "cuBLASLt"))
    settings.cudnn.allow_tf32, settings.cudnn.timed_plans = False, 3
    random = np.random.default_rng(6)
    images, weights = random.standard_normal((4, 64, 14, 14)), random.standard_normal((128, 64, 1, 1))
    slope = random.standard_normal((4, 128, 14, 14))
    expected = [np.einsum("nkhw,kc->nchw", slope, weights[:, :, 0, 0]), np.einsum("nkhw,nchw->kc", slope, images)]

    def chosen() -> list[tuple[str, str]]:
        convolution.forget()
        convolution._choices.clear()
        for _ in range(3):  # by cuBLASLt, as it was learned, and at addresses that are known
            x, w = (flow.tensor(a.astype(np.float32), device="cuda", requires_grad=True) for a in (images, weights))
            ops.conv2d(x, w).backward(flow.tensor(slope.astype(np.float32), device="cuda"))
            got = [np.array(runtime(t.device).to_host(_array(t.grad))) for t in (x, w)]
            assert _error(got[0], expected[0]) < 2e-5
            assert _error(got[1][:, :, 0, 0], expected[1]) < 2e-5
        return [(str(known[0]), choice.plan.library) for known, choice in convolution._choices.items()]

    found = [(FORWARD, "cuDNN"), (BACKWARD_INPUT, "cuBLASLt"), (BACKWARD_WEIGHT, "cuBLASLt")]
    assert current_settings().timed_plans == 3
    assert sorted(chosen()) == sorted(found)
    monkeypatch.setattr(plans, "_fastest", lambda *given: pytest.fail("what is on disk was looked for again"))
    assert sorted(chosen()) == sorted(found)


def _array(gradient: flow.Tensor | None) -> Array:
    assert gradient is not None
    return gradient.array
