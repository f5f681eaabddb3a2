"""Collectives over shared memory, each against NumPy, on ranks that are real processes."""

from __future__ import annotations

import re

import pytest

from tests.framework.distributed.ranks import run

# Everything for one number of ranks runs in one set of processes: starting them is what takes time.
ALL = """
dist.init_process_group(timeout=30)
rank, size = dist.get_rank(), dist.get_world_size()
everyone = range(size)

def values(rank, count, dtype):
    drawn = np.random.default_rng(1000 * rank + count).integers(0, 200, count)
    return drawn.astype(dtype) if np.dtype(dtype).kind != "f" else (drawn / 7).astype(dtype)

def reduced(op, parts):
    if op == "avg":
        return reduced("sum", parts) / len(parts)
    total = parts[0].copy()
    for part in parts[1:]:
        total = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op](total, part)
    return total

# Below, at and above what fits into a slot, and what does not divide by the number of ranks.
for count in (0, 1, 7, 4096, 131072, 131073, 300_001):
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_):
        for op in ("sum", "min", "max", "avg"):
            if op == "avg" and np.dtype(dtype).kind != "f":
                continue
            if count > 4096 and (op != "sum" or dtype not in (np.float32, np.uint8)):
                continue
            tensor = flow.tensor(values(rank, count, dtype))
            dist.all_reduce(tensor, op)
            wanted = reduced(op, [values(r, count, dtype) for r in everyone])
            # The same order of additions, so the same bits.
            assert np.array_equal(tensor.numpy(), wanted), (count, dtype, op)

for count in (0, 3, 200_000):
    tensor = flow.tensor(values(rank, count, np.float32))
    dist.broadcast(tensor, size - 1)
    assert np.array_equal(tensor.numpy(), values(size - 1, count, np.float32))

    gathered = [flow.zeros(count) for _ in everyone]
    dist.all_gather(gathered, flow.tensor(values(rank, count, np.float32)))
    assert all(np.array_equal(gathered[r].numpy(), values(r, count, np.float32)) for r in everyone)
    joined = flow.zeros(size * count)
    dist.all_gather(joined, flow.tensor(values(rank, count, np.float32)))
    assert np.array_equal(joined.numpy(), np.concatenate([values(r, count, np.float32) for r in everyone]))

    piece, whole = flow.zeros(count), [values(r, size * count, np.float32) for r in everyone]
    wanted = reduced("sum", whole)[rank * count : (rank + 1) * count]
    dist.reduce_scatter(piece, flow.tensor(whole[rank]))
    assert np.array_equal(piece.numpy(), wanted)
    dist.reduce_scatter(piece, [flow.tensor(part) for part in np.split(whole[rank], size)], "max")
    assert np.array_equal(piece.numpy(), reduced("max", whole)[rank * count : (rank + 1) * count])

print("well")
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_give_what_numpy_gives(size: int) -> None:
    assert run(ALL, size) == ["well\n"] * size


def test_layouts_types_and_groups() -> None:
    said = run(
        """
        dist.init_process_group(timeout=30)
        rank = dist.get_rank()

        # Strided on one rank, dense on the other: elements meet by their index.
        base = flow.tensor(np.arange(12, dtype=np.float32).reshape(3, 4))
        tensor = base.transpose(0, 1) if rank == 0 else flow.tensor(base.transpose(0, 1).numpy().copy())
        dist.all_reduce(tensor)
        assert np.array_equal(tensor.numpy(), 2 * np.arange(12).reshape(3, 4).T)

        # 1 + 2**-8 needs more than bfloat16's 8 bits: added up in float32, rounded once.
        bits = flow.tensor(np.array([1.0, 3.0, -0.5]), dtype=flow.bfloat16)
        other = flow.tensor(np.array([2**-8, 1.0, 0.25]), dtype=flow.bfloat16)
        mine = bits if rank == 0 else other
        dist.all_reduce(mine, "avg")
        assert flow.tensor(mine, dtype=flow.float32).numpy().tolist() == [0.5, 2.0, -0.125]

        # What is no number stays none, and nobody is warned of it.
        import warnings
        warnings.simplefilter("error")
        odd = flow.tensor([float("nan"), 3e38, float("inf")] if rank else [1.0, 3e38, -float("inf")])
        dist.all_reduce(odd)
        assert str(odd.numpy().tolist()) == "[nan, inf, nan]"

        work = dist.all_reduce(base, async_op=True)
        work.wait()
        assert work.is_completed()

        if rank == 0:
            dist.send(flow.arange(100_000), 1)
            back = flow.zeros(2, 2)
            dist.recv(back, 1)
            assert back.numpy().tolist() == [[0, 1], [2, 3]]
        else:
            came = flow.tensor(np.zeros(100_000, np.int64))
            dist.recv(came, 0)
            assert np.array_equal(came.numpy(), np.arange(100_000))
            dist.send(flow.tensor([[0.0, 1.0], [2.0, 3.0]]), 0)

        alone = dist.new_group([1])
        assert dist.get_rank(alone) == rank - 1 and dist.get_world_size(alone) == 1
        turned = dist.new_group([1, 0])
        assert dist.get_rank(turned) == 1 - rank
        value = flow.tensor([float(rank)])
        dist.broadcast(value, 1, group=turned)
        assert value.item() == 1
        if rank == 1:
            dist.all_reduce(value, group=alone)

        assert dist.all_gather_object({"rank": rank, "loss": float("nan")})[1]["rank"] == 1
        assert dist.broadcast_object(["a", rank], src=1) == ["a", 1]

        leaf = flow.tensor([1.0, 2.0], requires_grad=True)
        total = dist.functional.all_reduce(leaf * (rank + 1.0))
        assert total.detach().numpy().tolist() == [3, 6]
        (total * (10.0 ** rank)).sum().backward()
        assert leaf.grad.numpy().tolist() == [11 * (rank + 1)] * 2
        dist.barrier()
        dist.destroy_process_group()
        print("well")
        """,
        2,
    )
    assert said == ["well\n"] * 2


# All that one rank may call. It prints what was refused.
ALONE = """
import threading
from framework.vm import machine

