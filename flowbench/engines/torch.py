"""PyTorch as an engine: with its defaults, which is the reference of every ratio, in channels_last, and with autotuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flowbench.cell import Case, Device
from flowbench.engine import Batch, Engine, Event, StepProfile, Task, Training, Tunes, ranks_refusal


class TorchTraining(Training):
    """A PyTorch model being trained with PyTorch's SGD."""

    def __init__(self, task: Task, channels_last: bool, **parallel: bool) -> None:
        import torch

        from flowbench.engines.torch_models import build_model

        self._torch = torch
        self.device = task.device
        self._on_gpu = self.device != "cpu"
        if self._on_gpu:
            _open_gpu(torch, self.device, task.gpu_memory_limit_bytes)
        with torch.device("meta"):  # weights that are replaced at once need not be drawn
            self._model = build_model(task.cell.model, {name: array.shape for name, array in task.weights.items()})
        weights = {name: torch.from_numpy(array).clone() for name, array in task.weights.items()}
        self._model.load_state_dict(weights, assign=True)
        self._model.train()
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self._model.to(self.device, memory_format=memory_format)
        self._ranks = torch.distributed if task.cell.ddp else None
        if self._ranks is not None:
            self._model = _join_ranks(torch, task, self._model, parallel)
        self._batches = [
            (
                torch.from_numpy(batch.images).to(self.device).contiguous(memory_format=memory_format),
                torch.from_numpy(batch.labels).to(self.device),
            )
            for batch in task.batches
        ]
        self._criterion = torch.nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=task.learning_rate, momentum=task.momentum)
        self._loss: Any = None

    def step(self, index: int) -> None:
        images, labels = self._batches[index % len(self._batches)]
        self._optimizer.zero_grad()
        loss = self._criterion(self._model(images), labels)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def loss(self) -> float:
        return float(self._loss.item())

    def later_loss(self) -> Callable[[], float]:
        loss = self._loss
        return lambda: float(loss.item())

    def event(self) -> Event | None:
        if not self._on_gpu:
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def profile(self, index: int) -> StepProfile:
        from flowbench.engines.torch_profile import profile_step

        return profile_step(lambda: self.step(index), self._on_gpu)

    def synchronize(self) -> None:
        if self._on_gpu:
            self._torch.cuda.synchronize()

    def parameters(self) -> Mapping[str, np.ndarray]:
        inner = self._model if self._ranks is None else self._model.module
        return {name: p.detach().cpu().contiguous().numpy() for name, p in inner.named_parameters()}

    def loss_on(self, batch: Batch) -> float:
        inner = self._model if self._ranks is None else self._model.module
        images, labels = (self._torch.from_numpy(values).to(self.device) for values in (batch.images, batch.labels))
        with self._torch.no_grad():
            return float(self._criterion(inner(images), labels).item())

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.destroy_process_group()

    def threads(self) -> int:
        return self._torch.get_num_threads()

    def reset_peaks(self) -> None:
        if self._on_gpu:
            self._torch.cuda.reset_peak_memory_stats()

    def allocated_peak_bytes(self) -> int | None:
        return self._torch.cuda.max_memory_allocated() if self._on_gpu else None

    def reserved_peak_bytes(self) -> int | None:
        return self._torch.cuda.max_memory_reserved() if self._on_gpu else None


class TorchEager(Engine):
    """PyTorch as it comes: default memory format, default settings."""

    display_name = "PyTorch"
    library = "torch"
    devices = ("cpu", "cuda")
    channels_last = False
    autotuned = False
    tunes: Tunes = "never"

    def load(self, device: Device) -> None:
        super().load(device)
        import torch

        # The first optimizer imports what compiles models: more than PyTorch itself.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        if device == "cuda":
            torch.cuda.is_available()

    def open(self, task: Task) -> None:
        if task.device == "cpu":
            return
        import torch

        _open_gpu(torch, task.device, task.gpu_memory_limit_bytes)
        with torch.no_grad():
            torch.nn.Conv2d(8, 8, 3).to(task.device)(torch.zeros(1, 8, 8, 8, device=task.device))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def build(self, task: Task) -> TorchTraining:
        import torch

        torch.backends.cudnn.benchmark = self.autotuned
        return TorchTraining(task, self.channels_last)

    def gpu_refusal(self) -> str | None:
        import torch

        return _gpu_refusal(torch)

    def unsupported(self, case: Case) -> str | None:
        if self.autotuned and case.device != "cuda":
            return "cudnn.benchmark is a setting for GPUs"
        if case.precision != "float32":
            return f"{self.display_name} is measured in float32, not in {case.precision}"
        if case.mode != "eager":
            return f"{self.display_name} is measured op by op, not in mode {case.mode}"
        return ranks_refusal(case)


class TorchChannelsLast(TorchEager):
    """PyTorch in channels_last memory format (NHWC)."""

    display_name = "PyTorch-NHWC"
    channels_last = True


class TorchEagerBenchmark(TorchEager):
    """PyTorch with `cudnn.benchmark = True`: cuDNN's algorithms are timed when a shape is met first, as Flow does."""

    display_name = "PyTorch-benchmark"
    autotuned = True
    tunes = "always"


class TorchChannelsLastBenchmark(TorchChannelsLast):
    """PyTorch in channels_last memory format, with `cudnn.benchmark = True`."""

    display_name = "PyTorch-NHWC-benchmark"
    autotuned = True
    tunes = "always"


class TorchChannelsLastStatic(TorchChannelsLast):
    """PyTorch's DDP at its best on GPUs: channels_last, gradients as views of buckets, a graph that stays the same."""

    display_name = "PyTorch-NHWC-static"

    def build(self, task: Task) -> TorchTraining:
        import torch

        torch.backends.cudnn.benchmark = self.autotuned
        return TorchTraining(task, self.channels_last, gradient_as_bucket_view=True, static_graph=True)

    def unsupported(self, case: Case) -> str | None:
        if not case.ddp or case.device != "cuda":
            return "static_graph and gradient_as_bucket_view are settings of DDP, measured on GPUs"
        return super().unsupported(case)


def _join_ranks(torch: Any, task: Task, model: Any, parallel: dict[str, bool]) -> Any:
    """The model in DDP's hands, after the ranks have found each other: by gloo on the CPU, nccl on GPUs."""
    from datetime import timedelta

    on_gpu = task.cell.device == "cuda"
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=task.timeout_s),
        **({"device_id": torch.device(task.device)} if on_gpu else {}),
    )
    return torch.nn.parallel.DistributedDataParallel(
        model,
        device_ids=[task.local_rank] if on_gpu else None,
        broadcast_buffers=task.cell.broadcast_buffers,
        **parallel,
    )


def _open_gpu(torch: Any, device: str, memory_limit_bytes: int | None) -> None:
    """Makes `device` the current one; its allocator then takes `memory_limit_bytes` at most."""
    refusal = _gpu_refusal(torch)
    if refusal is not None:
        raise RuntimeError(refusal)
    torch.cuda.set_device(device)
    if memory_limit_bytes is not None:
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_limit_bytes / whole))


def _gpu_refusal(torch: Any) -> str | None:
    """Why this PyTorch cannot use a GPU, with the way out; None where it can. Makes no CUDA context."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built for CPUs alone: install a build for CUDA (python -m pip install torch)"
    if not torch.cuda.is_available():
        return (
            f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU it can use: nvidia-smi should list one, "
            "with a driver new enough, and CUDA_VISIBLE_DEVICES must not hide it"
        )
    return None
