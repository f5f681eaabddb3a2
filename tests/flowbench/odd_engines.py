"""Engines that go wrong in one way each."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from toy_engine import ToyEngine, ToyTraining

from flowbench.cell import Device
from flowbench.engine import Batch, Task

SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


class Odd(ToyEngine):
    """Calls `happen` in step 2."""

    display_name = "Odd"

    def build(self, task: Task) -> ToyTraining:
        engine = self

        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                if index == 2:
                    engine.happen(self)

        return Training(task)

    def happen(self, training: ToyTraining) -> None:
        pass


class Raises(Odd):
    def happen(self, training: ToyTraining) -> None:
        raise ValueError("the toy | broke\non purpose")


class RaisesInBuild(ToyEngine):
    def build(self, task: Task) -> ToyTraining:
        raise MemoryError("asked for 10 GiB")


class Exits(Odd):
    def happen(self, training: ToyTraining) -> None:
        print("the toy's last words")
        sys.stdout.flush()
        os._exit(7)


class Hangs(Odd):
    def happen(self, training: ToyTraining) -> None:
        subprocess.Popen(SLEEP, start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)


class Segfaults(Odd):
    def happen(self, training: ToyTraining) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Killed(Odd):
    def happen(self, training: ToyTraining) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class TellsItsScore(Odd):
    """Ends with what the kernel thinks of killing it first."""

    def happen(self, training: ToyTraining) -> None:
        raise ValueError(Path("/proc/self/oom_score_adj").read_text())


class WrongGradients(ToyEngine):
    """Trains with gradients ten per cent too small: faster, say."""

    display_name = "Wrong"

    def build(self, task: Task) -> ToyTraining:
        class Training(ToyTraining):
            def update(self, gradients: list[np.ndarray]) -> None:
                super().update([gradient * np.float32(0.9) for gradient in gradients])

        return Training(task)


class NotFinite(Odd):
    def happen(self, training: ToyTraining) -> None:
        training.last = float("nan")


class TooManyThreads(ToyEngine):
    def build(self, task: Task) -> ToyTraining:
        class Training(ToyTraining):
            def threads(self) -> int:
                return task.cell.threads + 1

        return Training(task)


class LeavesAChild(Odd):
    """Starts a process in a session of its own, and lets it be."""

    def happen(self, training: ToyTraining) -> None:
        subprocess.Popen(SLEEP, start_new_session=True, stdout=subprocess.DEVNULL)


class Talks(Odd):
    """Writes more than a pipe holds on both outputs, and lines like those of the results."""

    def happen(self, training: ToyTraining) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.write('{"phase": "end", "result": null}\n' * 20_000)


class HoldsMemory(Odd):
    """Holds 300 MB for a moment within a timed step."""

    def happen(self, training: ToyTraining) -> None:
        held = np.ones(300_000_000, np.uint8)
        del held


class Waits(ToyEngine):
    """Hangs where the file `wait_in` beside the documents says: while building, or in a step; with a child."""

    def build(self, task: Task) -> ToyTraining:
        where = Path(os.environ["ODD_WAIT_FILE"]).read_text()

        def wait() -> None:
            subprocess.Popen(SLEEP, start_new_session=True, stdout=subprocess.DEVNULL)
            Path(os.environ["ODD_WAIT_FILE"] + ".reached").touch()
            time.sleep(1000)

        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                if where == f"step {index}":
                    wait()

        if where == "build":
            wait()
        return Training(task)


class NotesItsSetup(ToyEngine):
    """Appends to a file what it does but for steps after the first. While it builds it waits until so many others do."""

    def load(self, device: Device) -> None:
        super().load(device)
        self._note("load")
        atexit.register(self._note, "exit")

    def open(self, task: Task) -> None:
        self._note("open")

    def build(self, task: Task) -> ToyTraining:
        self._note("build")
        while self._notes().count("build") < int(os.environ.get("ODD_BUILDERS", "0")):
            time.sleep(0.01)
        engine = self

        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                if index == 0:
                    engine._note("step")

            def close(self) -> None:
                engine._note("close")

        return Training(task)

    def _note(self, what: str) -> None:
        with open(os.environ["ODD_SETUP_FILE"], "a") as file:
            file.write(f"{what}\n")

    def _notes(self) -> list[str]:
        return Path(os.environ["ODD_SETUP_FILE"]).read_text().split()


class TalksWhileLoading(NotesItsSetup):
    """Writes more than a pipe holds before another process loads too, and waits for that one."""

    def load(self, device: Device) -> None:
        print("a line of many\n" * 20_000, flush=True)
        super().load(device)
        while self._notes().count("load") < 2:
            time.sleep(0.01)


class NoSubclass:
    """Has the methods that the first engines had, and no base class that would give it those that came later."""

    display_name = "No subclass"
    library = "toy_engine"
    build = ToyEngine.build
    unsupported = ToyEngine.unsupported

    def unavailable(self) -> str | None:
        return None

    def version(self) -> str:
        return "1"

    def advice(self) -> str | None:
        return None


class SecondRankRaises(ToyEngine):
    """Rank 1 raises while the others wait at the barrier."""

    def build(self, task: Task) -> ToyTraining:
        if task.rank == 1:
            raise ValueError(f"rank {task.rank} of {task.world_size} will not")
        return ToyTraining(task)


class SlowSecondRank(ToyEngine):
    """Rank 1 comes late to the barrier, and takes 50 ms longer for a step."""

    def build(self, task: Task) -> ToyTraining:
        time.sleep(0.5 * task.rank)

        class Training(ToyTraining):
            def step(self, index: int) -> None:
                time.sleep(0.05 * task.rank)
                super().step(index)

        return Training(task)


class Hiccups(ToyEngine):
    """One step of three takes 400 ms longer than the others: a busy machine stretches those too."""

    def build(self, task: Task) -> ToyTraining:
        class Training(ToyTraining):
            def step(self, index: int) -> None:
                time.sleep(0.4 * (index % 3 == 0))
                super().step(index)

        return Training(task)


class RanksAgree(ToyEngine):
    """Ranks that all learn nothing hold the same weights at the end."""

    moved = 0.0

    def build(self, task: Task) -> ToyTraining:
        moved = np.float32(self.moved * task.rank)

        class Training(ToyTraining):
            def update(self, gradients: list[np.ndarray]) -> None:
                pass

            def parameters(self) -> dict[str, np.ndarray]:
                return {"weight": self.weight, "bias": self.bias + moved}

            def loss_on(self, batch: Batch) -> float:
                return float(batch.images.sum())

        return Training(task)


class SecondRankDrifts(RanksAgree):
    """The last bit of rank 1's bias is another."""

    moved = 1e-7


