"""The rendezvous store: what it keeps, how it waits, and that strangers do not disturb it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from framework.distributed.environment import Environment
from framework.distributed.errors import DistributedError
from framework.distributed.store import Store
from tests.framework.distributed.ranks import free_port


def environment(rank: int, port: int, job: str = "a job") -> Environment:
    return Environment(rank, 2, rank, "127.0.0.1", (port,), job, "a test")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def stores(port: int) -> Iterator[tuple[Store, Store]]:
    """Rank 0's store, with the server, and rank 1's."""
    zero = Store(environment(0, port), 10)
    one = Store(environment(1, port), 10)
    yield zero, one
    one.close()
    zero.close()


def test_values_are_bytes_of_any_kind(stores: tuple[Store, Store]) -> None:
    zero, one = stores
    for number, value in enumerate([b"", b"\n", bytes(range(256)) * 3, os.urandom(3_000_000)]):
        key = f"key/{number}\n\0é"
        assert one.get(key) is None
        zero.set(key, value)
        assert one.get(key) == value
        one.delete(key)
        assert zero.get(key) is None


def test_numbers_are_added_and_values_swapped(stores: tuple[Store, Store]) -> None:
    zero, one = stores

    def add(store: Store) -> list[int]:
        return [store.add("count", 1) for _ in range(200)]

    with ThreadPoolExecutor(2) as pool:
        seen = [number for found in pool.map(add, [zero, one]) for number in found]
    assert sorted(seen) == list(range(1, 401))
    assert zero.compare_set("who", b"", b"zero") == b"zero"
    assert one.compare_set("who", b"", b"one") == b"zero"
    assert one.compare_set("who", b"zero", b"one") == b"one"
    assert zero.wait_for_count("count", 400, 0)
    assert not zero.wait_for_count("count", 401, 0.05)


def test_a_get_waits_until_the_value_comes_or_the_time_is_over(stores: tuple[Store, Store]) -> None:
    zero, one = stores
    assert one.get("late", 0.05) is None
    threading.Timer(0.1, lambda: zero.set("late", b"here")).start()
    assert one.get("late", 20) == b"here"
    # While one thread waits, another of the same rank is served.
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(one.get, "later", 20)
        assert one.add("meanwhile", 1) == 1
        one.set("later", b"here too")
        assert waiting.result() == b"here too"


def test_who_is_missing_is_named(stores: tuple[Store, Store]) -> None:
    zero, _ = stores
    zero.set("name/1", b"x")
    with pytest.raises(DistributedError, match=r"ranks 3, 7 of 3 did not come within 0\.05 s"):
        zero.gather("name", (3, 5, 7), 0.05)


def test_too_large_a_value_is_refused(stores: tuple[Store, Store]) -> None:
    with pytest.raises(ValueError, match="the store takes 1024 and 67108864"):
        stores[1].set("key", bytes((64 << 20) + 1))
    with pytest.raises(ValueError, match="the store takes"):
        stores[1].set("k" * 2000, b"")
    stores[1].set("key", b"as before")
    assert stores[0].get("key") == b"as before"


HELLO = b"flow-store-1 a job"


def frame(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content


STRANGERS = {
    "a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "noise": os.urandom(5000),
    "nothing": b"",
    "half a length": b"\0\0",
    "a giant": struct.pack(">I", 2**32 - 1) + b"x" * 1000,
    "another job": frame(b"flow-store-1 b job"),
    "half a greeting": struct.pack(">I", 18) + b"flow-st",
    "a giant after the greeting": frame(HELLO) + struct.pack(">I", 2**31),
    "no request": frame(HELLO) + frame(b"null"),
    "an unknown request": frame(HELLO) + frame(b'{"do": "format", "key": 1}'),
    "a deep one": frame(HELLO) + frame(b"[" * 200_000),
    "for ever": frame(HELLO) + frame(b'{"do": "get", "key": "a", "timeout_s": Infinity}'),
    "no number": frame(HELLO) + frame(b'{"do": "get", "key": "a", "timeout_s": "soon"}'),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_do_not_disturb_it(stores: tuple[Store, Store], port: int, stranger: str) -> None:
    zero, one = stores
    zero.set("key", b"value")
    held = []
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", port))
        said = STRANGERS[stranger]
        connection.sendall(said[:22])
        connection.settimeout(10)
        if said[:22].endswith(HELLO):
            assert connection.recv(100).endswith(b"flow-store-1 ")
        with contextlib.suppress(OSError):  # it was already hung up on
            connection.sendall(said[22:])
        held.append(connection)
    assert one.get("key") == b"value"
    assert one.add("count", 1) == 1
    for connection in held:
        connection.close()
    late = Store(environment(1, port), 10)
    assert late.get("key") == b"value"
    late.close()


def test_a_client_that_leaves_while_it_waits_is_forgotten(stores: tuple[Store, Store], port: int) -> None:
    zero, one = stores
    leaver = Store(environment(1, port), 10)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(leaver.add, "x", 1).result()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(frame(HELLO))
    connection.recv(100)
    request = b'{"do": "get", "key": "late", "timeout_s": 0.2}\n'
    connection.sendall(frame(request))
    connection.close()
    zero.set("late", b"here")
    assert one.get("late") == b"here"


def test_a_foreign_server_is_not_taken_for_ours(port: int) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        threading.Thread(
            target=lambda: foreign.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), daemon=True
        ).start()
        with pytest.raises(DistributedError, match="rank 1 found no store"):
            Store(environment(1, port), 0.3)


def test_another_jobs_store_is_not_ours(stores: tuple[Store, Store], port: int) -> None:
    with pytest.raises(DistributedError, match="it closed the connection"):
        Store(environment(1, port, "b job"), 0.3)


def test_of_several_ports_the_first_free_one_is_found() -> None:
    taken, free = free_port(), free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        places = [Environment(rank, 2, rank, "127.0.0.1", (taken, free), "a job", "a test") for rank in range(2)]
        zero = Store(places[0], 10)
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        one = Store(places[1], 10)
        one.set("key", b"value")
        assert zero.get("key") == b"value"
        one.close()
        zero.close()


def test_the_end_of_rank_0_is_told(port: int) -> None:
    zero = Store(environment(0, port), 10)
    one = Store(environment(1, port), 10)
    zero.close()
    with pytest.raises(DistributedError, match="rank 0 has probably ended"):
        one.set("key", b"value")
