"""The rendezvous store's server: a dictionary behind a TCP port, kept by rank 0 in a thread.

A frame is a length (4 bytes, big-endian) and that many bytes. A connection opens with the frame `MAGIC` + the job's name and
is answered `MAGIC`; any other is closed. Then requests follow, each a JSON header, a newline, and the value as bytes.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"flow-store-1 "
LENGTH = struct.Struct(">I")
VALUE_LIMIT_BYTES = 64 * 1024 * 1024
KEY_LIMIT = 1024
_FRAME_LIMIT_BYTES = VALUE_LIMIT_BYTES + 16 * 1024
# Of a connection that has not said the magic word yet, and of all connections.
_GREETING_LIMIT_BYTES = 4096
_CONNECTION_LIMIT = 8192
_LONGEST_WAIT_S = 1e8
# Answers that a client does not fetch are kept up to here; then it is taken for dead.
_UNREAD_LIMIT_BYTES = 4 * VALUE_LIMIT_BYTES


class StoreServer:
    """Serves the store of `job` at `host` and the first free one of `ports`, until `close`.

    Raises OSError where none of the ports is free.
    """

    def __init__(self, host: str, ports: tuple[int, ...], job: str) -> None:
        self._socket = _listen(host, ports)
        self.port: int = self._socket.getsockname()[1]
        self._greeting = MAGIC + job.encode()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[tuple[float, _Connection]]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: set[_Connection] = set()
        self._thread = threading.Thread(target=self._serve, name="flow-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and every connection."""
        self._wake_write.send(b"x")
        self._thread.join()

    def _serve(self) -> None:
        running = True
        while running:
            for key, events in self._selector.select(self._patience_s()):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    running = False
                else:
                    self._attend(key.data, events)
            self._refuse_late()
        for connection in list(self._connections):
            self._drop(connection)
        for item in (self._socket, self._wake_read, self._wake_write):
            item.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:  # it left again, or there are too many open files: others are still served
            time.sleep(0.01)
            return
        if len(self._connections) >= _CONNECTION_LIMIT:
            client.close()
            return
        client.setblocking(False)
        connection = _Connection(client)
        self._connections.add(connection)
        self._selector.register(client, selectors.EVENT_READ, connection)

    def _attend(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                for frame in connection.frames():
                    self._handle(connection, frame)
            connection.flush()
        except Exception:  # noqa: BLE001 - whatever a stranger sends, the ranks go on
            # It left, is none of ours, or made no sense: it is hung up on.
            self._drop(connection)
            return
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, wanted, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _handle(self, connection: _Connection, frame: bytes) -> None:
        if not connection.greeted:
            if frame != self._greeting:
                raise ValueError("not one of this job's ranks")
            connection.greeted = True
            connection.send(MAGIC)
            return
        header, _, value = frame.partition(b"\n")
        request = json.loads(header)
        key = request["key"]
        if not isinstance(key, str) or len(key) > KEY_LIMIT:
            raise ValueError("no key")
        _ACTIONS[request["do"]](self, connection, key, request, value)

    def set(self, connection: _Connection, key: str, request: Any, value: bytes) -> None:
        """Sets a value; those that wait for it are told."""
        self._put(key, value)
        connection.answer("ok")

    def get(self, connection: _Connection, key: str, request: Any, value: bytes) -> None:
        """Answers with the value, at the latest after `timeout_s` that there is none."""
        if key in self._values:
            connection.answer("ok", self._values[key])
        else:
            patience_s = float(request["timeout_s"])
            if not 0 <= patience_s <= _LONGEST_WAIT_S:
                raise ValueError("no time to wait")
            deadline = time.monotonic() + patience_s
            self._waiting.setdefault(key, []).append((deadline, connection))

    def add(self, connection: _Connection, key: str, request: Any, value: bytes) -> None:
        """Adds to a number, which starts at 0, and answers with the sum."""
        total = b"%d" % (int(self._values.get(key, b"0")) + int(request["amount"]))
        self._put(key, total)
        connection.answer("ok", total)

    def compare_set(self, connection: _Connection, key: str, request: Any, value: bytes) -> None:
        """Sets a value if the present one is what was expected (nothing, for an empty one); answers with what it is then."""
        expected, desired = value[: int(request["expected"])], value[int(request["expected"]) :]
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        connection.answer("ok", self._values.get(key, b""))

    def delete(self, connection: _Connection, key: str, request: Any, value: bytes) -> None:
        """Forgets a key."""
        self._values.pop(key, None)
        connection.answer("ok")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for _, waiter in self._waiting.pop(key, []):
            self._tell(waiter, "ok", value)

    def _tell(self, connection: _Connection, status: str, value: bytes = b"") -> None:
        """Answers a connection other than the one at work, which may be gone."""
        if connection not in self._connections:
            return
        try:
            connection.answer(status, value)
            connection.flush()
        except (OSError, ValueError):
            self._drop(connection)
            return
        self._watch(connection)

    def _patience_s(self) -> float | None:
        deadlines = [deadline for waiters in self._waiting.values() for deadline, _ in waiters]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _refuse_late(self) -> None:
        if not self._waiting:
            return
        now = time.monotonic()
        for key, waiters in list(self._waiting.items()):
            for deadline, connection in waiters:
                if deadline <= now:
                    self._tell(connection, "missing")
            rest = [waiter for waiter in waiters if waiter[0] > now and waiter[1] in self._connections]
            if rest:
                self._waiting[key] = rest
            else:
                del self._waiting[key]


_ACTIONS: dict[str, Callable[..., None]] = {
    "set": StoreServer.set,
    "get": StoreServer.get,
    "add": StoreServer.add,
    "compare_set": StoreServer.compare_set,
    "delete": StoreServer.delete,
}


class _Connection:
    """One client, as the server sees it: what came in, what has to go out."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.greeted = False
        self.unsent = bytearray()
        self._received = bytearray()

    def frames(self) -> list[bytes]:
        """The frames that came in whole. Raises OSError where the client left, ValueError for one that is too long."""
        chunk = self.socket.recv(1 << 20)
        if not chunk:
            raise ConnectionError("closed")
        self._received += chunk
        whole = []
        while len(self._received) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._received)
            if length > (_FRAME_LIMIT_BYTES if self.greeted else _GREETING_LIMIT_BYTES):
                raise ValueError("too long a frame")
            if len(self._received) < LENGTH.size + length:
                break
            whole.append(bytes(self._received[LENGTH.size : LENGTH.size + length]))
            del self._received[: LENGTH.size + length]
            if not self.greeted:
                break  # the rest is looked at once the first has been found right
        return whole

    def answer(self, status: str, value: bytes = b"") -> None:
        """Queues an answer."""
        self.send(status.encode() + b"\n" + value)

    def send(self, frame: bytes) -> None:
        """Queues a frame. Raises ValueError where the client reads none of them."""
        if len(self.unsent) > _UNREAD_LIMIT_BYTES:
            raise ValueError("reads nothing")
        self.unsent += LENGTH.pack(len(frame)) + frame

    def flush(self) -> None:
        """Sends what the network takes now."""
        while self.unsent:
            try:
                sent = self.socket.send(self.unsent)
            except BlockingIOError:
                return
            del self.unsent[:sent]


def _listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host or None, ports[0], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    refused: OSError | None = None
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A port that the last job left a moment ago, or that the launcher holds for us, is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address[0], port, *address[2:]))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            refused = error
        else:
            listener.setblocking(False)
            return listener
    assert refused is not None
    raise refused
