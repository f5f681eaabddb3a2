"""Whether ranks that see different data stay alike to the last bit, and whether they train as one rank with all of it does.

    python suites/rank_agreement.py [--device cuda] [--ranks 2] [--model resnet50] [--steps 200] [--float64-steps 20]

First in float32, each rank with data of its own: after every step the parameters of all ranks are compared bit for bit. Then in
float64 with SyncBatchNorm, beside one rank that trains alone on the data of all: the mean of the ranks' losses has to be its
loss at every step. There the last normalisation of each block starts at a fifth: a ResNet as it is drawn multiplies what
rounding does so much at each step that after ten of them nothing else would decide its losses. Exit code 0 where both hold,
else that of the rank which found the difference, and names it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script

from flowbench.measure.processes import child_environment  # noqa: E402

MOST_APART = 1e-5  # losses in float64
_SETTINGS = {"lr": 1e-3, "momentum": 0.9}
_CLASSES = 10


class DisagreementError(Exception):
    """What is not alike, where it first was so."""


def run_rank(job: dict[str, Any]) -> None:
    """One rank: both parts, of which the first rank says how they ended. Raises DisagreementError."""
    import framework as flow

    own = flow.distributed
    own.init_process_group()
    size, shape = own.get_world_size(), job["shape"]
    where = f"{size} ranks, {job['model']} {shape} each on {job['device']}"
    tensors = stay_alike(flow, job)
    _say(own, f"{where}, float32: after each of {job['steps']} steps all {tensors} parameters are alike bit for bit")
    apart = train_as_one(flow, job)
    whole = [size * shape[0], *shape[1:]]
    _say(
        own,
        f"{where}, float64, SyncBatchNorm: the losses of {job['float64_steps']} steps are those of one rank with {whole},"
        f" within {apart:.1e} (bar: {MOST_APART:g})",
    )
    own.destroy_process_group()


def stay_alike(flow: Any, job: dict[str, Any]) -> int:
    """Trains in float32, each rank on data of its own, and compares after each step; the number of parameters."""
    own = flow.distributed
    model = flow.nn.parallel.DistributedDataParallel(_model(flow, job, flow.float32))
    optimizer = flow.optim.SGD(model.parameters(), **_SETTINGS)
    names = [name for name, _ in model.named_parameters()]
    for step in range(1, job["steps"] + 1):
        _train(flow, model, optimizer, _batch(flow, job, step, own.get_rank(), flow.float32))
        digests = [
            hashlib.blake2b(parameter.detach().to("cpu").numpy().tobytes()).hexdigest()
            for parameter in model.parameters()
        ]
        for rank, theirs in enumerate(own.all_gather_object(digests)):
            if theirs != digests:
                name = next(name for name, mine, other in zip(names, digests, theirs, strict=True) if mine != other)
                raise DisagreementError(f"after step {step} {name} of rank {rank} is not that of rank {own.get_rank()}")
        _progress(own, "float32", step, job["steps"])
    return len(names)


def train_as_one(flow: Any, job: dict[str, Any]) -> float:
    """Trains in float64 beside the first rank alone; how far a loss was from its own at most, on the first rank."""
    own = flow.distributed
    rank, size = own.get_rank(), own.get_world_size()
    module = flow.nn.SyncBatchNorm.convert_sync_batchnorm(_damped(flow, _model(flow, job, flow.float64)))
    model = flow.nn.parallel.DistributedDataParallel(module)
    optimizer = flow.optim.SGD(model.parameters(), **_SETTINGS)
    alone = _damped(flow, _model(flow, job, flow.float64)) if rank == 0 else None
    optimizer_alone = flow.optim.SGD(alone.parameters(), **_SETTINGS) if alone is not None else None
    most = 0.0
    for step in range(1, job["float64_steps"] + 1):
        losses = own.all_gather_object(_train(flow, model, optimizer, _batch(flow, job, step, rank, flow.float64)))
        if alone is not None:
            parts = [_drawn(job, step, one) for one in range(size)]
            whole = _on_device(flow, job, *map(np.concatenate, zip(*parts, strict=True)), flow.float64)
            wanted = _train(flow, alone, optimizer_alone, whole)
            most = max(most, abs(sum(losses) / size - wanted))
            if not most <= MOST_APART:  # which NaN is not either
                raise DisagreementError(
                    f"step {step}: the ranks' mean loss is {sum(losses) / size!r}, one rank's {wanted!r}"
                )
        _progress(own, f"float64, {most:.1e} apart", step, job["float64_steps"])
    return most


def _model(flow: Any, job: dict[str, Any], dtype: Any) -> Any:
    flow.manual_seed(0)
    return getattr(flow.models, job["model"])(num_classes=_CLASSES).to(job["device"]).to(dtype)


def _damped(flow: Any, model: Any) -> Any:
    """The model, of whose blocks each adds a fifth of what it would to its input."""
    with flow.no_grad():
        for block in model.modules():
            last = getattr(block, "bn3", None) or getattr(block, "bn2", None)
            if last is not None:
                last.weight.fill_(0.2)
    return model


def _drawn(job: dict[str, Any], step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's images and labels of a step."""
    random = np.random.default_rng([step, rank])
    return random.standard_normal(job["shape"]), random.integers(0, _CLASSES, job["shape"][0])


