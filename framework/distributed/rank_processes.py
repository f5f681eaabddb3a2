"""The rank processes of one machine: started together, watched, and ended to the last one."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from framework.distributed.rank_guard import Guard, signal_group

# From SIGTERM, or a forwarded Ctrl-C, to SIGKILL; and for what comes through the pipes of ranks that have ended.
GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_LOOK_S = 0.05
# From a traceback to the end of its rank, which takes its leave of the others and of its GPU.
_HOLD_S = 2.0
_HOLD_LIMIT_BYTES = _LINE_LIMIT_BYTES = 65536
_QUOTED_BYTES = 300
# Where Python's own last words begin: an exception's, a crash's, those of a script that does not compile.
_LAST_WORDS = re.compile(
    rb'Traceback \(most recent call last|^Exception (in thread|ignored in)|^Fatal Python error: |^  File "'
)
# A line with its end; progress bars end theirs by going back to its beginning.
_LINE = re.compile(rb"[^\r\n]*(?:\r*\n|\r+(?=[^\r\n]))")
_ERASE_LINE = b"\x1b[K"
# What is open beside the ranks' pipes, and while one more is started.
_OTHER_FILES = 64
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Plan:
    """What to start: `command`, on ranks `first_rank … first_rank + local_size - 1` of `world_size`.

    `variables` come into every rank's environment; `prefix` marks each line of output with its rank. Ranks that connect to
    `questions`, a socket that listens, are told which ranks have ended.
    """

    command: tuple[str, ...]
    local_size: int
    first_rank: int
    world_size: int
    variables: dict[str, str]
    prefix: bool
    questions: socket.socket | None = None


def run(plan: Plan) -> int:
    """Runs the ranks until all are done or one has failed; returns the exit code. No process of them is left.

    Where the system refuses to start one, or to take their output, no other is left either, and the exit code is 2.
    """
    with Guard() as guard, _Signals() as signals:
        ranks = _Ranks(plan, guard, signals)
        try:
            ranks.start()
            ranks.watch()
        finally:
            ranks.end()
        return ranks.report()


def make_room(local_size: int, *, prefix: bool) -> str | None:
    """Raises this process's limit of open files to what the ranks' pipes take; says why they cannot be, with the way out.

    The ranks inherit it: rank 0's store has a connection to each of the others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_FILES + 2 * local_size * prefix
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard != resource.RLIM_INFINITY and hard < needed:
        if not prefix:  # no pipes: what there is may do
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return None
        return (
            f"the output of {local_size} ranks takes {needed} open files, the limit here is {hard} (ulimit -Hn):"
            " raise it, take fewer ranks, or --no-prefix"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


@dataclass(eq=False)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]


@dataclass(eq=False)
class _Output:
    """One of a rank's two outputs: where it comes from, and where it goes."""

    rank: _Rank
    source: IO[bytes]
    target: Any
    is_error: bool
    pending: bytes = b""
    # Lines from a traceback's first one on, which wait: those of the first failure are to come last.
    held: list[bytes] = field(default_factory=list)
    held_since_s: float = 0.0
    last_line: bytes = b""

    def take(self, chunk: bytes) -> list[bytes]:
        """Adds what was read; returns the lines to pass on now."""
        text = self.pending + chunk
        lines: list[bytes] = []
        end = 0
        while line := _LINE.match(text, end):
            lines.append(line[0])
            end = line.end()
        self.pending = text[end:]
        return self._hold(lines) + (self.rest() if len(self.pending) > _LINE_LIMIT_BYTES else [])

    def rest(self) -> list[bytes]:
        """Ends a line that was begun, as nothing comes or it is too long; returns the lines to pass on now."""
        lines, self.pending = [self.pending + b"\n"] * bool(self.pending), b""
        return self._hold(lines)

    def release(self) -> list[bytes]:
        """The lines held, which are not any more."""
        lines, self.held = self.held, []
        return lines

    def _hold(self, lines: list[bytes]) -> list[bytes]:
        if not self.is_error:
            return lines
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)
        begin = 0
        if not self.held:
            begin = next((place for place, line in enumerate(lines) if _LAST_WORDS.search(line)), len(lines))
            self.held_since_s = time.monotonic()
        self.held += lines[begin:]
        return lines[:begin] + (self.release() if sum(map(len, self.held)) > _HOLD_LIMIT_BYTES else [])


