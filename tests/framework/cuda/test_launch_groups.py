"""Launches in groups on CUDA streams: whoever looks at a stream, or puts something on it, comes behind all that was issued."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import framework as flow
from framework.cuda import devices
from framework.kernels.cuda import driver, launch, recording
from framework.kernels.cuda.compiler import Function
from framework.vm import HostStream, cuda, launch_groups
from framework.vm.machine import machine
from tests.framework.cuda.test_prepared import OwnLaunches

if TYPE_CHECKING:
    from tests.framework.cuda.fake_api import FakeCudaApi

pytest_plugins = ["tests.framework.cuda.fake_api"]


@pytest.fixture(autouse=True)
def as_at_first() -> Iterator[None]:
    yield
    flow.cuda.group_launches()


class Work:
    """Launches on a stream of a fake device, and which of them have run."""

    def __init__(self, api: FakeCudaApi, stream: cuda.CudaStream) -> None:
        self.api, self.stream = api, stream
        self.ran: list[int] = []

    def launch(self, stream: int, key: int) -> None:
        self.api.streams[stream].append(lambda: self.ran.append(key))

    def issue(self, *keys: int) -> None:
        def work() -> None:
            on = cuda.launching_on(self.stream.device)
            for key in keys:
                groups = launch_groups.of_stream.get(on)
                if groups is None or not groups.takes(self._launch, key):
                    self._launch(on, key)

        self.stream.run(work)

    @property
    def _launch(self) -> Callable[[int, int], None]:
        return self.__dict__.setdefault("_kept", self.launch)


@pytest.fixture
def work(fake_cuda: FakeCudaApi) -> Work:
    """A stream on which ten launches were found to be a group, the first three of which wait."""
    stream = cuda.CudaStream(flow.device("cuda:0"), "compute")
    machine.add_stream(stream)
    made = Work(fake_cuda, stream)
    for _ in range(4):
        made.issue(*range(10))
        stream.synchronize()
    made.ran.clear()
    made.issue(0, 1, 2)
    assert not fake_cuda.streams[stream._address]
    return made


LOOKS: dict[str, Callable[[cuda.CudaStream], object]] = {
    "synchronize": lambda stream: stream.synchronize(),
    "block": lambda stream: stream.block(stream.mark()),
    "fence": lambda stream: stream.fence()(),  # type: ignore[misc]
    "address": lambda stream: cuda.api().streamSynchronize(stream.pointer),
    "where instructions go": lambda stream: cuda.api().streamSynchronize(cuda.stream_pointer(stream.device)),
    "end": lambda stream: machine.remove_stream(stream),
    "no more groups": lambda stream: (flow.cuda.group_launches(False), cuda.api().streamSynchronize(stream._address)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_all_that_was_issued(work: Work, look: str) -> None:
    LOOKS[look](work.stream)
    assert work.ran == [0, 1, 2]


def test_asking_whether_all_has_run_says_no_until_it_has(work: Work) -> None:
    assert not work.stream.is_idle()
    work.stream.synchronize()
    assert work.stream.is_idle()
    work.issue(0, 1)
    work.stream.sequence += 1
    assert not work.stream.is_done(work.stream.mark())


def test_an_event_stands_behind_what_waited(work: Work, fake_cuda: FakeCudaApi) -> None:
    fake_cuda.eventSynchronize(work.stream.record())
    assert work.ran == [0, 1, 2]


def test_another_stream_that_waits_comes_behind_what_waited(work: Work, fake_cuda: FakeCudaApi) -> None:
    other = cuda.CudaStream(work.stream.device, "other")
    other.wait_for(work.stream.mark())
    fake_cuda.streams[other._address].append(lambda: work.ran.append(99))
    other.synchronize()
    assert work.ran == [0, 1, 2, 99]
    other.end()


def test_what_a_stream_waits_for_comes_behind_its_own_launches_before(work: Work, fake_cuda: FakeCudaApi) -> None:
    other = cuda.CudaStream(work.stream.device, "other")
    fake_cuda.streams[other._address].append(lambda: work.ran.append(99))
    work.stream.wait_for(other.mark())
    work.issue(50)
    work.stream.synchronize()
    assert work.ran == [0, 1, 2, 99, 50]
    other.end()


def test_what_waits_is_launched_before_the_host_is_held_for_its_own_work(work: Work, fake_cuda: FakeCudaApi) -> None:
    host = HostStream(flow.device("cpu"), "host")
    launched: list[int] = []

    def look() -> None:
        deadline = time.monotonic() + 10
        while len(fake_cuda.streams[work.stream._address]) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        launched.append(len(fake_cuda.streams[work.stream._address]))

    host.sequence += 1
    host.run(look)
    work.stream.wait_for(host.mark())
    assert launched == [3]
    host.end()


def test_what_waits_on_any_stream_is_launched_before_the_host_waits_for_one(
    work: Work, fake_cuda: FakeCudaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    monkeypatch.setattr(devices, "existing_runtime", lambda device: device)
    monkeypatch.setattr(
        machine, "synchronize", lambda device: launched.append(len(fake_cuda.streams[work.stream._address]))
    )
    flow.cuda.synchronize(work.stream.device)
    assert launched == [3]


def test_what_another_thread_puts_on_a_stream_is_not_taken_into_a_recording(
    work: Work, fake_cuda: FakeCudaApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[Any] = []

    def chain(graph: int) -> list[Any]:
        recorded.extend(fake_cuda.graphs[graph])
        return []

    def copy_and_launch() -> None:
        fake_cuda.streams[work.stream.pointer].append(lambda: work.ran.append(99))
        work.issue(50)

    other = threading.Thread(target=copy_and_launch)

    def issue() -> None:
        fake_cuda.streams[work.stream._address].append("own")
        other.start()
        other.join(0.2)

    monkeypatch.setattr(recording, "_chain", chain)
    recording.recorded(issue, work.stream._address)
    other.join()
    work.stream.synchronize()
    assert recorded == ["own"]
    assert work.ran == [0, 1, 2, 99, 50]


def test_a_stream_is_not_recorded_for_ever_where_a_signal_comes_as_that_begins(
    work: Work, fake_cuda: FakeCudaApi
) -> None:
    class _InterruptError(BaseException):
        """As KeyboardInterrupt."""

    begin = fake_cuda.streamBeginCapture

    def interrupted(stream: int, mode: int) -> None:
        begin(stream, mode)
        raise _InterruptError

    fake_cuda.streamBeginCapture = interrupted  # type: ignore[method-assign]
    with pytest.raises(_InterruptError):
        recording.recorded(lambda: None, work.stream._address)
    assert not fake_cuda.recorded


def test_memory_is_given_back_behind_what_may_use_it(work: Work, fake_cuda: FakeCudaApi) -> None:
    source = cuda.CudaSource(work.stream.device)
    memory = source.reserve(64)
    source.release(memory)
    assert len(fake_cuda.streams[work.stream._address]) == 3


def test_streams_group_their_launches_unless_told_otherwise(fake_cuda: FakeCudaApi) -> None:
    stream = cuda.CudaStream(flow.device("cuda:0"), "first")
    assert stream._address in launch_groups.of_stream
    flow.cuda.group_launches(False)
    later = cuda.CudaStream(flow.device("cuda:0"), "later")
    assert later._address not in launch_groups.of_stream
    stream.end()
    later.end()
    assert stream._address not in launch_groups.of_stream


def test_another_library_that_keeps_a_streams_address_comes_behind_all_that_was_issued(
    work: Work, fake_cuda: FakeCudaApi
) -> None:
    shown = flow.cuda.Stream._of(work.stream)
    repr(shown)
    flow.cuda.Event(device=work.stream.device).record(shown)
    work.issue(0, 1)
    assert launch_groups.of_stream[work.stream._address]._group is not None
    address = shown.cuda_stream
    flow.cuda.group_launches(True)  # leaves that stream as it is
    work.issue(0, 1, 2)
    fake_cuda.streams[address].append(lambda: work.ran.append(99))
    work.stream.synchronize()
    assert work.ran == [0, 1, 2, 0, 1, 0, 1, 2, 99]


def test_a_launch_of_another_thread_while_groups_end_comes_behind_what_waited(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = launch_groups.LaunchGroups.close

    def close_late(groups: launch_groups.LaunchGroups) -> None:
        work.issue(3)
        close(groups)
        # As one who looked for the groups before they ended.
        assert not groups.takes(work._launch, 0)

    monkeypatch.setattr(launch_groups.LaunchGroups, "close", close_late)
    flow.cuda.group_launches(False)
    work.stream.synchronize()
    assert work.ran == [0, 1, 2, 3]


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1.0, 1.0000000000000002)])
def test_launches_are_the_same_by_their_bits(one: float, other: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = OwnLaunches()
    monkeypatch.setattr(driver, "api", lambda: fake)
    kept: list[Any] = []

    class Groups:
        def takes(self, run: Any, key: Any) -> bool:
            kept.append((run, key))
            return True

    monkeypatch.setattr(launch_groups, "of_stream", {11: Groups()})
    run = launch.prepare(Function(5, True), (1, 1), "Qd")
    for value in (one, other, one, float("nan"), float("nan")):
        run(11, 512, value)
    assert not fake.launched
    assert kept[0] == kept[2] != kept[1]
    assert kept[3] == kept[4]
    launched, key = kept[1]
    launched(12, key)
    assert fake.launched[0][1] == 12
    assert fake.launched[0][5] == key


def test_what_waits_can_be_launched_when_nobody_else_has_its_launch_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = OwnLaunches()
    monkeypatch.setattr(driver, "api", lambda: fake)
    kept: list[Any] = []

    class Groups:
        def takes(self, run: Any, key: Any) -> bool:
            kept.append((run, key))
            return True

    monkeypatch.setattr(launch_groups, "of_stream", {11: Groups()})
    launch.prepare(Function(5, True), (1, 1), "Q", "q", (7,))(11, 512)
    # Takes the place of whatever was given up.
    others = [ctypes.c_size_t(1) for _ in range(1000)]
    run, key = kept[0]
    run(12, key)
    assert fake.launched[0][5] == struct.pack("@Qq", 512, 7)
    assert len(others) == 1000


# ---- on a device


def _trained(steps: int, *, on: bool) -> tuple[list[float], list[np.ndarray], int]:
    """The losses of some steps, the parameters after them, and how many graphs were launched."""
    flow.manual_seed(0)
    generator = np.random.default_rng(0)
    model = flow.models.resnet18(num_classes=10).to("cuda")
    model.train()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    criterion = flow.nn.CrossEntropyLoss()
    batches = [
        (
            flow.tensor(generator.standard_normal((4, 3, 64, 64)).astype(np.float32), device="cuda"),
            flow.tensor(generator.integers(0, 10, 4), device="cuda"),
        )
        for _ in range(3)
    ]
    flow.cuda.group_launches(on)
    losses: list[Any] = []
    try:
        for step in range(steps):
            images, labels = batches[step % 3]
            optimizer.lr = 0.01 / (1 + step // 5)
            optimizer.zero_grad()
            # Other numbers, and so another launch, at each step.
            loss = criterion(model(images) + 0.1 * flow.randn(4, 10, device="cuda"), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() if step % 4 == 0 else loss)
            if step == steps // 2:
                flow.cuda.empty_cache()
        seen = [one if isinstance(one, float) else one.item() for one in losses]
        parameters = [parameter.detach().to("cpu").numpy() for parameter in model.parameters()]
        rounds = sum(
            group.rounds
            for one in launch_groups.of_stream.values()
            for group in one._groups.values()
            if group.executable
        )
    finally:
        flow.cuda.group_launches()
    return seen, parameters, rounds


@pytest.mark.gpu
def test_training_in_groups_gives_the_same_bits(settings: Any) -> None:
    settings.deterministic = True
    losses, parameters, none = _trained(30, on=False)
    grouped_losses, grouped_parameters, rounds = _trained(30, on=True)
    assert none == 0
    assert rounds > 30
    assert grouped_losses == losses
    for one, other in zip(grouped_parameters, parameters, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.gpu
def test_what_waits_has_run_when_the_host_reads() -> None:
    value = flow.zeros(1000, device="cuda")
    for step in range(1, 200):
        for _ in range(6):
            value += 1
        if step % 7 == 0:
            assert value.to("cpu").numpy()[::333].tolist() == [6.0 * step] * 4


@pytest.mark.gpu
def test_groups_are_recorded_into_no_graph_of_somebody_else() -> None:
    value = flow.zeros(1000, device="cuda")
    for _ in range(5):
        for _ in range(6):
            value += 1
        flow.cuda.synchronize()
    api, stream = cuda.api(), cuda.stream_pointer(value.device)
    api.streamBeginCapture(stream, api.streamCaptureModeRelaxed)
    for _ in range(6):
        value += 1
    graph = api.streamEndCapture(stream)
    executable = api.graphInstantiate(graph)
    assert value.to("cpu").numpy()[0] == 30
    api.graphLaunch(executable, stream)
    assert value.to("cpu").numpy()[0] == 36
    api.graphExecDestroy(executable)
    api.graphDestroy(graph)
