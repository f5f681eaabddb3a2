"""What CUDA's kernels prepare for layouts serves whatever else changes: settings, addresses, what is wanted. No device is needed."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import framework as flow
from framework.dtype import float32, uint8
from framework.kernels.cuda import (
    convolution,
    driver,
    elementwise,
    launch,
    launches,
    normalization,
    normalization_backward,
    normalization_plans,
    recording,
)
from framework.kernels.cuda.compiler import Function
from framework.kernels.cuda.convolution import Geometry
from framework.kernels.cuda.launches import Place
from framework.kernels.cuda.problem import FORWARD
from framework.kernels.cuda.recording import Node
from framework.vm import launch_groups
from framework.vm.array import Layout, channels_last_stride

IMAGES = Layout.of((2, 8, 4, 4), channels_last_stride((2, 8, 4, 4)), float32)
KERNEL = Layout.of((8, 8, 1, 1), channels_last_stride((8, 8, 1, 1)), float32)
VECTOR = Layout.of((8,), (1,), float32)
# Masks: a bit for each element, or three figures for each channel.
BITS = Layout.of((IMAGES.size // 8,), (1,), uint8)
FIGURES = Layout.of((3 * 8 * 4,), (1,), uint8)
DEVICE = flow.device("cpu")  # only asked for, never used


def at(address: int, layout: Layout = IMAGES) -> Any:
    return SimpleNamespace(ptr=address, layout=layout, storage=SimpleNamespace(device=DEVICE))


# ---- convolutions


class FakePlan:
    def __init__(self) -> None:
        self.runs: list[tuple[int, ...]] = []

    def run(self, *addresses: int) -> None:
        self.runs.append(addresses)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[FakePlan]:
    """The plans that were chosen, one each time a convolution was met as if for the first time."""
    chosen: list[FakePlan] = []

    def choose(*_: Any) -> FakePlan:
        chosen.append(FakePlan())
        return chosen[-1]

    monkeypatch.setattr(convolution, "_run_slowly", choose)
    monkeypatch.setattr(convolution, "_direct", {})
    return chosen


def _prepared() -> Any:
    geometry = Geometry((1, 1), (0, 0), (1, 1), 1)
    return convolution._prepare(FORWARD, DEVICE, IMAGES, KERNEL, IMAGES, geometry)


def test_a_prepared_convolution_follows_the_settings(met: list[FakePlan], settings: Any) -> None:
    run, operands = _prepared(), (at(512), at(1024), at(2048))
    run(*operands)
    run(*operands)
    assert [plan.runs for plan in met] == [[(512, 1024, 2048)]]
    settings.deterministic = True
    run(*operands)
    settings.cudnn.allow_tf32 = False
    run(*operands)
    settings.cudnn.workspace_bytes = 5
    run(*operands)
    assert len(met) == 4
    settings.cudnn.workspace_bytes, settings.cudnn.allow_tf32, settings.deterministic = 256 * 1024 * 1024, True, False
    run(*operands)
    assert len(met) == 4
    assert len(met[0].runs) == 2
    assert not any(plan.runs for plan in met[1:])


def test_a_prepared_convolution_looks_at_addresses(met: list[FakePlan], settings: Any) -> None:
    run = _prepared()
    run(at(512), at(1024), at(2048))
    run(at(512 + 4), at(1024), at(2048))
    assert len(met) == 2
    assert not met[0].runs


def test_what_is_forgotten_is_met_anew_also_by_what_was_prepared(met: list[FakePlan], settings: Any) -> None:
    run, again = _prepared(), _prepared()
    run(at(512), at(1024), at(2048))
    again(at(512), at(1024), at(2048))  # the same layouts: known to both
    assert len(met) == 1
    convolution.forget()
    run(at(512), at(1024), at(2048))
    assert len(met) == 2


# ---- what plans launch


class FakeDriver:
    """Notes the stream and the parameters of every kernel that is launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: None) -> int:
        words = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        self.launched.append((config._obj.stream, function.value, *words))
        return 0