class SecondRankDies(ToyEngine):
    """Rank 1 is killed in step 2."""

    def build(self, task: Task) -> ToyTraining:
        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                if task.rank == 1 and index == 2:
                    os.kill(os.getpid(), signal.SIGKILL)

        return Training(task)


class SecondRankIsReset(ToyEngine):
    """Rank 1 ends in step 2 so that its parent's connection is not closed but reset, as where a machine goes away."""

    def build(self, task: Task) -> ToyTraining:
        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                if task.rank == 1 and index == 2:
                    for descriptor in map(int, os.listdir("/proc/self/fd")):
                        with contextlib.suppress(OSError):
                            linger = struct.pack("ii", 1, 0)
                            socket.socket(fileno=descriptor).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    os._exit(0)

        return Training(task)


class NotInstalled(ToyEngine):
    library = "a_library_that_is_nowhere"


class SimulatedTime:
    """In place of the module `time` where steps are timed: it passes where a step says so, and by a microsecond a look."""

    def __init__(self) -> None:
        self.now_ns = 0

    def perf_counter_ns(self) -> int:
        self.now_ns += 1000
        return self.now_ns


class Sided(ToyEngine):
    """Takes as long, or does as wrong, as the package `framework` says that it imports; the time is a simulated one."""

    library = "framework"

    def build(self, task: Task) -> ToyTraining:
        import framework
        from flowbench.measure import clock, slowdown

        if task.cell.engine.endswith("@head") and hasattr(framework, "RAISES"):
            raise ValueError(framework.RAISES)
        simulated = clock.time = slowdown.time = SimulatedTime()

        class Training(ToyTraining):
            def step(self, index: int) -> None:
                super().step(index)
                simulated.now_ns += framework.STEP_MS * 1_000_000

            def update(self, gradients: list[np.ndarray]) -> None:
                super().update([gradient * np.float32(framework.GRADIENT) for gradient in gradients])

        return Training(task)