def _batch(flow: Any, job: dict[str, Any], step: int, rank: int, dtype: Any) -> tuple[Any, Any]:
    return _on_device(flow, job, *_drawn(job, step, rank), dtype)


def _on_device(flow: Any, job: dict[str, Any], images: np.ndarray, labels: np.ndarray, dtype: Any) -> tuple[Any, Any]:
    return flow.tensor(images, dtype=dtype, device=job["device"]), flow.tensor(labels, device=job["device"])


def _train(flow: Any, model: Any, optimizer: Any, batch: tuple[Any, Any]) -> float:
    """The loss of a step."""
    optimizer.zero_grad()
    loss = flow.nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return float(loss.item())


def _say(own: Any, text: str) -> None:
    if own.get_rank() == 0:
        print(text, flush=True)


def _progress(own: Any, what: str, step: int, steps: int) -> None:
    if own.get_rank() == 0 and (step % 10 == 0 or step == steps):
        print(f"{what}: step {step} of {steps}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks, and returns how the first of them that failed has ended."""
    parser = argparse.ArgumentParser(
        description="Whether ranks stay alike to the last bit, and train as one rank does."
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2; they share GPUs where there are fewer")
    parser.add_argument("--model", default="resnet50", help="default: resnet50")
    parser.add_argument("--batch-size", type=int, default=4, help="images of each rank; default: 4")
    parser.add_argument("--image-size", type=int, default=64, help="height and width; default: 64")
    parser.add_argument("--steps", type=int, default=200, help="in float32; default: 200")
    parser.add_argument("--float64-steps", type=int, default=20, help="beside one rank alone; default: 20")
    parser.add_argument("--rank-job", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank_job:
        run_rank(asked.rank_job)
        return 0
    if min(asked.ranks, asked.batch_size, asked.image_size, asked.steps, asked.float64_steps) < 1:
        parser.error("--ranks, --batch-size, --image-size, --steps and --float64-steps start at 1")
    job = {
        "device": asked.device,
        "model": asked.model,
        "shape": [asked.batch_size, 3, asked.image_size, asked.image_size],
        "steps": asked.steps,
        "float64_steps": asked.float64_steps,
    }
    launch = [sys.executable, "-m", "framework.distributed.launch", "--no-prefix", "--nproc-per-node", str(asked.ranks)]
    environment = {"OMP_NUM_THREADS": "1", **child_environment()}
    return subprocess.run([*launch, __file__, "--rank-job", json.dumps(job)], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