def test_launches_go_to_the_addresses_given_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "api", lambda: fake)
    fixed = (1, 1, 1, 32, 1, 1, 0, (0, 0, 0), 0, 0)
    kernel = Node(recording._KERNEL, 7, fixed, (bytes(8), (9).to_bytes(8, "little"), bytes(8)))
    found = [Place(0, 0, 0, 0, 0), Place(0, 2, 0, 2, 64)]
    plan = launches.Launches([kernel], found)
    many = 3 * launches._MOST_KNOWN
    # Those that come back are known, those that were known are moved when others come, and come back again.
    numbers = [*range(many), *range(many), 5, 5, 6, 5]
    for number in numbers:
        plan.run(3 + number % 2, (512 * number, 0, 4096 + number, 0))
    assert fake.launched == [(3 + n % 2, 7, 512 * n, 9, 4096 + n + 64) for n in numbers]
    assert len(plan._known) == launches._MOST_KNOWN


# ---- own kernels


class OwnLaunches:
    """Notes how own kernels are launched, and answers with a status."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launched: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: None, extra: Any) -> int:
        given = config._obj
        attributes = [(given.attributes[i].name, given.attributes[i].value[0]) for i in range(given.attribute_count)]
        size = ctypes.c_size_t.from_address(extra[3]).value
        values = ctypes.string_at(extra[1], size)
        self.launched.append((function.value, given.stream, tuple(given.grid), tuple(given.block), attributes, values))
        return self.status

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.mark.parametrize(("starts_early", "attributes"), [(True, [(driver.STARTS_EARLY, 1)]), (False, [])])
def test_a_kernel_is_launched_early_where_it_waits_itself(
    starts_early: bool, attributes: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = OwnLaunches()
    monkeypatch.setattr(driver, "api", lambda: fake)
    run = launch.prepare(Function(5, starts_early), (7, 2), "Qd", "i", (3,), threads=64)
    run(11, 512, 0.5)
    run(12, 1024, 0.25)
    grid, block = (7, 2, 1), (64, 1, 1)
    assert fake.launched == [
        (5, 11, grid, block, attributes, struct.pack("@Qdi", 512, 0.5, 3)),
        (5, 12, grid, block, attributes, struct.pack("@Qdi", 1024, 0.25, 3)),
    ]


def test_a_launch_that_is_refused_is_said_with_the_drivers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "api", lambda: OwnLaunches(status=1))
    run = launch.prepare(Function(5, True), (1, 1), "Q")
    with pytest.raises(flow.cuda.CudaError, match="launching a kernel failed: CUDA_ERROR_INVALID_VALUE"):
        run(0, 512)


def _launch_within(monkeypatch: pytest.MonkeyPatch, fake: Any, run: Callable[[int], object]) -> None:
    """Calls `run(1)`, and at the driver's door `run(2)`: as a finalizer, a signal handler or another thread may."""
    launch_kernel, within = fake.cuLaunchKernelEx, [2]

    def cuLaunchKernelEx(*given: Any) -> int:
        while within:
            run(within.pop())
        return launch_kernel(*given)

    fake.cuLaunchKernelEx = cuLaunchKernelEx
    monkeypatch.setattr(driver, "api", lambda: fake)
    # Where one waits for the other, it does so for ever.
    launching = threading.Thread(target=run, args=(1,), daemon=True)
    launching.start()
    launching.join(20)
    assert not launching.is_alive()


def test_a_launch_in_the_middle_of_another_of_the_same_kernel_leaves_that_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, made = OwnLaunches(), []

    def run(number: int) -> None:
        if not made:
            made.append(launch.prepare(Function(5, True), (1, 1), "Q", "q", (7,)))
        made[0](10 + number, 512 * number)

    _launch_within(monkeypatch, fake, run)
    assert [(one[1], one[5]) for one in fake.launched] == [(10 + n, struct.pack("@Qq", 512 * n, 7)) for n in (2, 1)]