class _Ranks:
    def __init__(self, plan: Plan, guard: Guard, signals: _Signals) -> None:
        self._plan, self._guard, self._signals = plan, guard, signals
        self._ranks: list[_Rank] = []
        self._errors: list[_Output] = []
        self._failed: _Rank | None = None
        self._refused: str | None = None
        # Whether what follows is written over a progress bar.
        self._is_over_bar = False
        self._selector = selectors.DefaultSelector()
        if plan.questions is not None:
            plan.questions.setblocking(False)
            self._selector.register(plan.questions, selectors.EVENT_READ)

    def start(self) -> None:
        """Starts the ranks, and no more of them once one has failed or a signal asks to stop."""
        for local_rank in range(self._plan.local_size):
            if self._is_over():
                return
            number = self._plan.first_rank + local_rank
            environment = {
                **os.environ,
                **self._plan.variables,
                "RANK": str(number),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(self._plan.world_size),
                # Through a pipe Python would keep lines back until there are many.
                "PYTHONUNBUFFERED": "1",
            }
            pipe = subprocess.PIPE if self._plan.prefix else None
            try:
                process = subprocess.Popen(
                    self._plan.command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=pipe,
                    # Ctrl-C reaches the ranks through the launcher alone, and what a rank starts can be ended with it.
                    start_new_session=True,
                )
            except OSError as error:  # too many processes, no memory for one more
                self._refused = f"rank {number} could not be started ({error.strerror or error}); the others were ended"
                return
            rank = _Rank(number, process)
            self._ranks.append(rank)
            self._guard.add(process.pid)
            self._listen(rank)

    def watch(self) -> None:
        """Until all ranks are done, one has failed, or a signal asks to stop."""
        while not self._is_over():
            self._pass_on(_LOOK_S)
            if all(rank.process.poll() == 0 for rank in self._ranks):
                return

    def end(self) -> None:
        """Ends what still runs: asks first, then kills; then takes in what was still written."""
        asked = self._signals.received or signal.SIGTERM
        for rank in self._running():
            signal_group(rank.process.pid, asked)
        deadline = time.monotonic() + GRACE_S
        while self._running() and time.monotonic() < deadline and self._signals.count < 2:
            self._pass_on(_LOOK_S)
        for rank in self._ranks:
            # Also what a rank that has ended had started.
            signal_group(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        if self._plan.questions is not None:
            self._selector.unregister(self._plan.questions)
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self._pass_on(_LOOK_S)
        for key in list(self._selector.get_map().values()):
            self._close(key.data)
        self._selector.close()
        self._release(0.0)

    def report(self) -> int:
        """Says what went wrong, last of all; returns the exit code."""
        if self._refused is not None:
            _say(f"launch: {self._refused}")
            return 2
        if self._failed is not None:
            status = self._failed.process.returncode
            errors = next((output for output in self._errors if output.rank is self._failed), None)
            _say(_failure(self._failed.number, status, len(self._ranks)) + (_words(errors) if errors else ""))
            return status if status > 0 else 128 - status
        received = self._signals.received
        if received is not None:
            _say(f"launch: ended by {signal.Signals(received).name}, and the ranks with it")
            return 128 + received
        return 0

    def _is_over(self) -> bool:
        """Whether one has failed, which is noted, or could not be started, or a signal asks to stop."""
        if self._failed is None:
            self._failed = next((rank for rank in self._ranks if rank.process.poll()), None)
        return self._failed is not None or self._refused is not None or self._signals.received is not None

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.process.poll() is None]

    def _listen(self, rank: _Rank) -> None:
        process = rank.process
        for source, target, is_error in ((process.stdout, sys.stdout, False), (process.stderr, sys.stderr, True)):
            if source is not None:
                os.set_blocking(source.fileno(), False)
                output = _Output(rank, source, target, is_error)
                self._selector.register(source, selectors.EVENT_READ, output)
                self._errors += [output] * is_error

    def _pass_on(self, patience_s: float) -> None:
        """Passes on what the ranks have written, waiting a little for it."""
        self._release(_HOLD_S)
        if not self._selector.get_map():
            time.sleep(patience_s)
            return
        for key, _ in self._selector.select(patience_s):
            if key.fileobj is self._plan.questions:
                self._answer()
                continue
            output: _Output = key.data
            for chunk in _chunks(output.source):
                if not chunk:
                    self._close(output)
                    break
                self._write(output, output.take(chunk))

    def _close(self, output: _Output) -> None:
        self._selector.unregister(output.source)
        output.source.close()
        self._write(output, output.rest())

    def _release(self, after_s: float) -> None:
        """Passes on what was held for so long; but not the first failure's, which the report brings."""
        for output in self._errors:
            is_reported = output.rank is self._failed and self._refused is None
            if output.held and not is_reported and time.monotonic() >= output.held_since_s + after_s:
                self._write(output, output.release())

    def _answer(self) -> None:
        """Tells a rank that waits for others which of them have ended."""
        assert self._plan.questions is not None
        try:
            asking, _ = self._plan.questions.accept()
        except OSError:  # it left again, or there are too many open files: it asks once more
            time.sleep(_LOOK_S)
            return
        ended = " ".join(str(rank.number) for rank in self._ranks if rank.process.poll() is not None)
        with asking, contextlib.suppress(OSError):
            asking.setblocking(False)
            # Ranks are in sessions of their own: another job's, which takes us for its launcher, is told nothing.
            if os.getsid(_peer(asking)) in {rank.process.pid for rank in self._ranks}:
                asking.sendall(f"{ended}\n".encode())

    def _write(self, output: _Output, lines: list[bytes]) -> None:
        lines = [line for line in lines if line.strip(b"\r")]  # a bar begins with what ends its other lines
        if not lines:
            return
        prefix = f"[rank {output.rank.number}] ".encode()
        try:
            is_terminal = output.target.isatty()
            for line in lines:
                output.target.buffer.write(_ERASE_LINE * (is_terminal and self._is_over_bar) + prefix + line)
                self._is_over_bar = is_terminal and line.endswith(b"\r")
            output.target.flush()
        except OSError as error:  # its reader has gone, the disk is full
            _drop(output.target)
            if self._failed is None:
                name = "standard error" if output.is_error else "standard output"
                self._refused = f"cannot write to {name} ({error.strerror or error}): the ranks were ended"


