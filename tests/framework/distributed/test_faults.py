"""Ranks that do not come, come to something else, or end: the others are told by name, soon, and without a launcher."""

from __future__ import annotations

import signal

from tests.framework.distributed.ranks import finish, free_port, run, start

CATCH = """
def told(call):
    try:
        call()
    except dist.CollectiveError as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""
# Ranks meet with all the time of a busy machine; what then bounds their waiting is short.
IMPATIENT = """
from framework.distributed.world import world
dist.init_process_group(timeout=60)
rank = dist.get_rank()
everyone = world().everyone.on(flow.device("cpu"))
everyone._timeout_s = 2.0
"""


def test_a_rank_that_never_comes_is_named() -> None:
    said = run(
        CATCH
        + IMPATIENT
        + """
dist.barrier()
if rank == 1:
    for other in (0, 2):
        world().store.get(f"told {other}", 60)
else:
    told(lambda: dist.all_reduce(flow.zeros(2, 3), "max"))
    told(lambda: dist.barrier())
    world().store.set(f"told {rank}", b"")
dist.destroy_process_group()
""",
        3,
    )
    for rank in (0, 2):
        first, second = said[rank].splitlines()
        # Both waited; who gave up first ends the other's waiting.
        assert "all_reduce(float32[2, 3], max), number 2 of group world" in first
        assert "ranks 0, 2 came, rank 1 did not" in first
        assert "cannot be used any more" in second
    assert any("CollectiveTimeoutError" in said[rank] and "within 2 s" in said[rank] for rank in (0, 2))


def test_who_gives_up_ends_the_others_waiting() -> None:
    said = run(
        CATCH
        + IMPATIENT
        + """
if rank != 0:
    everyone._timeout_s = 300
dist.barrier()
if rank == 2:
    for other in (0, 1):
        world().store.get(f"told {other}", 60)
else:
    told(lambda: dist.all_reduce(flow.zeros(3)))
    world().store.set(f"told {rank}", b"")
dist.destroy_process_group()
""",
        3,
    )
    assert "ranks 0, 1 came, rank 2 did not within 2 s" in said[0]
    assert "ranks 0, 1 came, rank 2 did not: rank 0 gave up" in said[1]


def test_a_rank_that_ended_before_a_groups_first_collective_is_named() -> None:
    code = (
        CATCH
        + """
dist.init_process_group(timeout=300)
group = dist.new_group([0, 1])
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
told(lambda: dist.barrier(group))
"""
    )
    zero, one = finish(start(code, 2))
    assert one.status == -signal.SIGKILL
    assert zero.status == 0, zero.text
    assert "the first collective of group 1 on cpu: rank 0 came, rank 1 did not: rank 1 ended" in zero.text


def test_different_collectives_are_told_by_name() -> None:
    said = run(
        CATCH
        + """
dist.init_process_group(timeout=20)
rank = dist.get_rank()
groups = [dist.new_group([0, 1]) for _ in range(5)]
x = flow.zeros(3)
calls = [
    (lambda g: dist.all_reduce(flow.zeros(3 + rank), group=g)),
    (lambda g: dist.all_reduce(flow.tensor([1, 2]) if rank else flow.tensor([1.0, 2.0]), group=g)),
    (lambda g: dist.all_reduce(x, "min" if rank else "max", group=g)),
    (lambda g: dist.barrier(g) if rank else dist.broadcast(x, 0, group=g)),
    (lambda g: dist.broadcast(x, rank, group=g)),
]
for group, call in zip(groups, calls):
    told(lambda: call(group))
x = flow.zeros(3)
told(lambda: dist.send(flow.zeros(4), 1) if rank == 0 else dist.recv(x, 0))
""",
        2,
    )
    for rank in range(2):
        lines = said[rank].splitlines()
        assert len(lines) == 6
        assert all("do not call the same collective" in line for line in lines[:5])
        assert "rank 0 calls all_reduce(float32[3], sum)" in lines[0]
        assert "rank 1 calls all_reduce(float32[4], sum)" in lines[0]
        assert "float32[2]" in lines[1]
        assert "int64[2]" in lines[1]
        assert "rank 0 calls all_reduce(float32[3], max)" in lines[2]
        assert "rank 1 calls barrier()" in lines[3]
        assert "rank 1 calls broadcast(float32[3], from rank 1)" in lines[4]
    assert "recv(float32[3]) from rank 0: it sends float32[4]" in said[1].splitlines()[5]


def test_a_rank_that_ended_is_named_at_once() -> None:
    code = (
        CATCH
        + """
dist.init_process_group(timeout=300)
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), 9)
told(lambda: dist.all_reduce(flow.zeros(3)))
told(lambda: [dist.all_reduce(flow.zeros(3), async_op=True).wait()])
"""
    )
    zero, one, two = finish(start(code, 3))
    assert one.status == -signal.SIGKILL
    for other in (zero, two):
        assert other.status == 0, other.text
        assert "rank 1 has ended" in other.text or "gave up" in other.text
        assert "ranks 0, 2 came, rank 1 did not" in other.text
        assert "cannot be used any more" in other.text.splitlines()[1]


def test_a_failure_in_the_communication_thread_reaches_who_waits() -> None:
    said = run(
        CATCH
        + IMPATIENT
        + """