dist.init_process_group(timeout=30)
threads = threading.active_count()
seen = []

def issued(call):
    seen.clear()
    with machine.observed(lambda instruction, run: (seen.append(instruction.kernel.__name__), run())):
        call()
    return seen

for dtype in (flow.float32, flow.float64, flow.bfloat16, flow.int32, flow.int64, flow.uint8, flow.bool_):
    given = flow.tensor(np.array([[1, 0, 1], [0, 1, 1]]), dtype=dtype)
    before = np.array(given.tolist())
    same = lambda tensor: np.array_equal(np.array(tensor.tolist()), before)
    for tensor in (given, given.transpose(0, 1)):
        for op in ("sum", "min", "max", *(["avg"] if dtype.is_floating else [])):
            assert issued(lambda: dist.all_reduce(tensor, op)) == [], seen
        assert issued(lambda: dist.broadcast(tensor, 0)) == [], seen
        assert same(given)
    # What goes from one tensor to another is copied, dense or not.
    def new(*shape):
        return flow.tensor(np.zeros(shape), dtype=dtype)
    for call in (
        lambda out: dist.all_gather([out], given), lambda out: dist.all_gather(out, given),
        lambda out: dist.reduce_scatter(out, given), lambda out: dist.reduce_scatter(out, [given], "max"),
        lambda out: dist.reduce_scatter(out, given, async_op=True).wait(),
    ):
        for out in (new(2, 3), new(3, 2).transpose(0, 1)):
            call(out)
            assert same(out), (dtype, out)
    joined = new(6)
    dist.all_gather(joined, given)
    assert joined.tolist() == before.reshape(-1).tolist()
dist.barrier()
work = dist.all_reduce(flow.ones(2), async_op=True)
assert work.is_completed()
work.wait(1)
assert repr(work) == "Work(_all_reduce(float32[2]) of group world)", work
assert dist.barrier(async_op=True).is_completed()
# No thread was started for it, and nothing is outstanding.
assert threading.active_count() == threads and machine.is_plain

