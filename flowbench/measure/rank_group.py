"""A group of rank processes: started together, released together, watched, and ended to the last child."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from flowbench.errors import used_up
from flowbench.measure.agreement import compare_states
from flowbench.measure.launchers import Launched
from flowbench.measure.processes import end_group, last_words
from flowbench.measure.rank_process import TAIL_BYTES, RankProcess, chunks, free_port, rank_environment, start_rank
from flowbench.measure.wire import Job, Phase, event_limit, job_line, read_event
from flowbench.record.profile import Profile
from flowbench.record.sample import RankSample

# Without a word from a rank for this long it counts as hanging: before its first step (imports, plans and caches are made
# there), and between steps, where a multiple of the longest step seen so far is allowed if that is more.
SILENCE_BEFORE_STEPS_S = 300.0
SILENCE_S = 60.0
SILENCE_STEPS = 20

# Looking at the ranks takes moments: after so long without a look we stood still ourselves.
STANDSTILL_S = 5.0

# What a rank may still take after its result, before it is ended.
EXIT_S = 10.0


@dataclass(frozen=True)
class GroupResult:
    """What came of one group: its ranks' samples, or the first failure; what ranks remarked; what had to be ended.

    `disagreement` says where ranks that trained together ended with different weights.
    """

    ranks: tuple[RankSample, ...]
    error: str | None
    notes: tuple[str, ...]
    library_version: str | None
    left_behind: tuple[str, ...]
    profile: Profile | None = None
    disagreement: str | None = None


class RankGroup:
    """The ranks of one job. `start` it, `look` until it waits, `release` it, and so on till it is over; `close` it, take its
    `result`.

    `looked` is when its ranks were last looked at, a time of `time.monotonic()`.
    """

    def __init__(self, job: Job, mark: str, silence_s: float | None) -> None:
        self._job, self._mark, self._silence_s = job, mark, silence_s
        self._on_step: Callable[[int], None] = lambda step: None
        self._on_look: Callable[[Phase], None] = lambda phase: None
        self._ranks: list[RankProcess] = []
        self._open: dict[int, RankProcess] = {}
        self.looked = time.monotonic()
        self._error: str | None = None
        self._notes: list[str] = []
        self._version: str | None = None
        self._profile: Profile | None = None
        self._kills_before = _memory_kills()
        self._launched: Launched | None = None

    def begin(self, on_step: Callable[[int], None], on_look: Callable[[Phase], None]) -> None:
        """It is to be measured: `on_step` is told the steps of rank 0, `on_look` its phase whenever the ranks are looked at."""
        self._on_step, self._on_look = on_step, on_look
        self._kills_before = _memory_kills()

    def start(self) -> None:
        """Start the ranks and tell each its job; they go on by themselves to their first barrier.

        Where the system lets one of them not start, the group `has_failed`.
        """
        try:
            if self._job.launcher is not None:
                self._launch(self._job.launcher)
                return
            port = free_port()
            for number in range(self._job.cell.world_size):
                rank = start_rank(number, self._job, self._mark, port)
                self._add(rank, replace(self._job, rank=number, local_rank=number))
        except OSError as error:
            of = f" (rank {len(self._ranks)} of {self._job.cell.world_size})" if self._job.cell.world_size > 1 else ""
            self._error = f"its process cannot be started{of}: {error.strerror or error}{used_up(error)}"

    def _launch(self, launcher: str) -> None:
        """Has the ranks started by a launcher, and waits until they have called."""
        environment = rank_environment(0, self._job, self._mark, 0)
        self._launched = Launched(launcher, self._job.launcher_options, self._job.cell.world_size, environment)
        # It starts them here and now; others may have a queue.
        wait_s = (self._silence_s or SILENCE_BEFORE_STEPS_S) if launcher == "torchrun" else None
        calls = self._launched.calls(lambda: self._on_look("start"), wait_s)
        if isinstance(calls, str):
            self._error = calls + last_words(self._launched.tail)
            return
        master = f"{calls[0].address}:{calls[0].port}"
        for call in calls:
            descriptor = call.connection.detach()
            # The launcher's output is that of all ranks: the first one's last words are as good as any.
            output = self._launched.output if call.rank == 0 else None
            rank = RankProcess(call.rank, self._launched.process, descriptor, os.dup(descriptor), output)
            rank.tail = self._launched.tail if call.rank == 0 else b""
            self._add(rank, replace(self._job, rank=call.rank, local_rank=call.local_rank, master=master))

    def _add(self, rank: RankProcess, job: Job) -> None:
        self._ranks.append(rank)
        self._send(rank, job_line(job))
        for descriptor in (rank.events, rank.output):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
                self._open[descriptor] = rank

    def look(self) -> bool | None:
        """Hear what the ranks have said. True when all wait to be released; false when all are done, or one has failed and the
        group was ended; None when they are still at it."""
        running = any(rank.process.poll() is None for rank in self._ranks)
        for descriptor, rank in list(self._open.items()):
            self._read(rank, descriptor)
        if self._ranks:
            self._on_look(self._ranks[0].last.phase)
        self._allow_for_standstill()
        self._check()
        if self._error is None and running:
            if all(rank.waits for rank in self._ranks):
                return True
            if not self._over():
                return None
            self._notes.append(f"a rank did not end by itself within {EXIT_S:g} s of its result")
        if self._error is not None:
            for rank in self._ranks:
                end_group(rank.process.pid)
        return False

    def release(self) -> None:
        """Let all ranks go on to their next barrier."""
        for rank in self._ranks:
            rank.heard = time.monotonic()
            rank.waits = False
            self._send(rank, b"go\n")

    @property
    def descriptors(self) -> list[int]:
        """What there is to wait for until a rank says something; empty when all that is left is to end."""
        return list(self._open)

    @property
    def has_results(self) -> bool:
        """Whether all ranks have told what they measured: they wait to be let go, or are gone."""
        return all(rank.result is not None for rank in self._ranks)

    @property
    def has_failed(self) -> bool:
        """Whether it is known to give no result."""
        return self._error is not None

    @property
    def waits(self) -> bool:
        """Whether all ranks live and wait to be released."""
        return self._error is None and all(rank.waits and rank.process.poll() is None for rank in self._ranks)

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, or of what launches them."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def clean(self) -> bool:
        """Whether all ranks ended by themselves, as they should."""
        return self._error is None and all(rank.process.poll() == 0 for rank in self._ranks)

    def close(self) -> None:
        """Kill what still runs of the ranks, and close their pipes."""
        if self._launched is not None:
            self._launched.end()
            os.close(self._launched.output)
        for rank in self._ranks:
            end_group(rank.process.pid)
            rank.process.wait()
            for descriptor in (rank.commands, rank.events):
                os.close(descriptor)
            if rank.output is not None and self._launched is None:
                os.close(rank.output)

    def result(self, left_behind: tuple[str, ...]) -> GroupResult:
        """What came of it; `left_behind` are the command lines of what had to be ended after the ranks."""
        ranks = tuple(rank.result for rank in self._ranks if rank.result is not None)
        error = self._error
        if error is None and len(ranks) < self._job.cell.world_size:
            error = "a rank ended without a result"
        states = {rank.number: rank.state for rank in self._ranks if rank.state is not None}
        disagreement = None if error else compare_states(states, exact=self._job.cell.device == "cpu")
        notes = tuple(self._notes)
        return GroupResult(
            () if error else ranks, error, notes, self._version, left_behind, self._profile, disagreement
        )

    def _send(self, rank: RankProcess, line: bytes) -> None:
        try:
            os.write(rank.commands, line)
        except ConnectionError:  # a closed pipe, or a connection that was reset
            return  # it died; _check says of what

    def _over(self) -> bool:
        """Whether every rank has given its result, and had time to end."""
        now = time.monotonic()
        return all(rank.result is not None and now - rank.heard > EXIT_S for rank in self._ranks)

    def _read(self, rank: RankProcess, descriptor: int) -> None:
        for chunk in chunks(descriptor):
            if not chunk:  # closed: it would be ready to read for ever
                self._open.pop(descriptor, None)
                rank.hung_up = rank.hung_up or descriptor == rank.events
            elif descriptor == rank.output:
                rank.tail = (rank.tail + chunk)[-TAIL_BYTES:]
            else:
                *lines, rank.pending = (rank.pending + chunk).split(b"\n")
                for line in lines:
                    self._hear(rank, line)
                if len(rank.pending) > event_limit(self._job):
                    self._fail(rank, "wrote more on the pipe of results than a result can be")
                    return

    def _hear(self, rank: RankProcess, line: bytes) -> None:
        try:
            event = read_event(line)
        except ValueError as error:
            self._fail(rank, f"sent a result that cannot be right: {error}")
            return
        now = time.monotonic()
        if event.step is not None:
            if rank.last.step is not None:
                rank.longest_step_s = max(rank.longest_step_s, now - rank.heard)
            if rank.number == 0:
                self._on_step(event.step)
        rank.heard = now
        rank.last = event
        if rank.number == 0:
            # For each event: several may have come since the last look, and no phase is to be missed.
            self._on_look(event.phase)
        rank.waits = event.phase == "barrier"
        rank.result = event.result or rank.result
        rank.state = event.state or rank.state
        self._version = event.library_version or self._version
        self._profile = event.profile or self._profile
        if event.note:
            self._notes.append(event.note)
        if event.error is not None:
            where = f", raised at {event.origin}" if event.origin else ""
            self._fail(rank, f"{event.error} (in phase {event.phase}{where})")

    def _check(self) -> None:
        for rank in self._ranks:
            status = rank.process.poll()
            if status is not None:  # what it wrote just before it ended
                self._read(rank, rank.events)
                if rank.output is not None:
                    self._read(rank, rank.output)
            if rank.result is not None:
                continue
            if rank.hung_up and self._launched is not None:
                self._fail(rank, f"its connection ended {rank.where}, without a result{self._last_words(rank)}")
            elif status is None:
                self._check_silence(rank)
            else:
                self._fail(rank, self._death(rank, status))

    def _allow_for_standstill(self) -> None:
        """What we did not see because we were stopped or frozen ourselves, as a paused container is, is no rank's silence."""
        unseen_s, self.looked = time.monotonic() - self.looked, time.monotonic()
        if unseen_s > STANDSTILL_S:
            for rank in self._ranks:
                rank.heard = min(self.looked, rank.heard + unseen_s)
            self._notes.append(f"flowbench stood still for {unseen_s:.0f} s (stopped, or its container paused?)")

    def _check_silence(self, rank: RankProcess) -> None:
        if rank.waits and not all(other.waits for other in self._ranks):
            return  # it waits for the others, which are watched
        stepping = rank.last.step is not None
        derived = max(SILENCE_S, SILENCE_STEPS * rank.longest_step_s) if stepping else SILENCE_BEFORE_STEPS_S
        limit = self._silence_s or derived
        if time.monotonic() - rank.heard > limit:
            self._fail(rank, f"hangs: no sign of progress for {limit:g} s {rank.where}")

    def _death(self, rank: RankProcess, status: int) -> str:
        if status < 0:
            name = signal.Signals(-status).name
            if -status == signal.SIGKILL and _memory_kills() > self._kills_before:
                return f"killed by {name} {rank.where}: the system ran out of memory"
            return f"died of {name} {rank.where}" + self._last_words(rank)
        return f"ended with status {status} {rank.where}, without a result" + self._last_words(rank)

    def _last_words(self, rank: RankProcess) -> str:
        return last_words(rank.tail or self._ranks[0].tail)

    def _fail(self, rank: RankProcess, what: str) -> None:
        who = f"rank {rank.number}: " if len(self._ranks) > 1 else ""
        self._error = self._error or who + what


def _memory_kills() -> int:
    """How often the kernel has killed a process for memory since it started (Linux; elsewhere 0)."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