dist.barrier()
if rank == 0:
    x = flow.ones(3)
    work = dist.all_reduce(x, async_op=True)
    assert not work.is_completed()
    told(lambda: work.wait(0.2))
    told(work.wait)
    # The same through what reads the result, and once more by whoever goes on.
    told(lambda: x + 1)
    told(dist.barrier)
    world().store.set("told", b"")
else:
    world().store.get("told", 60)
dist.destroy_process_group()
""",
        2,
    )
    first, second, third, fourth = said[0].splitlines()
    assert "CollectiveTimeoutError" in first
    assert "still under way after 0.2 s" in first
    for line in (second, third, fourth):
        assert "all_reduce(float32[3], sum)" in line
        assert "rank 1 did not" in line


def test_ranks_that_never_start_are_named() -> None:
    port = free_port()
    code = "dist.init_process_group(timeout=1.5)"
    (zero,) = finish(start(code, 4, [0], port))
    assert zero.status == 1
    assert "ranks 1, 2, 3 of 4 did not come within 1.5 s" in zero.text
    (three,) = finish(start(code, 4, [3], port))
    assert three.status == 1
    assert "rank 3 found no store at 127.0.0.1 within 1.5 s" in three.text


def test_a_port_in_use_and_a_rank_twice_are_told() -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (zero,) = finish(start("dist.init_process_group(timeout=2)", 1, [0], other.getsockname()[1]))
    assert zero.status == 1
    assert "rank 0 cannot listen at 127.0.0.1" in zero.text
    assert "set MASTER_PORT to a free one" in zero.text
    ended = finish(start("dist.init_process_group(timeout=3)", 3, [0, 1, 1]))
    assert any("two processes say that they are rank 1" in one.text for one in ended)


def test_different_settings_are_told() -> None:
    ended = finish(start("dist.init_process_group('shm' if os.environ['RANK'] == '0' else None, timeout=20)", 2))
    for one in ended:
        assert one.status == 1
        assert "different values of a backend (rank 0: shm, rank 1: None)" in one.text


def test_wrong_calls_are_told() -> None:
    (said,) = run(
        """
from datetime import timedelta

def told(kind, call):
    try:
        call()
    except kind as error:
        print(error)

told(dist.DistributedError, lambda: dist.all_reduce(flow.zeros(1)))
told(dist.DistributedError, lambda: dist.destroy_process_group())
told(ValueError, lambda: dist.init_process_group("gloo"))
told(ValueError, lambda: dist.init_process_group(timeout=0))
told(ValueError, lambda: dist.init_process_group(timeout=timedelta(0)))
dist.init_process_group(timeout=timedelta(seconds=5))
told(dist.DistributedError, lambda: dist.init_process_group())
told(ValueError, lambda: dist.all_reduce(flow.zeros(1), "product"))
told(ValueError, lambda: dist.all_reduce(flow.tensor([1]), "avg"))
told(ValueError, lambda: dist.broadcast(flow.zeros(1), 1))
told(ValueError, lambda: dist.new_group([0, 0]))
told(TypeError, lambda: dist.new_group("01"))
told(TypeError, lambda: dist.new_group(0))
told(ValueError, lambda: dist.all_gather([flow.zeros(2)], flow.zeros(3)))
told(ValueError, lambda: dist.all_gather([flow.zeros(3)] * 2, flow.zeros(3)))
told(ValueError, lambda: dist.reduce_scatter(flow.zeros(3), flow.zeros(4)))
told(ValueError, lambda: dist.send(flow.zeros(3), 0))
told(ValueError, lambda: dist.functional.all_reduce(flow.zeros(3), "max"))
told(TypeError, lambda: dist.all_gather_object({"a": object()}))
""",
        1,
    )
    wanted = [
        "init_process_group() has to be called first",
        "no process group to destroy",
        "a backend is one of shm, nccl, mpi",
        "a timeout is a number of seconds above 0 and up to 10000000, not 0",
        "a timeout is a number of seconds above 0 and up to 10000000, not 0.0",
        "was called before",
        "a reduction is one of sum, avg, min, max, not 'product'",
        "avg is for floating-point tensors, not int64",
        "rank 1 is not in group world, which has rank 0",
        "a group has different ranks from 0 to 0",
        "a group is made of a list of ranks, by their numbers; got '01'",
        "a group is made of a list of ranks, by their numbers; got 0",
        "tensor 0 is of shape [2]",
        "2 tensors for the 1 ranks",
        "it is of shape [4]",
        "cannot send to itself",
        "has sum and avg, not 'max'",
        "a value to exchange between ranks",
    ]
    lines = said.splitlines()
    assert len(lines) == len(wanted), said
    for line, words in zip(lines, wanted, strict=True):
        assert words in line


def test_rank_0_may_end_after_an_exchange_before_the_others_have_read_it() -> None:
    said = run(
        """
from framework.distributed.store import Store
dist.init_process_group(timeout=60)
rank = dist.get_rank()
if rank == 1:
    read = Store.get
    Store.get = lambda self, *arguments: (time.sleep(0.5), read(self, *arguments))[1]
print(dist.all_gather_object(rank), dist.broadcast_object(rank, src=0), flush=True)
os._exit(0)
""",
        2,
    )
    assert said == ["[0, 1] 0\n"] * 2