def test_a_plan_in_the_middle_of_another_run_of_it_leaves_that_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, made = FakeDriver(), []
    kernel = Node(recording._KERNEL, 7, (1, 1, 1, 32, 1, 1, 0, (0, 0, 0), 0, 0), (bytes(8),))

    def run(number: int) -> None:
        if not made:
            made.append(launches.Launches([kernel], [Place(0, 0, 0, 0, 0)]))
        made[0].run(10, (512, 0, 0, 0))
        made[0].run(10 + number, (512 * number, 0, 0, 0))

    _launch_within(monkeypatch, fake, run)
    assert fake.launched == [(10, 7, 512), (12, 7, 1024), (10, 7, 512), (11, 7, 512)]


def test_what_a_signal_interrupts_can_be_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = OwnLaunches()

    def interrupt(*given: Any) -> int:
        raise _InterruptError

    monkeypatch.setattr(driver, "api", lambda: SimpleNamespace(cuLaunchKernelEx=lambda *given: doing[0](*given)))
    doing: list[Callable[..., int]] = [interrupt]
    run = launch.prepare(Function(5, True), (1, 1), "Q", "q", (7,))
    with pytest.raises(_InterruptError):
        run(11, 512)
    doing[0] = fake.cuLaunchKernelEx
    run(12, 1024)
    assert [(one[1], one[5]) for one in fake.launched] == [(12, struct.pack("@Qq", 1024, 7))]


class _InterruptError(BaseException):
    """As KeyboardInterrupt."""


def test_groups_that_end_in_another_thread_leave_a_launch_to_who_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    class EndsMeanwhile(dict):
        def __contains__(self, stream: object) -> bool:
            return True

    fake = OwnLaunches()
    monkeypatch.setattr(driver, "api", lambda: fake)
    monkeypatch.setattr(launch_groups, "of_stream", EndsMeanwhile({3: None}))
    launch.prepare(Function(5, True), (1, 1), "Q")(11, 512)
    assert [one[1] for one in fake.launched] == [11]


def test_counters_are_cleared_behind_what_may_still_use_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    api = SimpleNamespace(memsetAsync=lambda *_: done.append("cleared"))
    room = SimpleNamespace(ptr=512, storage=SimpleNamespace(ptr=512, nbytes=1 << 20))
    monkeypatch.setattr(launch.cuda, "api", lambda: api)
    monkeypatch.setattr(launch, "scratch", lambda device, nbytes: room)
    monkeypatch.setattr(launch, "_workspaces", {})
    monkeypatch.setattr(launch_groups, "of_stream", {3: SimpleNamespace(flush=lambda: done.append("what waited"))})
    assert launch.workspace(DEVICE, 3) == 512
    assert done == ["what waited", "cleared"]


