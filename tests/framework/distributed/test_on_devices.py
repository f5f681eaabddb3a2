"""Collectives of CUDA tensors without a device: doubles in place of NCCL and of the CUDA runtime see what is asked of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.device import Device, cpu
from framework.distributed import backends, nccl, staged
from framework.distributed.backends import Machines
from framework.distributed.board import Board
from framework.distributed.errors import CollectiveError, DistributedError
from framework.distributed.nccl import NcclGroup
from framework.distributed.rendezvous import choose_device
from framework.distributed.staged import StagedGroup
from framework.vm.runtime import runtime
from tests.framework.distributed.test_watchdog import Values

pytest_plugins = ["tests.framework.cuda.fake_api"]

IDENTITY = bytes(range(128))
STREAM = 77


class Shared(Values):
    """A store in which the other ranks have done their part already."""

    def gather(self, name: str, ranks: tuple[int, ...], timeout_s: float) -> list[bytes]:
        return [self.values.get(f"{name}/{number}", b"elsewhere") for number in range(len(ranks))]

    def add(self, key: str, amount: int) -> int:
        return amount

    def wait_for_count(self, key: str, count: int, timeout_s: float) -> bool:
        return self.together

    together = True


class Binding:
    """CuPy's binding of NCCL: notes every call."""

    NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_BFLOAT16, NCCL_FLOAT32, NCCL_FLOAT64 = range(10, 16)
    NCCL_SUM, NCCL_AVG, NCCL_MIN, NCCL_MAX = range(20, 24)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses: RuntimeError | None = None

    def get_unique_id(self) -> bytes:
        return IDENTITY

    def NcclCommunicator(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self

    def __getattr__(self, name: str) -> Any:
        if name not in {"allReduce", "broadcast", "allGather", "reduceScatter", "send", "recv", "abort", "destroy"}:
            raise AttributeError(name)

        def note(*arguments: Any) -> None:
            if self.refuses is not None and name not in ("abort", "destroy"):
                raise self.refuses
            self.calls.append((name, *arguments))

        return note

    def check_async_error(self) -> None:
        """Nothing went wrong."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    binding, store = Binding(), Shared()
    events: list[int] = []

    def record(event: int, stream: int) -> None:
        assert stream == STREAM
        events.append(event)

    api = SimpleNamespace(
        deviceGetPCIBusId=lambda index: f"0000:0{index}",
        eventDisableTiming=2,
        eventCreateWithFlags=lambda flags: len(events) + 1,
        eventRecord=record,
    )
    monkeypatch.setattr(nccl, "why_not", lambda: None)
    for function in (nccl._type, nccl._operation, nccl._all_reduce):
        function.cache_clear()
    monkeypatch.setattr(nccl, "_nccl", lambda: binding)
    monkeypatch.setattr(nccl.cuda, "api", lambda: api)
    monkeypatch.setattr(nccl.cuda, "choose", lambda device: None)
    monkeypatch.setattr(nccl.cuda, "stream_pointer", lambda device: STREAM)
    monkeypatch.setattr(nccl.cuda, "is_capturing", lambda device: False)
    monkeypatch.setattr(nccl.cuda, "has_passed", lambda event: True)
    member = SimpleNamespace(machine="here")
    world = SimpleNamespace(store=store, rank=4, members={4: member}, timeout_s=5.0)
    group = SimpleNamespace(rank=0, ranks=(4, 6), size=2, world=world, neighbours=dict)
    yield SimpleNamespace(binding=binding, store=store, group=group, events=events)
    for function in (nccl._type, nccl._operation, nccl._all_reduce):
        function.cache_clear()


def make(bench: Any) -> NcclGroup:
    made = NcclGroup(bench.group, "g", Device("cuda:1"))
    bench.binding.calls.clear()
    return made


def array(count: int, dtype: Any = flow.float32) -> Any:
    return runtime(cpu).empty((count,), dtype)


def test_nccls_ranks_meet_by_the_identity_that_the_first_one_makes(bench: Any) -> None:
    NcclGroup(bench.group, "g", Device("cuda:1")).close()
    assert bench.binding.calls == [(2, IDENTITY, 0), ("destroy",)]
    assert bench.store.values["g/identity"] == IDENTITY
    assert bench.store.values["g/gpu/0"] == b"here 0000:01"


def test_every_collective_is_enqueued_on_the_current_stream_with_an_event_behind(bench: Any) -> None:
    group, x, y, one = make(bench), array(6), array(3), array(1, flow.uint8)
    group.all_reduce(x, "avg")
    group.all_reduce(array(4, flow.bfloat16), "sum")
    group.broadcast(x, 1)
    group.all_gather(x, y)
    group.reduce_scatter(y, x, "max")
    group.barrier(one)
    group.send(x, 1)
    group.recv(x, 1)
    single, double = Binding.NCCL_FLOAT32, Binding.NCCL_UINT8
    calls = bench.binding.calls
    assert calls[0] == ("allReduce", x.ptr, x.ptr, 6, single, Binding.NCCL_AVG, STREAM)
    assert calls[1][3:] == (4, Binding.NCCL_BFLOAT16, Binding.NCCL_SUM, STREAM)
    assert calls[2:] == [
        ("broadcast", x.ptr, x.ptr, 6, single, 1, STREAM),
        ("allGather", y.ptr, x.ptr, 3, single, STREAM),
        ("reduceScatter", x.ptr, y.ptr, 3, single, Binding.NCCL_MAX, STREAM),
        ("allReduce", one.ptr, one.ptr, 1, double, Binding.NCCL_MAX, STREAM),
        ("send", x.ptr, 6, single, 1, STREAM),
        ("recv", x.ptr, 6, single, 1, STREAM),
    ]
    assert len(bench.events) == 8
    group.close()


def test_an_event_is_used_again_once_its_collective_was_seen_to_end(bench: Any) -> None:
    group, x = make(bench), array(6)
    group._watchdog.stop()
    group.all_reduce(x, "sum")
    group.all_reduce(x, "sum")
    assert bench.events == [1, 2]
    group._watchdog._look_once()
    assert sorted(group._idle_events) == [1, 2]
    group.all_reduce(x, "sum")
    assert bench.events[-1] in (1, 2)
    group.close()


def test_of_booleans_the_sum_is_whether_any_is_true(bench: Any) -> None:
    group = make(bench)
    group.all_reduce(array(4, flow.bool_), "sum")
    assert bench.binding.calls[0][4:6] == (Binding.NCCL_UINT8, Binding.NCCL_MAX)
    group.close()


def test_what_nccl_refuses_is_told_with_the_collectives_name(bench: Any) -> None:
    group = make(bench)
    bench.binding.refuses = RuntimeError("NCCL_ERROR_INVALID_USAGE")
    with pytest.raises(
        CollectiveError, match=r"all_reduce\(float32\[6\], sum\) of group g was refused by NCCL: NCCL_ERR"
    ):
        group.all_reduce(array(6), "sum")
    group.close()


def test_a_failure_that_nobody_heard_of_is_raised_at_the_end(bench: Any) -> None:
    group = make(bench)
    group._watchdog.failure = CollectiveError("rank 6 did not come")
    with pytest.raises(CollectiveError, match="rank 6 did not come"):
        group.close()
    group = make(bench)
    group._watchdog.failure = CollectiveError("rank 6 did not come")
    with pytest.raises(CollectiveError, match="group g cannot be used any more: rank 6 did not come"):
        group.all_reduce(array(6), "sum")
    group.close()
    assert ("destroy",) not in bench.binding.calls


def test_where_another_rank_does_not_part_nccl_is_left_by_force(bench: Any) -> None:
    group = make(bench)
    bench.store.together = False
    group.close()
    assert bench.binding.calls == [("abort",)]


def test_at_the_end_the_last_calls_are_compared_too(bench: Any) -> None:
    group = make(bench)
    other = Board(bench.store, "g", 1, (4, 6))
    other.note(1, "all_reduce(float32[5], sum)")
    other.post()
    group.all_reduce(array(6), "sum")
    with pytest.raises(
        CollectiveError, match=r"rank 4 calls all_reduce\(float32\[6\], sum\); rank 6 calls all_reduce\(float32\[5"
    ):
        group.close()
    assert bench.binding.calls[-1] == ("abort",)


def test_two_ranks_on_one_gpu_are_refused_with_the_way_out(bench: Any) -> None:
    bench.store.set("g/gpu/1", b"here 0000:01")
    with pytest.raises(DistributedError, match=r'ranks 4, 6 have the same GPU .* take backend="shm"'):
        NcclGroup(bench.group, "g", Device("cuda:1"))


class HostStaging:
    """Copies between two places of the host's memory, in place of a device's."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def send(self, target: int, source: np.ndarray) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def receive(self, target: np.ndarray, source: int) -> None:
        ctypes.memmove(target.ctypes.data, source, target.nbytes)


class Doubling:
    """A group on the host that doubles what it is given."""

    rank, size = 0, 2

    def all_reduce(self, array: Any, op: str) -> None:
        array.ndarray[...] *= 2

    def broadcast(self, array: Any, src: int) -> None:
        array.ndarray[...] = 5 if src else array.ndarray

    def all_gather(self, out: Any, array: Any) -> None:
        out.ndarray[...] = np.concatenate([array.ndarray, 2 * array.ndarray])

    def reduce_scatter(self, out: Any, array: Any, op: str) -> None:
        out.ndarray[...] = array.ndarray[: out.size] * 2

    def send(self, array: Any, dst: int) -> None:
        self.sent = array.ndarray.copy()

    def recv(self, array: Any, src: int) -> None:
        array.ndarray[...] = self.sent


def test_through_the_host_values_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "Staging", HostStaging)
    monkeypatch.setattr(staged, "CudaStream", lambda device, name: SimpleNamespace(synchronize=lambda: None))
    group = StagedGroup(Doubling(), Device("cuda:0"))  # type: ignore[arg-type]
    x, y, out = array(3), array(3), array(6)
    x.ndarray[...] = [1, 2, 3]
    group.all_reduce(x, "sum")
    assert x.ndarray.tolist() == [2, 4, 6]
    group.all_gather(out, x)
    assert out.ndarray.tolist() == [2, 4, 6, 4, 8, 12]
    group.reduce_scatter(y, out, "sum")
    assert y.ndarray.tolist() == [4, 8, 12]
    group.broadcast(x, 0)
    assert x.ndarray.tolist() == [2, 4, 6]
    group.send(x, 1)
    group.recv(y, 1)
    assert y.ndarray.tolist() == [2, 4, 6]
    group.broadcast(x, 1)
    assert x.ndarray.tolist() == [5, 5, 5]
    group.all_reduce(array(0), "sum")


