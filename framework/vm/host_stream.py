"""HostStream: a thread of its own with a queue, for work that runs on the host beside the compute stream."""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable

from framework.device import Device
from framework.vm import launch_groups
from framework.vm.stream import Mark, Stream

Entry = tuple[int, Callable[[], None], object]


class HostStream(Stream):
    """Runs what is issued to it in a thread of its own, in order; for host functions, on arrays of any device.

    What fails there is raised, as it is, by whoever next waits for the stream, and by everyone after that: what was
    issued behind it is not run.
    """

    runs_at_once = False

    def __init__(self, device: Device, name: str) -> None:
        super().__init__(device, name)
        self._queue: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._finished = 0
        self._failure: BaseException | None = None
        self._raised = False
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"{name} stream of {device}", daemon=True)
        self._thread.start()
        _all.add(self)

    def run(self, work: Callable[[], None], name: object = None) -> None:
        """Queues `work`. Raises what failed here before."""
        with self._changed:
            self._check()
            if self._closed:
                raise RuntimeError(f"{self!r} is closed; {name!r} cannot be issued to it")
            self._queue.append((self.sequence, work, name))
            self._changed.notify_all()

    def wait_for(self, mark: Mark) -> int:
        """Holds this stream, not the caller, until what is issued to the mark's stream by now has run."""
        fence, covered = mark.stream.fence(), mark.stream.sequence
        if fence is not None:
            with self._changed:
                self._queue.append((self.sequence, fence, f"the wait for {mark.stream!r}"))
                self._changed.notify_all()
        return covered

    def is_done(self, mark: Mark) -> bool:
        """Whether everything up to `mark` has run, or never will."""
        return mark.sequence <= self._finished

    def fence(self) -> Callable[[], None] | None:
        """A function that returns when what has been issued by now has run, and raises what failed."""
        mark = self.mark()
        return None if self.is_done(mark) and self._failure is None else lambda: self.block(mark)

    def block(self, mark: Mark) -> None:
        """Holds the caller until everything up to `mark` has run. Raises what failed in the thread."""
        if self._finished >= mark.sequence and self._failure is None:
            return
        launch_groups.flush_all()  # devices go on meanwhile
        with self._changed:
            # In slices, so that Ctrl-C ends the wait on every system.
            while self._finished < mark.sequence and self._failure is None:
                self._changed.wait(1.0)
            self._check()

    def synchronize(self) -> None:
        """Returns when everything issued has run. Raises what failed in the thread."""
        self.block(self.mark())

    def end(self) -> None:
        """Ends the thread behind what is queued. Raises what failed there if nobody was told of it yet."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        unseen, self._raised = self.unseen_failure, True
        if unseen is not None:
            raise unseen

    @property
    def unseen_failure(self) -> BaseException | None:
        """What failed and was raised to nobody yet."""
        return None if self._raised else self._failure

    def _check(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                sequence, work, name = self._queue.popleft()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised to whoever waits
                error.add_note(f"raised by {name!r} on the {self.name} stream of {self.device}")
                with self._changed:
                    self._failure = error
                    # Nothing of it runs any more, so nobody has to wait to use its memory again.
                    self._queue.clear()
                    self._finished = 1 << 62
                    self._changed.notify_all()
                return
            # What the work used must be free when it counts as finished.
            del work, name
            with self._changed:
                self._finished = max(self._finished, sequence)
                self._changed.notify_all()


_all: weakref.WeakSet[HostStream] = weakref.WeakSet()


@atexit.register
def _print_unseen_failures() -> None:
    """A failure that nobody waited for is told when the process ends."""
    for stream in list(_all):
        if stream.unseen_failure is not None:
            traceback.print_exception(stream.unseen_failure)
