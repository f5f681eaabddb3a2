"""Which instruction waits for which, across streams; and observers, who see every instruction go by."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import framework as flow
from framework.device import cpu
from framework.dtype import float32
from framework.kernels import kernel
from framework.vm import Array, CachingAllocator, HostStream, Instruction, Mark, Storage, Stream
from framework.vm import machine as the_machine
from framework.vm.machine import Machine
from tests.framework.tensors import leaf
from tests.framework.vm.fakes import FakeSource, FakeStream


@kernel(outputs=1)
def one(out: Any, *inputs: Any) -> None:
    """Does nothing."""


@kernel(outputs=2)
def two(first: Any, second: Any, *inputs: Any) -> None:
    """Does nothing."""


class Bench:
    """A machine with a first stream, which its instructions go to, and fake streams beside it; and arrays to use on it."""

    def __init__(self, *names: str) -> None:
        self.memory = CachingAllocator(FakeSource())
        self.machine = Machine()
        self.streams = {name: FakeStream(name) for name in ("first", *names)}
        for stream in self.streams.values():
            self.machine.add_stream(stream)
            stream.waits.clear()

    def array(self) -> Array:
        return Array(Storage(self.memory, 16), (4,), (1,), float32)

    def issue(self, stream: str, kernel_: Any, *operands: Any) -> list[tuple[str, int]]:
        """Issues, and returns what the stream was made to wait for: (stream, instruction).

        That all others wait for the first stream is seen to here.
        """
        target = self.streams[stream]
        target.waits.clear()
        self.machine.issue(Instruction(kernel_, operands, {}), target)
        waits = [wait for wait in target.waits if wait[0] != "first"]
        assert (len(waits) < len(target.waits)) == (stream != "first")
        return sorted(waits)


@pytest.fixture
def bench() -> Bench:
    return Bench("a", "b", "c")


def test_a_read_waits_for_the_last_write(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    assert bench.issue("a", one, x) == []
    assert bench.issue("b", one, y, x) == [("a", 1)]


def test_a_write_waits_for_the_last_write_and_the_reads_since(bench: Bench) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    bench.issue("a", one, x)
    bench.issue("b", one, y, x)
    bench.issue("b", one, z, x)
    # Of one stream the latest read stands for all.
    assert bench.issue("c", one, x) == [("a", 1), ("b", 2)]


def test_a_write_does_not_wait_for_what_came_before_the_last_write(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    bench.issue("a", one, x)
    bench.issue("b", one, y, x)
    bench.issue("a", one, x)  # waited for the read itself
    assert bench.issue("c", one, x) == [("a", 2)]


def test_reads_do_not_wait_for_reads(bench: Bench) -> None:
    x = bench.array()
    bench.issue("a", one, bench.array(), x)
    assert bench.issue("b", one, bench.array(), x) == []


def test_the_same_stream_waits_for_nothing(bench: Bench) -> None:
    x = bench.array()
    for _ in range(3):
        assert bench.issue("a", one, x, x) == []
        assert bench.issue("a", one, bench.array(), x) == []


def test_other_memory_is_no_dependence(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    bench.issue("a", one, x)
    assert bench.issue("b", one, y) == []


def test_views_of_one_storage_depend_on_each_other(bench: Bench) -> None:
    x = bench.array()
    bench.issue("a", one, x.view((2,), (1,), 0))
    assert bench.issue("b", one, bench.array(), x.view((2,), (1,), 2)) == [("a", 1)]


def test_what_is_written_in_place_is_read_too(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    bench.issue("a", one, x)
    assert bench.issue("b", one, x, x, y) == [("a", 1)]
    assert bench.issue("a", one, x, x) == [("b", 1)]


def test_every_output_is_a_write_and_missing_operands_are_none(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    bench.issue("a", two, x, None)
    bench.issue("b", two, None, y, None, 2.5)
    assert bench.issue("c", one, bench.array(), x, y) == [("a", 1), ("b", 1)]


def test_operands_in_a_tuple_count_each(bench: Bench) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    bench.issue("a", one, (x, y))
    assert (x.storage.version, y.storage.version, z.storage.version) == (1, 1, 0)
    assert bench.issue("b", one, (z,), (y, None)) == [("a", 1)]
    assert bench.issue("c", one, z) == [("b", 1)]


def test_one_wait_covers_all_that_was_issued_by_then(bench: Bench) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    bench.issue("a", one, x)
    bench.issue("a", one, y)
    assert bench.issue("b", one, bench.array(), x) == [("a", 1)]
    assert bench.issue("b", one, bench.array(), y) == []
    bench.issue("a", one, z)
    assert bench.issue("b", one, bench.array(), z) == [("a", 3)]


def test_a_stream_that_comes_later_waits_for_all_before() -> None:
    bench = Bench()
    late = FakeStream("late")
    bench.machine.add_stream(late)
    assert [name for name, _ in late.waits] == ["first"]


def test_what_the_first_stream_uses_is_not_noted(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    bench.issue("first", one, x, y)
    assert x.storage.uses is None
    assert y.storage.uses is None


def test_the_first_stream_waits_for_others_only_where_they_used_the_same_memory(bench: Bench) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    bench.issue("a", one, x, y)
    assert bench.issue("first", one, z) == []
    assert bench.issue("first", one, z, y) == []  # both read
    assert bench.issue("first", one, z, x) == [("a", 1)]
    assert bench.issue("first", one, y) == []  # that wait came behind the read as well


def test_when_the_first_stream_has_waited_for_all_it_is_as_if_it_were_alone(bench: Bench) -> None:
    x, y = bench.array(), bench.array()
    assert bench.machine.is_plain
    bench.issue("a", one, x)
    bench.issue("b", one, y)
    bench.issue("first", one, x, x)
    assert not bench.machine.is_plain
    bench.issue("first", one, bench.array(), y)
    assert bench.machine.is_plain
    address = x.ptr
    del x
    assert bench.array().ptr == address  # although "a" itself has not run yet


def test_what_was_waited_for_long_ago_costs_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    bench.issue("a", one, x)
    bench.issue("first", one, z, x)  # waits; x keeps its last write
    bench.issue("b", one, y)  # and now there is something else to wait for
    issued = []
    in_full = bench.machine._issue
    monkeypatch.setattr(bench.machine, "_issue", lambda *what: (issued.append(what), in_full(*what)))
    bench.machine.issuing(one, cpu)(z, x)
    assert not issued
    bench.machine.issuing(one, cpu)(z, y)
    assert len(issued) == 1


def _waits(bench: Bench, *operands: Any) -> bool:
    """Whether the first stream, given an instruction that writes the first operand, is made to wait."""
    waits = bench.streams["first"].waits
    waits.clear()
    bench.machine.issuing(one, cpu)(*operands)
    found = bool(waits)
    waits.clear()
    bench.machine.issuing_prepared(one, cpu, {}, lambda *_: None)(*operands)
    return found or bool(waits)


def test_parts_of_a_storage_that_are_used_apart_do_not_wait_for_each_other(bench: Bench) -> None:
    """As the gradients in one piece of memory: some are written beside while others are written by the first stream."""
    whole, other = Array(Storage(bench.memory, 64), (16,), (1,), float32), bench.array()
    parts = [whole.view((4,), (1,), start) for start in (0, 4, 8, 12)]
    bench.issue("a", one, parts[1], parts[3])
    assert not _waits(bench, parts[0], other)
    assert not _waits(bench, other, parts[0])
    # What lies between two parts that were used counts as used.
    for start in range(4, 16, 2):
        bench.issue("a", one, parts[1], parts[3])
        assert _waits(bench, whole.view((2,), (1,), start), other), start
    # A row of every second element reaches over those between, up to its last.
    bench.issue("a", one, parts[2])
    assert not _waits(bench, whole.view((4,), (2,), 0), other)
    assert _waits(bench, whole.view((5,), (2,), 0), other)
    bench.issue("a", one, parts[2])
    assert _waits(bench, other, whole)


def test_what_was_joined_no_longer_counts_as_used(bench: Bench) -> None:
    whole = Array(Storage(bench.memory, 64), (16,), (1,), float32)
    first, last = whole.view((4,), (1,), 0), whole.view((4,), (1,), 12)
    bench.issue("a", one, first)
    bench.machine.join(bench.streams["a"].mark())
    bench.issue("a", one, last)
    assert not _waits(bench, first)
    assert _waits(bench, last)


def test_an_instruction_that_is_repeated_is_as_one_issued_anew(bench: Bench) -> None:
    x, y, ran, seen = bench.array(), bench.array(), [], []
    a, first = bench.streams["a"], bench.streams["first"]
    instruction = Instruction(one, (x,), {})
    again = bench.machine.repeating(instruction, a, lambda: ran.append(bench.machine._launching))
    assert again() == (a, 1)
    assert ran == [(a, 1)]
    assert a.waits == [("first", _newest(a))]
    assert x.storage.version == 1
    assert x.storage.uses.write == (a, 1)
    assert not bench.machine.is_plain
    # It waits for whoever read or wrote the array since; and they wait for it.
    assert bench.issue("b", one, y, x) == [("a", 1)]
    a.waits.clear()
    assert again() == (a, 2)
    assert sorted(a.waits) == [("b", 1), ("first", _newest(a))]
    assert bench.issue("c", one, x) == [("a", 2)]
    a.waits.clear()
    assert again() == (a, 3)
    assert ("c", 1) in a.waits
    first.waits.clear()
    bench.machine.issuing(one, cpu)(bench.array(), x)
    assert first.waits == [("a", 3)]
    # Observers see it, and a policy may keep it on the first stream.
    with bench.machine.observed(lambda observed, run: seen.append(observed)):
        assert again() == (a, 4)
    assert seen == [instruction]
    bench.machine.keeps_to_first = True
    assert again().stream is bench.machine.newest(a).stream is first
    assert x.storage.version == 6
    assert len(ran) == 3


def test_a_repeated_instruction_that_fails_may_have_begun(bench: Bench) -> None:
    x = bench.array()

    def fail() -> None:
        raise ArithmeticError("as it may happen")

    again = bench.machine.repeating(Instruction(one, (x,), {}), bench.streams["a"], fail)
    with pytest.raises(ArithmeticError):
        again()
    assert x.storage.uses.write == (bench.streams["a"], 1)
    assert not bench.machine.is_plain
    assert bench.machine._launching is None


def test_the_first_streams_points_are_new_ones_though_it_counts_nothing(bench: Bench) -> None:
    first, a = bench.streams["first"], bench.streams["a"]
    assert bench.machine.newest(first) == (first, 1)
    assert bench.machine.newest(first) == (first, 2)
    bench.issue("a", one, bench.array())
    assert bench.machine.newest(a) == bench.machine.newest(a) == (a, 1)
    first.waits.clear()
    bench.machine.join(bench.machine.newest(first))
    assert not first.waits
    assert not bench.machine.is_plain  # "a" is as outstanding as it was


def _newest(stream: FakeStream) -> int:
    """What a stream is asked to wait for of the first one."""
    return next(sequence for name, sequence in stream.waits if name == "first")


def test_a_prepared_instruction_waits_and_is_seen_as_any_other(bench: Bench) -> None:
    x, y, z = bench.array(), bench.array(), bench.array()
    ran, seen = [], []
    issue = bench.machine.issuing_prepared(one, cpu, {"factor": 3}, lambda *operands: ran.append(operands))
    issue(z, x, None)
    assert ran == [(z, x, None)]
    assert (z.storage.version, x.storage.version) == (1, 0)
    bench.issue("a", one, y)
    issue(z, x, None)  # something is outstanding, but not of these
    assert len(ran) == 2
    first = bench.streams["first"]
    assert not first.waits
    waits = []
    in_full = bench.machine.issue
    bench.machine.issue = lambda instruction, *on: waits.append((instruction.kernel, instruction.attributes))
    issue(z, y, None)
    with bench.machine.observed(lambda instruction, run: seen.append(instruction)):
        issue(z, x, None)
    bench.machine.issue = in_full
    assert waits == [(one, {"factor": 3})] * 2
    assert len(ran) == 2


def test_working_memory_is_held_until_its_instruction_has_run(bench: Bench) -> None:
    held = []

    @kernel(outputs=1)
    def works(out: Any) -> None:
        held.append(bench.machine.lend(bench.array()))

    out = bench.array()
    bench.issue("a", works, out)
    address = held[0].ptr
    held.clear()
    assert bench.array().ptr != address
    bench.streams["a"].finish()
    assert bench.array().ptr == address


def test_looking_at_values_waits_for_them(bench: Bench) -> None:
    x = bench.array()
    bench.issue("b", one, x)
    bench.streams["first"].waits.clear()
    bench.machine.settle(x)
    assert bench.streams["first"].waits == [("b", 1)]


def test_a_stream_that_leaves_is_finished_first(bench: Bench) -> None:
    stream = bench.streams["b"]
    bench.issue("b", one, bench.array())
    bench.machine.remove_stream(stream)
    assert stream.synchronized == 1


def test_memory_goes_back_when_its_last_users_are_done(bench: Bench) -> None:
    a, b = bench.streams["a"], bench.streams["b"]
    x = bench.array()
    address = x.ptr
    bench.issue("a", one, x)
    bench.issue("b", one, bench.array(), x)
    del x
    a.finish()
    assert bench.array().ptr != address
    b.finish()
    assert address in [array.ptr for array in [bench.array() for _ in range(4)]]


def test_with_one_stream_nothing_is_noted() -> None:
    bench = Bench()
    x = bench.array()
    bench.issue("first", one, x)
    assert x.storage.uses is None
    assert x.storage.version == 1


def test_an_instruction_without_a_stream_goes_to_its_devices_first(bench: Bench) -> None:
    x = bench.array()
    bench.issue("b", one, x)
    bench.streams["first"].waits.clear()
    bench.machine.issue(Instruction(one, (x,), {}))
    assert bench.streams["first"].waits == [("b", 1)]


def test_what_fails_may_have_begun(bench: Bench) -> None:
    @kernel(outputs=1)
    def fails(out: Any) -> None:
        raise ArithmeticError("as it may happen")

    x = bench.array()
    with pytest.raises(ArithmeticError):
        bench.issue("a", fails, x)
    assert x.storage.version == 1
    assert bench.issue("b", one, bench.array(), x) == [("a", 1)]


def test_what_a_stream_of_the_host_refuses_has_not_begun() -> None:
    machine, memory = Machine(), CachingAllocator(FakeSource())
    machine.add_stream(Stream(cpu, "first"))
    stream = machine.add_stream(HostStream(cpu, "beside"))
    machine.remove_stream(stream)
    x = Array(Storage(memory, 16), (4,), (1,), float32)
    with pytest.raises(RuntimeError, match="is closed"):
        machine.issue(Instruction(one, (x,), {}), stream)
    with pytest.raises(RuntimeError, match="is closed"):
        machine.repeating(Instruction(one, (x,), {}), stream)()
    assert x.storage.uses is None


class LazyStream(Stream):
    """Runs its instructions when the test says, in any order that its waits allow."""

    def __init__(self, name: str) -> None:
        super().__init__(cpu, name)
        # Either a piece of work, or (stream, how many of its entries must have run).
        self.queue: list[Any] = []
        self.ran = 0

    def run(self, work: Any, name: object = None) -> None:
        self.queue.append(work)

    def wait_for(self, mark: Mark) -> int:
        self.queue.append((mark.stream, len(mark.stream.queue)))
        return mark.stream.sequence

    def step(self) -> bool:
        """Runs the next entry if it may run."""
        if self.ran == len(self.queue):
            return False
        entry = self.queue[self.ran]
        if isinstance(entry, tuple):
            if entry[0].ran < entry[1]:
                return False
        else:
            entry()
        self.ran += 1
        return True


@settings(max_examples=50)
@given(
    program=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=25
    ),
    order=st.lists(st.integers(0, 2), max_size=80),
)
def test_any_order_that_the_waits_allow_gives_the_result_of_one_stream(program: list[tuple], order: list[int]) -> None:
    """Each instruction writes an array from two others; streams then run as far ahead of each other as they may."""
    memory = CachingAllocator(FakeSource())
    arrays = [Array(Storage(memory, 16), (4,), (1,), float32) for _ in range(4)]

    def run(streams: list[LazyStream] | None) -> list[Any]:
        values: list[Any] = [0, 1, 2, 3]
        machine = Machine()
        for stream in streams or ():
            machine.add_stream(stream)
        for number, (stream_index, target, left, right) in enumerate(program):

            @kernel(outputs=1)
            def combine(*operands: Any, n: int = number, t: int = target, a: int = left, b: int = right) -> None:
                values[t] = hash((n, values[a], values[b]))

            instruction = Instruction(combine, (arrays[target], arrays[left], arrays[right]), {})
            if streams is None:
                instruction.run()
            else:
                machine.issue(instruction, streams[stream_index])
        if streams is not None:
            for index in order:
                streams[index].step()
            while any(stream.step() for stream in reversed(streams)):
                pass
            assert all(stream.ran == len(stream.queue) for stream in streams), "streams wait for each other for ever"
        return values

    for array in arrays:
        array.storage.uses = None
    assert run([LazyStream(name) for name in "abc"]) == run(None)


# ---- observers


def test_observers_see_every_instruction_and_run_it() -> None:
    seen = []

    def observe(instruction: Instruction, run: Any) -> None:
        seen.append(instruction.kernel.__name__)
        run()

    x = leaf(1, 2)
    with the_machine.observed(observe):
        y = (x * 2).sum()
        y.backward()
    (x * 3).sum()
    # The start of backward is filled with 1; a sum sends that back as a view.
    assert seen == ["multiply", "sum", "fill", "multiply"]
    assert y.item() == 6
    assert x.grad.tolist() == [2, 2]


def test_observers_nest_and_may_hold_back() -> None:
    order = []

    def outer(instruction: Instruction, run: Any) -> None:
        order.append("outer before")
        run()
        order.append("outer after")

    def inner(instruction: Instruction, run: Any) -> None:
        order.append("inner")
        run()

    x = flow.zeros(2)
    with the_machine.observed(inner), the_machine.observed(outer):
        x.fill_(1.0)
    assert order == ["outer before", "inner", "outer after"]
    with the_machine.observed(lambda instruction, run: None):
        x.fill_(5.0)
    assert x.tolist() == [1, 1]


def test_an_observer_leaves_when_its_block_fails() -> None:
    seen = []
    with pytest.raises(ZeroDivisionError), the_machine.observed(lambda instruction, run: seen.append(instruction)):
        raise ZeroDivisionError
    flow.zeros(1)
    assert seen == []


def test_an_instruction_says_what_and_where_it_is() -> None:
    texts = []
    model = flow.nn.Sequential(flow.nn.ReLU())

    def observe(instruction: Instruction, run: Any) -> None:
        texts.append(repr(instruction))
        run()

    with the_machine.observed(observe):
        model(flow.ones(2, 3))
    assert texts == ["fill(float32[2, 3])", "relu(float32[2, 3], float32[2, 3]) in 0: relu"]


def test_versions_count_writes() -> None:
    x = flow.zeros(2)
    before = x.array.storage.version
    x.add_(1.0)
    x.reshape(2, 1).fill_(2.0)
    x + 1
    assert x.array.storage.version == before + 2


@pytest.mark.parametrize(("first", "second"), list(product("rw", repeat=2)))
def test_all_pairs_of_uses(first: str, second: str) -> None:
    bench = Bench("a", "b")
    x = bench.array()
    bench.issue("a", one, *((x,) if first == "w" else (bench.array(), x)))
    waits = bench.issue("b", one, *((x,) if second == "w" else (bench.array(), x)))
    assert waits == ([] if first == second == "r" else [("a", 1)])


def test_a_stream_that_a_finalizer_ends_meanwhile_hides_no_other() -> None:
    machine = Machine()

    class EndsAnother(Stream):
        other: Stream | None = None
        was_synchronized = False

        def synchronize(self) -> None:
            self.was_synchronized = True
            if self.other is not None:
                machine.remove_stream(self.other)

    first, ending, last = (EndsAnother(cpu, name) for name in ("first", "ending", "last"))
    for stream in (ending, first, last):
        machine.add_stream(stream)
    first.other = ending
    machine.synchronize()
    assert last.was_synchronized