ONE, TWO = Machines(1, gpus_suffice=True), Machines(2, gpus_suffice=True)
FEW, FEW_ON_TWO = Machines(1, gpus_suffice=False), Machines(2, gpus_suffice=False)


@pytest.mark.parametrize(
    ("wanted", "kind", "machines", "backend"),
    [
        (None, "cpu", ONE, "shm"),
        (None, "cpu", TWO, "mpi"),
        (None, "cuda", ONE, "nccl"),
        (None, "cuda", TWO, "nccl"),
        (None, "cuda", FEW, "shm"),
        ("shm", "cuda", ONE, "shm"),
        ("mpi", "cpu", ONE, "mpi"),
        ("nccl", "cuda", TWO, "nccl"),
    ],
)
def test_the_backend_that_fits_is_chosen(wanted: str | None, kind: str, machines: Machines, backend: str) -> None:
    assert backends.choose(wanted, kind, machines) == backend


@pytest.mark.parametrize(
    ("wanted", "kind", "machines", "words"),
    [
        ("nccl", "cpu", ONE, "moves CUDA tensors alone"),
        ("mpi", "cuda", ONE, "moves CPU tensors alone"),
        ("shm", "cpu", TWO, "is for ranks of one machine, and these are on 2"),
        (None, "cuda", FEW_ON_TWO, "need nccl, with a GPU for each rank"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_with_the_way_out(
    wanted: str | None, kind: str, machines: Machines, words: str
) -> None:
    with pytest.raises(DistributedError, match=words):
        backends.choose(wanted, kind, machines)


def test_what_was_asked_for_is_checked_at_the_start() -> None:
    backends.check("nccl", ONE, ["a", "b"])
    backends.check(None, FEW_ON_TWO, [None])
    with pytest.raises(DistributedError, match="rank 1 found none"):
        backends.check("nccl", FEW, ["a", None])
    with pytest.raises(DistributedError, match=r'NCCL refuses two ranks on one.* take backend="shm"'):
        backends.check("nccl", FEW, ["a", "a"])
    with pytest.raises(DistributedError, match="one machine"):
        backends.check("shm", TWO, [None, None])


@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (5, 1), (None, 0)])
def test_a_ranks_gpu_is_its_local_rank_modulo_their_number(
    fake_cuda: Any, monkeypatch: pytest.MonkeyPatch, local_rank: int | None, index: int
) -> None:
    monkeypatch.setattr(fake_cuda, "deviceGetPCIBusId", lambda index: f"0000:0{index}", raising=False)
    assert choose_device(local_rank) == f"0000:0{index}"
    assert flow.empty(3, device="cuda").device == flow.device(f"cuda:{index}")
    assert fake_cuda.contexts == {index}  # none on a GPU that is another rank's


def test_without_a_gpu_a_rank_has_none(fake_cuda: Any) -> None:
    fake_cuda.count = 0
    assert choose_device(0) is None
