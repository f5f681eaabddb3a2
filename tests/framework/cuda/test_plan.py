"""What every library's plans share: scratch memory, and what was learned of their launches. No device is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from framework.device import Device
from framework.kernels.cuda import launch
from framework.kernels.cuda import plan as module
from framework.kernels.cuda.library import LibraryError
from framework.kernels.cuda.plan import Plan
from framework.vm import cuda, launch_groups

DEVICE = Device("cuda")
MIB = 1 << 20


if TYPE_CHECKING:
    from tests.framework.cuda.fake_api import FakeCudaApi

pytest_plugins = ["tests.framework.cuda.fake_api"]


class FakePlan(Plan):
    """Notes what its library was asked to launch."""

    library = "a library"

    def __init__(self, workspace_bytes: int) -> None:
        super().__init__(DEVICE, workspace_bytes)
        self.by_library: list[tuple[int, ...]] = []

    def text(self) -> bytes:
        return b""

    def _run_by_library(self, stream: int, at: tuple[int, int, int, int]) -> None:
        self.by_library.append((stream, *at))


class Box:
    """Where plans run: the stream of now, the scratch memory that was asked for, and what was launched directly."""

    def __init__(self) -> None:
        self.stream = 3
        self.is_capturing = False
        self.lent: list[int] = []
        self.launched: list[tuple[int, ...]] = []
        self.recorded: list[tuple[int, ...]] = []
        self.refusal: Exception | None = None

    def scratch(self, device: Device, nbytes: int) -> Any:
        self.lent.append(nbytes)
        return SimpleNamespace(ptr=len(self.lent) << 30)

    def record(self, execute: Any, stream: int, at: tuple[int, ...]) -> Any:
        if self.refusal:
            raise self.refusal
        execute(at)
        self.recorded.append((stream, *at))
        return SimpleNamespace(run=lambda stream, at: self.launched.append((stream, *at)))


class FakeRuntimeError(Exception):
    """As CuPy's CUDARuntimeError."""


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box()
    monkeypatch.setattr(module.cuda, "launching_on", lambda device: box.stream)
    monkeypatch.setattr(module.cuda, "is_capturing", lambda device: box.is_capturing)
    monkeypatch.setattr(module.cuda, "api", lambda: SimpleNamespace(CUDARuntimeError=FakeRuntimeError))
    monkeypatch.setattr(module, "scratch", box.scratch)
    monkeypatch.setattr(module.launches, "record", box.record)
    monkeypatch.setattr(module, "_workspaces", {})
    monkeypatch.setattr(module, "_shared", {})
    return box


def test_small_workspaces_are_one_for_all_plans_on_a_stream(box: Box) -> None:
    plans = [FakePlan(MIB), FakePlan(17 * MIB), FakePlan(0)]
    for box.stream in (3, 4, 3):
        for plan in plans:
            plan.run(512, 1024, 2048)
    assert box.lent == [17 * MIB, 17 * MIB]
    for plan, places in zip(plans, ((1 << 30, 2 << 30), (1 << 30, 2 << 30), (0, 0)), strict=True):
        rest = (512, 1024, 2048)
        assert plan.by_library == [(3, *rest, places[0]), (4, *rest, places[1]), (3, *rest, places[0])]


