"""The rendezvous store: small values under keys, by which ranks find each other before they can communicate otherwise."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

from framework.distributed.endings import ended_ranks
from framework.distributed.environment import Environment
from framework.distributed.errors import DistributedError, rank_list
from framework.distributed.store_server import KEY_LIMIT, LENGTH, MAGIC, VALUE_LIMIT_BYTES, StoreServer

# How long an answer may be under way, beside the time that the server was told to wait.
_NETWORK_S = 30.0
_RETRY_S = 0.05
# So often who waits for others asks whether they have ended.
_LOOK_S = 1.0
_COUNT_S = 0.002
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Store:
    """A client of the store; rank 0's also keeps the server. Any thread may use it.

    Values are bytes. Every method raises DistributedError where the store cannot be reached.
    """

    def __init__(self, environment: Environment, timeout_s: float) -> None:
        self._environment = environment
        self._timeout_s = timeout_s
        self._server = _serve(environment) if environment.rank == 0 else None
        self._connections = threading.local()
        self._port = self._server.port if self._server else self._find_port()

    @property
    def where(self) -> str:
        """The address, for messages."""
        return f"{self._environment.master_addr}:{self._port}"

    def set(self, key: str, value: bytes) -> None:
        """Sets a value, which wakes all that wait for it."""
        self._ask({"do": "set", "key": key}, value)

    def get(self, key: str, timeout_s: float = 0.0) -> bytes | None:
        """The value, waiting for it if need be; None where nobody set it in time."""
        status, value = self._ask({"do": "get", "key": key, "timeout_s": timeout_s}, patience_s=timeout_s)
        return value if status == b"ok" else None

    def add(self, key: str, amount: int) -> int:
        """Adds to a number, which starts at 0; returns the sum."""
        return int(self._ask({"do": "add", "key": key, "amount": amount})[1])

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Sets the value to `desired` if it is `expected` (empty: not set yet). Returns what it is afterwards."""
        return self._ask({"do": "compare_set", "key": key, "expected": len(expected)}, expected + desired)[1]

    def gather(self, name: str, ranks: tuple[int, ...], timeout_s: float) -> list[bytes]:
        """What was set as `name/0`, `name/1`, … for so many ranks, whose numbers in the world `ranks` are, for messages.

        Raises DistributedError that names those for which nothing was set in time, at once where one of them has ended.
        """
        deadline = time.monotonic() + timeout_s
        of = f" of {len(ranks)}" if len(ranks) > 1 else ""
        found: dict[int, bytes] = {}
        missing = list(range(len(ranks)))
        while missing:
            left_s = deadline - time.monotonic()
            value = self.get(f"{name}/{missing[0]}", max(0.0, min(_LOOK_S, left_s)))
            if value is not None:
                found[missing.pop(0)] = value
                continue
            ended = self._ended()
            if left_s > 0 and ended.isdisjoint(ranks[number] for number in missing):
                continue
            # What a rank set before it ended is there by now.
            found |= {n: late for n in missing if (late := self.get(f"{name}/{n}")) is not None}
            missing = [number for number in missing if number not in found]
            gone = [ranks[number] for number in missing if ranks[number] in ended]
            if gone:
                raise DistributedError(
                    f"{rank_list(gone)}{of} ended without coming (the store at {self.where} waited for {name})"
                )
            if missing and left_s <= 0:
                raise DistributedError(
                    f"{rank_list([ranks[number] for number in missing])}{of} did not come within {timeout_s:g} s"
                    f" (the store at {self.where} waited for {name}); ranks that are slow to start need a longer timeout"
                )
        return [found[number] for number in range(len(ranks))]

    def wait_for_count(self, key: str, count: int, timeout_s: float) -> bool:
        """Whether the number under `key` gets to `count` in time."""
        deadline = time.monotonic() + timeout_s
        while self.add(key, 0) < count:
            if time.monotonic() > deadline:
                return False
            time.sleep(_COUNT_S)
        return True

    def delete(self, key: str) -> None:
        """Forgets a key, set or not."""
        self._ask({"do": "delete", "key": key})

    def close(self) -> None:
        """Ends this thread's connection, and the server if it is here."""
        connection = getattr(self._connections, "socket", None)
        if connection is not None:
            connection.close()
            self._connections.socket = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _ended(self) -> frozenset[int]:
        """The ranks that have ended, as this machine's launcher says, or others' did to a rank that noted it here."""
        noted = frozenset(json.loads(self.get("ended") or b"[]"))
        known = noted | ended_ranks()
        if known != noted:
            self.set("ended", json.dumps(sorted(known)).encode())
        return known

    def _ask(self, header: dict[str, Any], value: bytes = b"", patience_s: float = 0.0) -> tuple[bytes, bytes]:
        if len(header["key"]) > KEY_LIMIT or len(value) > VALUE_LIMIT_BYTES:
            raise ValueError(
                f"a key of {len(header['key'])} characters with a value of {len(value)} bytes: the store takes"
                f" {KEY_LIMIT} and {VALUE_LIMIT_BYTES}"
            )
        frame = json.dumps(header).encode() + b"\n" + value
        try:
            connection = self._connection()
            connection.settimeout(patience_s + _NETWORK_S)
            connection.sendall(LENGTH.pack(len(frame)) + frame)
            status, _, answer = _receive(connection).partition(b"\n")
        except OSError as error:
            self._connections.socket = None
            raise DistributedError(
                f"the store at {self.where}, which rank 0 keeps, does not answer ({error}): rank 0 has probably ended"
            ) from error
        return status, answer

    def _connection(self) -> socket.socket:
        """This thread's connection: one that waits for a key must not hold up the others."""
        known: socket.socket | None = getattr(self._connections, "socket", None)
        if known is None:
            known = self._connections.socket = _greet(self._environment, self._port, _NETWORK_S)
        return known

    def _find_port(self) -> int:
        """The port at which this job's store answers. Raises DistributedError where none does in time."""
        environment = self._environment
        deadline = time.monotonic() + self._timeout_s
        next_look = time.monotonic() + _LOOK_S
        while True:
            said = []
            for port in environment.ports:
                try:
                    patience_s = max(0.1, min(5.0, deadline - time.monotonic()))
                    self._connections.socket = _greet(environment, port, patience_s)
                except OSError as error:
                    said.append(f"{port}: {error}")
                else:
                    return port
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"rank {environment.rank} found no store at {environment.master_addr} within {self._timeout_s:g} s"
                    f" ({'; '.join(said)}): rank 0 did not start, or MASTER_ADDR and MASTER_PORT are not where it is"
                )
            if time.monotonic() > next_look:
                if 0 in ended_ranks():
                    raise DistributedError(
                        f"rank 0 ended without coming: rank {environment.rank} waited for its store at"
                        f" {environment.master_addr}, port {', '.join(map(str, environment.ports))}"
                    )
                next_look = time.monotonic() + _LOOK_S
            time.sleep(_RETRY_S)


def _serve(environment: Environment) -> StoreServer:
    local = environment.master_addr in _LOOPBACK
    try:
        return StoreServer(environment.master_addr if local else "", environment.ports, environment.job)
    except OSError as error:
        ports = ", ".join(map(str, environment.ports))
        raise DistributedError(
            f"rank 0 cannot listen at {environment.master_addr}, port {ports}: {error.strerror or error}. If another job has"
            " it, set MASTER_PORT to a free one; the launch module finds one where --master-port is not given"
        ) from error


def _greet(environment: Environment, port: int, patience_s: float) -> socket.socket:
    """A connection to the job's store at `port`. Raises OSError where there is none, or another's."""
    connection = socket.create_connection((environment.master_addr, port), timeout=patience_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting = MAGIC + environment.job.encode()
        connection.sendall(LENGTH.pack(len(greeting)) + greeting)
        if _receive(connection) != MAGIC:
            raise ConnectionError("something else listens there")
    except OSError:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > VALUE_LIMIT_BYTES + 1024:
        raise ConnectionError("something else listens there")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        chunk = connection.recv(min(length - len(received), 1 << 20))
        if not chunk:
            raise ConnectionError("it closed the connection")
        received += chunk
    return bytes(received)
