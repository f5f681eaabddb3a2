"""Scheduling policies: the same gradients by each, and what they cost in memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import framework as flow
from framework.device import cpu
from framework.kernels.table import kernel
from framework.vm import Instruction, machine, runtime
from framework.vm.array import Array
from framework.vm.schedule import TurnStream, scheduled
from tests.framework.distributed.ranks import run


class Step:
    """A training step of a small network, always on the same data."""

    def __init__(self) -> None:
        flow.manual_seed(0)
        nn = flow.nn
        width = 16
        blocks = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU()) for _ in range(6)]
        self.model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, nn.Flatten(), nn.Linear(width * 256, 5))
        self.images, self.labels = flow.randn(4, 3, 16, 16), flow.tensor(np.arange(4))
        self.optimizer = flow.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self) -> list[np.ndarray]:
        self.optimizer.zero_grad()
        flow.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        return [np.array(p.grad.tolist()) for p in self.model.parameters()]

    def peak(self) -> int:
        """Bytes allocated at most in a step, above what is held before it."""
        for _ in range(2):
            self()
        self.optimizer.zero_grad()
        machine.synchronize()
        flow.cpu.reset_peak_memory_stats()
        before = flow.cpu.memory_allocated()
        self()
        return flow.cpu.max_memory_allocated() - before


def test_all_policies_give_the_same_gradients() -> None:
    step = Step()
    expected = step()
    for policy in ("backward", "accumulate"):
        with scheduled(policy):
            for ours, theirs in zip(step(), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert machine.is_plain


def test_accumulate_needs_no_more_memory_than_a_single_stream() -> None:
    """With gradients averaged beside the backward, as one rank of a group does it."""
    (said,) = run(
        """
        from tests.framework.vm.test_schedule import Step
        from framework.vm.schedule import scheduled

        dist.init_process_group(timeout=30)
        step = Step()
        step.model = flow.nn.parallel.DistributedDataParallel(step.model, bucket_cap_mb=0.05)
        peaks = {}
        for policy in ("single", "accumulate"):
            with scheduled(policy):
                peaks[policy] = step.peak()
        assert len(step.model.reducer.buckets) > 2
        assert peaks["accumulate"] <= peaks["single"], peaks
        dist.destroy_process_group()
        print("well")
        """,
        1,
    )
    assert said == "well\n"


def test_by_policy_single_nothing_runs_elsewhere() -> None:
    stream = runtime(cpu).open_stream("communication")

    @kernel(outputs=1)
    def where(out: Array) -> None:
        out.ndarray[...] = threading.current_thread() is threading.main_thread()

    try:
        for policy, here in (("single", 1), ("accumulate", 0)):
            x = flow.zeros(1)
            with scheduled(policy):
                machine.issue(Instruction(where, (x.array,), {}), stream)
                assert x.item() == here
    finally:
        runtime(cpu).close_stream(stream)


@pytest.mark.usefixtures("no_garbage")
def test_a_backward_on_several_streams_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are held until all of a backward is issued, as it comes to be where the host is faster than the device."""
    step = Step()
    alone = step.peak()
    accumulate = flow.Tensor.accumulate
    issued = []

    def count(self: flow.Tensor, *gradient: object, **options: object) -> None:
        issued.append(self)
        accumulate(self, *gradient, **options)
        if len(issued) == len(list(step.model.parameters())):
            TurnStream.turn.release()

    with scheduled("backward"):
        step()
        step.optimizer.zero_grad()
        machine.synchronize()
        flow.cpu.reset_peak_memory_stats()
        before = flow.cpu.memory_allocated()
        monkeypatch.setattr(flow.Tensor, "accumulate", count)
        TurnStream.turn.acquire()
        step()
        several = flow.cpu.max_memory_allocated() - before
    assert several > 1.3 * alone, (several, alone)


def test_what_fails_on_a_backward_stream_is_raised() -> None:
    step = Step()

    def breaks(instruction: object, run: object) -> None:
        raise ArithmeticError("as it may happen")

    def look() -> None:
        with scheduled("backward"):
            step.optimizer.zero_grad()
            loss = flow.nn.functional.cross_entropy(step.model(step.images), step.labels)
            with machine.observed(breaks):
                loss.backward(flow.ones(()))
                machine.synchronize()

    with pytest.raises(ArithmeticError):
        look()
    assert step()  # and the next step is as ever


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="one of accumulate, backward, single, not 'fastest'"), scheduled("fastest"):
        pass
