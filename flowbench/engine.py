"""What an engine is: a framework that can train a model one step at a time.

A package adds an engine with an entry point in the group `flowbench.engines`: the name people type, and a class with the
methods of `Engine`, best a subclass: it has the defaults of what is asked for some day. The class is made in the parent process
too, which must not load the framework: import it in `load` and what comes after it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from flowbench.cell import Case, Cell, Device

# When algorithms are timed to choose among them.
Tunes = Literal["never", "once", "always"]


@dataclass(frozen=True)
class Batch:
    """One batch of training data: images float32 [N, C, H, W] contiguous, labels int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Task:
    """What an engine is asked to train: the weights by torchvision's names, the batches in turn, SGD's settings.

    The arrays of `weights` are views of one buffer that is given back after `build`: copy what is kept. On a GPU the
    engine's allocator may take `gpu_memory_limit_bytes` at most, where that is not None.

    Where the cell says `ddp` this is rank `rank` of `world_size`, number `local_rank` on its machine, and the environment has
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; waiting for another rank may take `timeout_s`.
    """

    cell: Cell
    weights: Mapping[str, np.ndarray]
    batches: Sequence[Batch]
    learning_rate: float
    momentum: float
    rank: int
    world_size: int
    gpu_memory_limit_bytes: int | None = None
    local_rank: int = 0
    timeout_s: float = 300.0

    @property
    def device(self) -> str:
        """Where this rank trains: `cpu`, or the GPU of its number on the machine."""
        return "cpu" if self.cell.device == "cpu" else f"cuda:{self.local_rank}"


class Event(Protocol):
    """A point in a device's work, as `torch.cuda.Event(enable_timing=True)` is one after `record()`."""

    def synchronize(self) -> object:
        """Wait until the device has reached it."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this event to `end`, another one of its kind, both reached."""
        ...


@dataclass(frozen=True)
class OpCall:
    """One call of one op: `shape` as `float32[4, 64, 56, 56]`, `module` the path of the module it works for, or empty."""

    op: str
    shape: str
    module: str
    time_ms: float


@dataclass(frozen=True)
class HeldTensor:
    """Memory that was held at the peak, and the op and module that asked for it."""

    op: str
    shape: str
    module: str
    nbytes: int


@dataclass(frozen=True)
class StepProfile:
    """All that an engine can tell of one step. `timeline` has (ms since the begin, bytes held); what is not known is empty.

    `missing` says what the engine cannot tell, and why.
    """

    step_ms: float
    calls: Sequence[OpCall]
    peak_bytes: int | None
    peak_at_ms: float | None
    held: Sequence[HeldTensor]
    timeline: Sequence[tuple[float, int]]
    missing: tuple[str, ...]


class Training(Protocol):
    """A model being trained on `device` (`cpu`, `cuda:0`). Only `step`, and waiting for the device, is timed."""

    device: str = "cpu"

    def step(self, index: int) -> None:
        """Start one step on batch `index % len(batches)`: forward, mean cross-entropy, backward, SGD with momentum."""
        ...

    def loss(self) -> float:
        """The loss of the last step, taken before its weights changed."""
        ...

    def event(self) -> Event | None:
        """A timed event behind everything started so far; None (the default) has steps timed by the host's clock instead."""
        return None

    def later_loss(self) -> Callable[[], float]:
        """What gives the last step's loss when the device has done it. An engine with events must not wait here."""
        value = self.loss()
        return lambda: value

    def spin(self, milliseconds: float) -> bool:
        """Keep the device busy for so long behind what was started so far, for `flowbench aa`; false where it cannot be."""
        return False

    def profile(self, index: int) -> StepProfile | None:
        """As `step`, op by op, however long that takes; None (the default) where the engine cannot tell."""
        return None

    def synchronize(self) -> None:
        """Wait until the device has done all work of the steps started so far."""
        return

    def parameters(self) -> Mapping[str, np.ndarray] | None:
        """The learned weights now, on the host, by the names of `Task.weights`; None (the default) where nobody is to compare
        them between ranks."""
        return None

    def loss_on(self, batch: Batch) -> float | None:
        """The loss on a batch, with nothing learned from it and no other rank needed; asked after the last step."""
        return None

    def close(self) -> None:
        """Part from the other ranks. Called last."""
        return

    def threads(self) -> int | None:
        """The number of CPU threads the framework says it uses; None where it cannot tell."""
        return None

    def reset_peaks(self) -> None:
        """Begin the peaks of the allocator anew."""
        return

    def allocated_peak_bytes(self) -> int | None:
        """The most memory that tensors held since `reset_peaks`; None where the framework does not count."""
        return None

    def reserved_peak_bytes(self) -> int | None:
        """The most memory the allocator took from the system since `reset_peaks`; None where it does not count."""
        return None


class Engine(Protocol):
    """A framework in one way of using it. `display_name` is the one word reports use; `library` is what is imported.

    `tunes` says when building or the first step times algorithms to choose among them, which must not be disturbed: `once`
    where the choice is kept for later processes of the same cell.
    """

    display_name: str
    library: str
    devices: tuple[Device, ...] = ("cpu",)
    tunes: Tunes = "always"

    def load(self, device: Device) -> None:
        """Import all that training on `device` takes, as far as that makes no context on a GPU. Called first.

        What is imported later is counted as memory of the training, and keeps others waiting.
        """
        importlib.import_module(self.library)

    def open(self, task: Task) -> None:
        """Bring what the first use of a GPU brings, its context and libraries, and hold nothing of it in the allocator.

        Called before `build` where several processes take turns: they do this together. On a GPU they build and take their
        first step together too, unless one of them may tune or has several ranks: then they do it one after the other.
        """
        return

    def build(self, task: Task) -> Training:
        """Build the model in this process, load the weights, put the batches where steps read them."""
        ...

    def unavailable(self) -> str | None:
        """Why this engine cannot run here, with the way out; None where it can. Must not import the framework."""
        if importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed (python -m pip install {self.library})"
        return None

    def version(self) -> str:
        """The version of the library."""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def advice(self) -> str | None:
        """What would make this engine faster here, with the way out; None where nothing would. May import the framework."""
        return None

    def gpu_refusal(self) -> str | None:
        """Why this engine cannot use a GPU that is here, with the way out; None where it can. Makes no CUDA context."""
        return None

    def unsupported(self, case: Case) -> str | None:
        """Why this engine cannot run `case`; None where it can."""
        return None


def ranks_refusal(case: Case) -> str | None:
    """Why an engine with a DistributedDataParallel cannot run `case` for its number of ranks; None where it can."""
    if case.world_size > 1 and not case.ddp:
        return f"{case.world_size} ranks that do not train together are no training"
    return None