class _Signals:
    """Notes Ctrl-C and its like instead of ending at once; `received` is the first, `count` says how many came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self._note) for number in _FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        self.received = self.received or number
        self.count += 1


def _failure(rank: int, status: int, ranks: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        how = f"was ended by {name}"
        if -status == signal.SIGKILL:
            how += " (by hand, or by the system because memory ran out)"
    else:
        how = f"failed with exit code {status}"
    return f"launch: rank {rank} {how}" + "; the other ranks were ended" * (ranks > 1)


def _words(errors: _Output) -> str:
    """What a rank wrote last: in full if it is still held; else in short, as it was seen already."""
    if errors.held:
        return ". What it wrote last:\n" + b"".join(errors.held).decode(errors="replace").rstrip()
    line = errors.last_line.strip()
    line = line if len(line) <= _QUOTED_BYTES else line[:_QUOTED_BYTES] + "…".encode()
    return f". Its last line: {line.decode(errors='replace')}" if line else ""


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the launcher is a command
    except OSError:  # nobody is left to be told, and the exit code still counts
        _drop(sys.stderr)


def _drop(stream: Any) -> None:
    """Lets what is still buffered, and what follows, go nowhere: Python would fail once more when it writes it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _peer(connection: socket.socket) -> int:
    """The process at the other end of a connection within this machine."""
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(process)


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    """What can be read now; an empty chunk where the other end is closed."""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(source.fileno(), 65536):
            yield chunk
        yield b""