leaf = flow.ones(2, requires_grad=True)
dist.functional.all_reduce(leaf * 3.0, "avg").sum().backward()
assert leaf.grad.tolist() == [3, 3]

tensor = flow.ones(2)
for call in (
    lambda: dist.all_reduce(tensor, "mean"), lambda: dist.all_reduce(flow.arange(3), "avg"),
    lambda: dist.broadcast(tensor, 1), lambda: dist.all_gather([tensor, tensor], tensor),
    lambda: dist.all_gather(flow.ones(3), tensor), lambda: dist.reduce_scatter(tensor, flow.ones(4)),
    lambda: dist.send(tensor, 0), lambda: dist.recv(tensor, 0, async_op=True), lambda: dist.send(tensor, 1),
):
    try:
        call()
    except ValueError as error:
        print(error)
group = dist.new_group([0])
dist.all_reduce(tensor, group=group)
dist.destroy_process_group()
try:
    dist.all_reduce(tensor, group=group)
except dist.DistributedError as gone:
    print(gone)
"""


def test_a_rank_alone_sends_nothing_whatever_it_calls() -> None:
    said = run(ALONE, 1)
    lines = said[0].splitlines()
    itself = "rank 0 cannot send to itself, nor receive from itself"
    assert lines[2] == "rank 1 is not in group world, which has rank 0"
    assert lines[3] == "2 tensors for the 1 ranks of group world; each has one"
    assert [line.partition(", ")[0] for line in lines[4:6]] == ["it is of shape [3]", "it is of shape [4]"]
    assert lines[6:8] == [itself, itself]
    assert lines[8] == lines[2]
    assert lines[9].startswith("group 1 was destroyed with its process group")
    assert len(lines) == 10


def test_a_group_of_one_rank_that_was_given_a_backend_sends() -> None:
    said = run(
        """
        from framework.distributed.collectives import Repeated
        from framework.vm import machine

        dist.init_process_group(timeout=30)
        group, tensor, seen = dist.new_group([0], backend="shm"), flow.ones(3), []
        with machine.observed(lambda instruction, run: (seen.append(instruction.kernel.__name__), run())):
            dist.all_reduce(tensor, "avg", group)
            dist.all_reduce(tensor)
            Repeated.all_reduce(tensor.array, "sum", group).issue().wait()
        assert seen == ["_all_reduce", "_all_reduce"], seen
        assert tensor.tolist() == [1, 1, 1]

        # Trained through it, a model becomes what it becomes alone.
        results = []
        for parallel in (lambda model: model, lambda model: flow.nn.parallel.DistributedDataParallel(model, process_group=group)):
            flow.manual_seed(3)
            model = parallel(flow.nn.Sequential(flow.nn.Conv2d(3, 4, 3), flow.nn.BatchNorm2d(4), flow.nn.ReLU()))
            optimizer = flow.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                out = model(flow.randn(2, 3, 5, 5))
                (out * out).sum().backward()
                optimizer.step()
            results.append([p.tolist() for p in model.parameters()])
        assert results[0] == results[1]
        for given in ("gloo", 3):
            try:
                dist.new_group([0], backend=given)
            except ValueError as error:
                print(error)
        nccl = dist.new_group([0], backend="nccl")
        try:
            dist.all_reduce(tensor, group=nccl)
        except dist.DistributedError as error:
            print(error)
        """,
        1,
    )
    assert said[0].splitlines() == [
        "a backend is one of shm, nccl, mpi, or None for what fits; not 'gloo'; in place of gloo leave it out",
        "a backend is one of shm, nccl, mpi, or None for what fits; not 3",
        'backend="nccl" moves CUDA tensors alone; for CPU tensors too leave the backend out, or move them to the GPU',
    ]


def test_ranks_that_wait_leave_the_processor_to_others() -> None:
    said = run(
        """
        dist.init_process_group(timeout=60)
        dist.barrier()
        if dist.get_rank() == 0:
            time.sleep(2)
        before = time.process_time()
        dist.all_reduce(flow.ones(3))
        print(time.process_time() - before)
        """,
        2,
    )
    # Of two seconds; spinning would take them whole.
    assert float(said[1]) < 0.5


def test_a_slow_reader_is_waited_for() -> None:
    said = run(
        """
        from framework.distributed import shm
        dist.init_process_group(timeout=60)
        rank = dist.get_rank()
        values = np.arange(3_000_000, dtype=np.float32)
        copy = np.copyto
        class Slow:
            # NumPy, but a copy begins late: what is to be copied could long be overwritten.
            def __getattr__(self, name):
                return getattr(np, name)
            def copyto(self, target, source):
                time.sleep(0.02)
                copy(target, source)
        if rank == 1:
            shm.np = Slow()
        tensor = flow.tensor(values if rank == 0 else np.zeros_like(values))
        dist.broadcast(tensor, 0)
        assert np.array_equal(tensor.numpy(), values)
        tensor = flow.tensor(values + rank)
        dist.all_reduce(tensor)
        assert np.array_equal(tensor.numpy(), 2 * values + 1)
        print("well")
        """,
        2,
    )
    assert said == ["well\n"] * 2


def test_a_process_can_part_and_meet_again() -> None:
    said = run(
        """
        from framework.distributed.world import world
        held = []
        for _ in range(3):
            dist.init_process_group(timeout=60)
            assert dist.is_initialized()
            dist.all_reduce(flow.ones(3), async_op=True).wait()
            dist.all_gather_object(1)
            dist.broadcast_object(1, 1)
            dist.barrier()
            # What was exchanged is not kept.
            assert [world().store.get(f"world/exchange/{key}") for key in ("1/0", "1/read", "2/0", "2/read")] == [None] * 4
            dist.destroy_process_group()
            assert not dist.is_initialized()
            held.append(len(os.listdir("/proc/self/fd")))
        assert held[0] == held[1] == held[2], held
        print("well")
        """,
        2,
    )
    assert said == ["well\n"] * 2


def test_what_is_no_tensor_is_named() -> None:
    said = run(
        """
        dist.init_process_group(timeout=30)
        one, numbers = flow.zeros(2), [1.0, 2.0]
        for call in (
            lambda: dist.all_reduce(numbers), lambda: dist.broadcast(numbers, 0), lambda: dist.all_gather(one, numbers),
            lambda: dist.all_gather(3, one), lambda: dist.all_gather([3], one), lambda: dist.reduce_scatter(numbers, one),
            lambda: dist.reduce_scatter(one, numbers[:1]), lambda: dist.send(numbers, 0), lambda: dist.recv(numbers, 0),
            lambda: flow.nn.parallel.DistributedDataParallel(len),
            lambda: dist.all_reduce(one, group=0), lambda: dist.barrier("x"), lambda: dist.get_rank(1),
            lambda: flow.nn.parallel.DistributedDataParallel(flow.nn.Linear(1, 1), process_group=[0]),
        ):
            try:
                call()
            except TypeError as error:
                print(error)
        """,
        1,
    )
    takes, pieces = (
        "takes tensors; got {}, which flow.tensor() converts",
        "takes a tensor, or a list of one for each rank; got {}",
    )
    assert said == [
        "\n".join(
            (
                f"all_reduce {takes.format('list')}",
                f"broadcast {takes.format('list')}",
                f"all_gather {takes.format('list')}",
                f"all_gather {pieces.format('int')}",
                f"all_gather {takes.format('int')}",
                f"reduce_scatter {takes.format('list')}",
                f"reduce_scatter {takes.format('float')}",
                f"send {takes.format('list')}",
                f"recv {takes.format('list')}",
                "DistributedDataParallel takes a Module; got builtin_function_or_method",
                *(
                    f"a group is what new_group() returns, or None for all ranks; got {got}"
                    for got in ("0", "'x'", "1", "[0]")
                ),
                "",
            )
        )
    ]


def test_reductions_have_pytorchs_names_beside_the_strings() -> None:
    said = run(
        """
        dist.init_process_group(timeout=30)
        rank, op = dist.get_rank(), dist.ReduceOp
        for named, string, wanted in (op.SUM, "sum", 5), (op.AVG, "avg", 2.5), (op.MIN, "min", 1), (op.MAX, "max", 4):
            # One rank by the name, the other by the string: it is the same collective.
            tensor, piece = flow.tensor([1.0 + 3 * rank]), flow.zeros(1)
            dist.all_reduce(tensor, op=string if rank else named)
            dist.reduce_scatter(piece, [flow.tensor([1.0 + 3 * rank])] * 2, string if rank else named)
            assert (tensor.item(), piece.item()) == (wanted, wanted), (named, tensor, piece)
        x = flow.tensor([1.0 + rank], requires_grad=True)
        dist.functional.all_reduce(x, op.AVG).sum().backward()
        assert x.grad.item() == 1
        try:
            dist.all_reduce(tensor, "product")
        except ValueError as refused:
            print(refused)
        """,
        2,
    )
    assert said == ["a reduction is one of sum, avg, min, max, not 'product'\n"] * 2


def test_a_repeated_collective_is_the_same_as_one_called_anew() -> None:
    said = run(
        """
        from framework.distributed.collectives import Repeated
        from framework.vm import machine

        dist.init_process_group(timeout=30)
        rank = dist.get_rank()
        everyone, backwards = dist.new_group([0, 1]), dist.new_group([1, 0])
        shared, given = flow.zeros(3), flow.zeros(2)
        mean = Repeated.all_reduce(shared.array, "avg", everyone)
        most = Repeated.all_reduce(shared.array, "max", everyone)
        first = Repeated.broadcast(given.array, 1, backwards)
        for step in range(3):
            # What wrote the array before is waited for, and what reads it later waits.
            shared.fill_(float(2 * rank + step))
            versions = shared.array.storage.version
            work = mean.issue()
            assert shared.array.storage.version == versions + 1
            work.wait()
            assert shared.tolist() == [1.0 + step] * 3, shared
            shared.fill_(float(rank + step))
            most.issue().wait()
            assert shared.tolist() == [1.0 + step] * 3, shared
            given.fill_(10.0 * rank + step)
            assert first.issue() is not first.issue()
            assert given.tolist() == [10.0 + step] * 2, given
        assert repr(work) == f"Work(_all_reduce(float32[3]) of group {everyone.name})", work
        seen = []
        with machine.observed(lambda instruction, run: (seen.append(instruction.attributes["op"]), run())):
            mean.issue().wait()
        assert seen == ["avg"]
        # A rank alone has it already: nothing is issued.
        alone, before = [dist.new_group([number]) for number in (0, 1)][rank], shared.tolist()
        seen.clear()
        with machine.observed(lambda instruction, run: (seen.append(instruction), run())):
            Repeated.all_reduce(shared.array, "avg", alone).issue().wait()
        assert not seen and shared.tolist() == before
        try:
            Repeated.all_reduce(shared.array, "mean", everyone)
        except ValueError as refused:
            assert "mean" in str(refused)
        else:
            raise AssertionError("went through")
        dist.barrier()
        dist.destroy_process_group()
        try:
            mean.issue()
        except dist.DistributedError as gone:
            print(gone)
        """,
        2,
    )
    (gone,) = set(said)
    assert re.fullmatch(
        r"group \S+ was destroyed with its process group; init_process_group\(\) makes new ones\n", gone
    )


def test_a_bucket_has_a_size() -> None:
    said = run(
        """
        dist.init_process_group(timeout=30)
        for cap in (0, -1, float("inf"), float("nan"), None, "3"):
            try:
                flow.nn.parallel.DistributedDataParallel(flow.nn.Linear(1, 1), bucket_cap_mb=cap)
            except ValueError as error:
                print(error)
        """,
        1,
    )
    caps = ("0", "-1", "inf", "nan", "None", "'3'")
    assert said == ["".join(f"bucket_cap_mb is a size in MiB above 0, not {cap}\n" for cap in caps)]
