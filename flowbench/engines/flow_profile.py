"""One step of Flow, observed instruction by instruction: the time of each, and the memory it found and left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flowbench.engine import HeldTensor, OpCall, StepProfile


def profile_step(step: Callable[[], None], device: str, synchronize: Callable[[], None]) -> StepProfile:
    """Run `step` with the virtual machine observed; on a GPU each instruction is waited for.

    It runs twice: the first time tells of what shape each tensor is that lives on from step to step. What a look at the
    books costs is taken off the clock, so that the timeline shows the step and not its observer.
    """
    import framework as flow
    from framework.vm import machine, runtime

    place = flow.device(device)
    observer = _Observer(runtime(place).allocator, place, synchronize)
    with machine.observed(observer.learn):
        step()
    observer.begin()
    with machine.observed(observer.observe):
        step()
        synchronize()
    return observer.profile()


class _Observer:
    def __init__(self, allocator: Any, device: Any, synchronize: Callable[[], None]) -> None:
        self._allocator, self._device, self._synchronize = allocator, device, synchronize
        self._calls: list[OpCall] = []
        self._timeline: list[tuple[float, int]] = []
        self._shapes: dict[int, tuple[int, str]] = {}
        self._peak_bytes, self._peak_at_ms = 0, 0.0
        self._held: list[HeldTensor] = []
        self._began = self._aside_s = 0.0

    def learn(self, instruction: Any, run: Callable[[], None]) -> None:
        """Run one instruction, and keep in mind what it works on."""
        self._note_shapes(instruction)
        run()

    def begin(self) -> None:
        self._synchronize()
        self._began = time.perf_counter()
        self._look("")

    def observe(self, instruction: Any, run: Callable[[], None]) -> None:
        """Run one instruction between two looks at the memory."""
        if instruction.writes and instruction.writes[0].storage.device is not self._device:
            run()
            return
        module, _ = _place(instruction.scope)
        name = instruction.kernel.__name__
        self._note_shapes(instruction)
        self._look("")
        self._synchronize()
        before = time.perf_counter()
        run()
        self._synchronize()
        spent_ms = 1000 * (time.perf_counter() - before)
        self._calls.append(OpCall(name, _written(instruction), module, spent_ms))
        self._look(name, module)

    def profile(self) -> StepProfile:
        self._look("")
        step_ms = self._now_ms()
        return StepProfile(step_ms, self._calls, self._peak_bytes, self._peak_at_ms, self._held, self._timeline, ())

    def _now_ms(self) -> float:
        return 1000 * (time.perf_counter() - self._began - self._aside_s)

    def _look(self, ran: str, module: str = "") -> None:
        """Note what is held now; and, where more was held since the last look than ever before, by whom."""
        now_ms, looked = self._now_ms(), time.perf_counter()
        allocated = self._allocator.allocated()
        most = max(allocated, self._allocator.peak_allocated()) if self._timeline else allocated
        self._timeline.append((now_ms, allocated))
        if most > self._peak_bytes:
            self._peak_bytes, self._peak_at_ms = most, now_ms
            self._held = [self._tensor(block) for block in self._allocator.blocks()]
            if most > allocated:
                # It was given back before the instruction ended: working memory of its kernel, or what came between two.
                self._timeline[-1:] = [(now_ms, most), (now_ms, allocated)]
                self._held.append(HeldTensor(ran or "between instructions", "working memory", module, most - allocated))
        self._allocator.reset_peaks()
        self._aside_s += time.perf_counter() - looked

    def _note_shapes(self, instruction: Any) -> None:
        """The first array that is seen in a storage says what the storage is; one that is a part of it, of what."""
        for array in (*instruction.writes, *instruction.reads):
            storage = array.storage
            known = self._shapes.get(id(storage.block))
            if known is None or known[0] != storage.serial:
                whole = array.nbytes == storage.nbytes
                elements = f"{array.dtype.name}[{storage.nbytes // array.dtype.itemsize}] in parts"
                self._shapes[id(storage.block)] = (storage.serial, _shape(array) if whole else elements)

    def _tensor(self, block: Any) -> HeldTensor:
        module, operation = _place(block.label)
        _, shape = self._shapes.get(id(block), (0, ""))
        return HeldTensor(
            operation or "parameters, batches, and what else no operation made", shape, module, block.nbytes
        )


def _place(frame: Any) -> tuple[str, str]:
    """The path of the modules and the operation of a scope."""
    from framework.vm import scope

    modules, _, operation = scope.path(frame).rpartition(": ")
    if operation == "backward":
        modules, _, forward = modules.rpartition(".")
        operation = f"{forward} backward".strip()
    return modules, operation


def _written(instruction: Any) -> str:
    """The shape of the first tensor that is written; how many are, where it works on a group: one's shape says nothing then."""
    written = instruction.writes
    group = instruction.operands[0] if written else None
    if isinstance(group, tuple) and len(group) > 1:
        return f"{len(group)} tensors"
    return _shape(written[0]) if written else ""


def _shape(array: Any) -> str:
    return f"{array.dtype.name}{list(array.shape)}"