# ---- batch normalisation


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was launched: ("aligned" or "not", kind, stream, addresses and numbers), and additions and copies before it."""
    log: list[tuple[Any, ...]] = []

    def train(device: Any, relu: bool, has_mask: bool, is_aligned: bool, *layouts: Any) -> Any:
        return lambda *given: log.append(("aligned" if is_aligned else "not", (relu, has_mask), *given))

    def backward(device: Any, kind: str, is_constant: bool, is_aligned: bool, *layouts: Any) -> Any:
        return lambda *given: log.append(("aligned" if is_aligned else "not", kind, *given))

    monkeypatch.setattr(normalization_plans, "train", train)
    monkeypatch.setattr(normalization_plans, "backward", backward)
    monkeypatch.setattr(launch, "stream", lambda device: 99)
    monkeypatch.setattr(elementwise, "copy", lambda out, a: log.append(("copy", out.ptr, a.ptr)))
    monkeypatch.setattr(elementwise, "add", lambda out, a, b: log.append(("add", out.ptr, a.ptr, b.ptr)))
    monkeypatch.setattr(normalization_backward, "_like", lambda x: at(32, x.layout))
    return log


def test_a_prepared_normalisation_launches_with_every_operand_in_its_place(launched: list[tuple[Any, ...]]) -> None:
    layouts = (IMAGES, VECTOR, VECTOR, VECTOR, VECTOR, VECTOR, IMAGES, VECTOR, VECTOR, None)
    run = normalization._prepare_train(DEVICE, *layouts, eps=0.5, momentum=0.25, relu=True)
    y, mean, inv_std, mask, running_mean, running_var, x, weight, bias = (at(16 * n) for n in range(1, 10))
    run(y, mean, inv_std, mask, running_mean, running_var, x, weight, bias, None)
    # Without a residual the mask is each channel's figures.
    expected = (99, 16, 64, 80, 96, 32, 48, 64, 112, 0, 128, 144, 0.5, 0.25)
    assert launched == [("aligned", (True, True), *expected)]
    run(at(20), mean, inv_std, mask, running_mean, running_var, x, weight, bias, None)
    assert launched[1] == ("not", (True, True), 99, 20, *expected[2:])
    layouts = (*layouts[:3], None, None, None, *layouts[6:7], None, None, IMAGES)
    plain = normalization._prepare_train(DEVICE, *layouts, eps=0.5, momentum=0.25, relu=False)
    plain(y, mean, inv_std, None, None, None, x, None, None, at(160))
    assert launched[2] == ("aligned", (False, False), 99, 16, 0, 0, 0, 32, 48, 0, 112, 160, 0, 0, 0.5, 0.25)


def _gradients(run: Any, *, residual: Any = None, mask: Any = None, second: Any = None, grad_x: Any = 16) -> None:
    operands = [at(16 * n) for n in range(2, 11)]
    grad_weight, grad_bias, grad_y, x, weight, mean, inv_std = operands[:7]
    run(at(grad_x), grad_weight, grad_bias, residual, grad_y, x, weight, mean, inv_std, mask, second)


def _prepare(*, residual: bool = False, mask: Layout | None = None, second: bool = False, relu: bool = True) -> Any:
    return normalization_backward._prepare_backward(
        DEVICE, IMAGES, VECTOR, VECTOR, IMAGES if residual else None, IMAGES, IMAGES, VECTOR, VECTOR, VECTOR, mask,
        IMAGES if second else None, relu=relu,
    )  # fmt: skip


def test_a_prepared_backward_launches_with_every_operand_in_its_place(launched: list[tuple[Any, ...]]) -> None:
    run = _prepare(residual=True, mask=BITS, second=True)
    _gradients(run, residual=at(256), mask=at(272, BITS), second=at(288))
    rest = (32, 48, 64, 288, 80, 96, 112, 128, 272, -1.0)
    assert launched == [("aligned", "bits", 99, 16, 256, *rest)]
    _gradients(run, residual=at(256), mask=at(272, BITS), second=at(288), grad_x=20)
    assert launched[1] == ("not", "bits", 99, 20, 256, *rest)
    figures = _prepare(mask=FIGURES)
    _gradients(figures, mask=at(272, FIGURES))
    assert launched[2] == ("aligned", "recomputed", 99, 16, 0, 32, 48, 64, 0, 80, 96, 112, 128, 272, -1.0)


def test_parts_that_no_kernel_takes_are_added_up_first(launched: list[tuple[Any, ...]]) -> None:
    _gradients(_prepare(mask=FIGURES, second=True), mask=at(272, FIGURES), second=at(288))
    assert launched == [
        ("add", 32, 64, 288),
        ("aligned", "recomputed", 99, 16, 0, 32, 48, 32, 0, 80, 96, 112, 128, 272, -1.0),
    ]


def test_a_gradient_that_nothing_masks_is_copied_for_the_residual(launched: list[tuple[Any, ...]]) -> None:
    # Without a ReLU the mask, if any, says nothing.
    _gradients(_prepare(residual=True, mask=BITS, relu=False), residual=at(256), mask=at(272, BITS))
    assert launched == [
        ("copy", 256, 64),
        ("aligned", "open", 99, 16, 0, 32, 48, 64, 0, 80, 96, 112, 128, 0, -1.0),
    ]
