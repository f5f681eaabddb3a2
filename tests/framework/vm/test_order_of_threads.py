"""Random programs on streams that are threads give what they give without streams."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import numpy as np
import pytest

from framework.device import cpu
from framework.dtype import int64
from framework.kernels import kernel
from framework.vm import Array, HostStream, Instruction, machine, runtime
from framework.vm.uses import Uses

_ELEMENTS = 24
# Made now: a device's first stream is that of its runtime.
_MEMORY = runtime(cpu)


@kernel(outputs=1)
def mix(out: Any, *inputs: Any, number: int, pause_s: float) -> None:
    """Another value for each element of out, from those of the inputs, after a while."""
    total = sum((place + 2) * int(given.ndarray.sum()) for place, given in enumerate(inputs))
    time.sleep(pause_s)
    out.ndarray[...] = (31 * total + number) % 1_000_003 + np.arange(out.size).reshape(out.shape)


def _results(seed: int, streams: list[Any]) -> list[Any]:
    """What is seen by looking at parts of the memories now and then, and at the end at all there are."""
    draw = Random(seed)
    held: list[Array] = []
    seen: list[Any] = []

    def part() -> Array:
        start, step = draw.randrange(_ELEMENTS - 4), draw.choice([1, 1, 2, 3])
        extent = draw.randint(0 if draw.random() < 0.1 else 1, (_ELEMENTS - 1 - start) // step + 1)
        return draw.choice(held).view((extent,), (step,), start)

    for number in range(40):
        if len(held) < 2 or draw.random() < 0.1:
            held.append(_MEMORY.full((_ELEMENTS,), number, int64))
        step, stream = draw.random(), draw.choice(streams)
        attributes = {"number": number, "pause_s": draw.choice([0, 0, 0.001])}
        operands = part(), *[part() for _ in range(draw.randint(0, 2))]
        if step < 0.6:
            machine.issue(Instruction(mix, operands, attributes), stream)
        elif step < 0.8:
            machine.issuing(mix, cpu)(*operands, **attributes)
        elif step < 0.9:
            held.pop(draw.randrange(len(held)))
        else:
            seen.append(_MEMORY.to_host(operands[0]).tolist())
    return [*seen, *[_MEMORY.to_host(array).tolist() for array in held]]


def _results_of_threads(seed: int) -> list[Any]:
    streams = [machine.add_stream(HostStream(cpu, f"thread {number}")) for number in range(3)]
    try:
        return _results(seed, streams)
    finally:
        for stream in streams:
            machine.remove_stream(stream)


@pytest.mark.parametrize("seed", range(20))
def test_threads_change_no_result(seed: int) -> None:
    assert _results_of_threads(seed) == _results(seed, [None] * 3)
    assert machine.is_plain


def test_without_waiting_for_parts_that_overlap_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uses, "touch", lambda uses, part: False)
    assert any(_results_of_threads(seed) != _results(seed, [None] * 3) for seed in range(200))