def test_the_workspaces_of_a_stream_go_with_it(
    box: Box, fake_cuda: FakeCudaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = cuda.CudaStream(Device("cuda:0"), "a user's")
    box.stream = stream.pointer
    room = SimpleNamespace(ptr=512, storage=SimpleNamespace(ptr=512, nbytes=1 << 20))
    monkeypatch.setattr(launch, "scratch", lambda device, nbytes: room)
    monkeypatch.setattr(launch, "_workspaces", {})
    monkeypatch.setattr(launch, "_outgrown", {})
    fake_cuda.memsetAsync = lambda *_: None  # type: ignore[attr-defined]
    monkeypatch.setattr(module.cuda, "api", lambda: fake_cuda)
    plan, other = FakePlan(MIB), FakePlan(MIB)
    plan.run(512, 1024, 2048)
    other.run(512, 1024, 2048)
    launch.workspace(stream.device, box.stream)
    launch.workspace(stream.device, box.stream, 2 << 20)
    assert launch.workspaces(stream.device) == [(box.stream, 512)]
    stream.end()
    # Another stream may get the address.
    plan.run(512, 1024, 2048)
    other.run(512, 1024, 2048)
    assert box.lent == [17 * MIB, 17 * MIB]
    assert [at[4] for at in (*plan.by_library, *other.by_library)] == [1 << 30, 2 << 30] * 2
    assert (launch.workspaces(stream.device), launch._outgrown) == ([], {})


def test_a_large_workspace_is_asked_for_at_each_run_in_few_sizes(box: Box) -> None:
    plan = FakePlan(17 * MIB + 1)
    plan.run(512, 1024, 2048)
    plan.run(512, 1024, 2048)
    assert box.lent == [20 * MIB, 20 * MIB]
    assert [at[4] for at in plan.by_library] == [1 << 30, 2 << 30]


def test_a_library_launches_behind_what_was_launched_before(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FakePlan(0)
    waiting = SimpleNamespace(flush=lambda: plan.by_library.append(("what waited",)))
    monkeypatch.setattr(launch_groups, "of_stream", {box.stream: waiting})
    plan.run(512, 1024, 2048)
    assert [entry[0] for entry in plan.by_library] == ["what waited", box.stream]


def test_a_plan_works_in_memory_that_it_is_given_for_so_long_alone(box: Box) -> None:
    plan = FakePlan(MIB)
    with plan.working_in(4096):
        plan.run(512, 1024, 2048)
    plan.run(512, 1024, 2048)
    assert [at[4] for at in plan.by_library] == [4096, 1 << 30]


def test_what_was_learned_runs_without_the_library_at_such_addresses(box: Box) -> None:
    plan = FakePlan(MIB)
    plan.learn(512, 1024, 2048)
    assert box.recorded == [(3, 512, 1024, 2048, 1 << 30)]
    plan.by_library.clear()
    plan.run(1024, 512, 4096)
    assert (box.launched, plan.by_library) == ([(3, 1024, 512, 4096, 1 << 30)], [])
    plan.run(1024, 512 + 16, 4096)
    assert (len(box.launched), plan.by_library) == (1, [(3, 1024, 528, 4096, 1 << 30)])


def test_a_bias_is_one_operand_more(box: Box) -> None:
    plan = FakePlan(MIB)
    plan.run(512, 1024, 2048, 4096)
    assert plan.by_library == [(3, 512, 1024, 2048, 1 << 30, 4096)]
    plan.learn(512, 1024, 2048, 4096)
    assert box.recorded == plan.by_library[1:] == plan.by_library[:1]
    plan.run(512, 1024, 2048, 8192)
    assert box.launched == [(3, 512, 1024, 2048, 1 << 30, 8192)]
    plan.run(512, 1024, 2048, 8192 + 16)
    assert plan.by_library[2:] == [(3, 512, 1024, 2048, 1 << 30, 8208)]


def test_nothing_is_learned_in_a_capture_or_at_odd_addresses(box: Box) -> None:
    plan = FakePlan(0)
    plan.learn(512, 1024 + 16, 2048)
    plan.learn(512, 1024, 2048, 4096 + 16)
    box.is_capturing = True
    plan.learn(512, 1024, 2048)
    assert not box.recorded


@pytest.mark.parametrize("refusal", [LibraryError("it waits"), FakeRuntimeError("cannot be captured")])
def test_what_cannot_be_recorded_is_left_to_the_library(refusal: Exception, box: Box) -> None:
    plan = FakePlan(0)
    box.refusal = refusal
    plan.learn(512, 1024, 2048)
    plan.run(512, 1024, 2048)
    assert plan.by_library == [(3, 512, 1024, 2048, 0)]
