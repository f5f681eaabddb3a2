"""What part of the device's copy bandwidth Flow's kernels reach that have little to do but to move memory.

    python suites/bandwidth.py [--device cuda] [--batch-size 256] [--runs 10]

Those of a ResNet50: its batch normalisations with ReLU, without and with a residual, and the optimizer's step. Bytes are those
that each has to move where nothing stays in a cache: forward the images twice and, written, the result, and the residual;
backward the images and the gradient twice, and each gradient that is written; SGD the gradient, and parameter and momentum
both ways. What they do with less, masks and sums by channel, is not counted. Shapes count as often as the network has them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script

from suites import resnet50_shapes as resnet50

_REPEATS = 5
_COPIED_BYTES = 1 << 30
# The device is kept busy for so long that the host has issued all before it comes to what is timed.
_BUSY_FILLS = 40

Run = Callable[[], Any]


class Moved(NamedTuple):
    """One operation: `uses` is how often a step has it, `nbytes` what it has to move, `ms` how long it took."""

    uses: int
    nbytes: int
    ms: float


def measured(flow: Any, device: str, run: Run, runs: int) -> float:
    """Milliseconds of a run, one behind the other: the median over some repeats."""
    run()
    return statistics.median((_on_gpu if device == "cuda" else _on_host)(flow, run, runs) for _ in range(_REPEATS))


def _on_gpu(flow: Any, run: Run, runs: int) -> float:
    start, end = (flow.cuda.Event(enable_timing=True) for _ in range(2))
    busy = flow.empty(_COPIED_BYTES // 4, device="cuda")
    flow.cuda.synchronize()
    for _ in range(_BUSY_FILLS):
        busy.fill_(0)
    start.record()
    for _ in range(runs):
        run()
    end.record()
    if start.query():
        print("the host came too late: times hold some of its own", file=sys.stderr)
    flow.cuda.synchronize()
    return float(start.elapsed_time(end)) / runs


def _on_host(flow: Any, run: Run, runs: int) -> float:
    begun = time.perf_counter()
    for _ in range(runs):
        run()
    return 1e3 * (time.perf_counter() - begun) / runs


def copied(flow: Any, device: str) -> Run:
    """A copy of _COPIED_BYTES by the driver, or by NumPy on the host."""
    source, target = (flow.zeros(_COPIED_BYTES // 4, device=device) for _ in range(2))
    if device == "cpu":
        there, here = target.numpy(), source.numpy()
        return lambda: there.__setitem__(slice(None), here)
    from framework.vm import cuda

    on = flow.cuda.current_stream().cuda_stream
    # 3: from device to device.
    return lambda: cuda.api().memcpyAsync(target.array.ptr, source.array.ptr, _COPIED_BYTES, 3, on)


def normalisations(flow: Any, device: str, batch_size: int, runs: int, *, residual: bool) -> Iterator[list[Moved]]:
    """For each distinct batch normalisation of a ResNet50 with ReLU its forward and its backward."""
    for (channels, size), uses in resnet50.normalisations(residual=residual).items():
        shape = (batch_size, channels, size, size)
        inputs = [_drawn(flow, device, shape).requires_grad_() for _ in range(1 + residual)]
        weight, bias = (make(channels, device=device).requires_grad_() for make in (flow.ones, flow.zeros))
        mean, var = flow.zeros(channels, device=device), flow.ones(channels, device=device)
        leaves = [*inputs, weight, bias]

        def forward(inputs: Any = inputs, figures: Any = (mean, var, weight, bias)) -> Any:
            images, added = inputs[0], inputs[1] if residual else None
            return flow.nn.functional.batch_norm(images, *figures, training=True, residual=added, relu=True)

        y, gradient = forward(), _drawn(flow, device, shape)

        def backward(y: Any = y, gradient: Any = gradient, leaves: Any = leaves) -> None:
            for leaf in leaves:
                leaf.grad = None
            y.backward(gradient, retain_graph=True)

        nbytes = 4 * batch_size * channels * size * size
        yield [
            Moved(uses, (3 + residual) * nbytes, measured(flow, device, forward, runs)),
            Moved(uses, (5 + residual) * nbytes, measured(flow, device, backward, runs)),
        ]


def sgd(flow: Any, device: str, runs: int) -> Moved:
    """A step of SGD with momentum over the parameters of a ResNet50."""
    parameters = [flow.zeros(*shape, device=device).requires_grad_() for shape in resnet50.parameters()]
    for parameter in parameters:
        parameter.grad = flow.zeros_like(parameter)
    optimizer = flow.optim.SGD(parameters, lr=0.1, momentum=0.9)
    nbytes = 5 * sum(parameter.numel() * 4 for parameter in parameters)
    return Moved(1, nbytes, measured(flow, device, optimizer.step, runs))


def _drawn(flow: Any, device: str, shape: tuple[int, ...]) -> Any:
    """Images [N, C, H, W] in the order in which a network's lie: another costs a copy."""
    batch_size, channels, height, width = shape
    return flow.randn(batch_size, height, width, channels, device=device).permute(0, 3, 1, 2).detach()


def row(title: str, moved: Sequence[Moved], copy: Moved) -> str:
    """A line of the table, in Markdown."""
    nbytes = sum(one.uses * one.nbytes for one in moved)
    ms = sum(one.uses * one.ms for one in moved)
    share = (nbytes / ms) / (copy.nbytes / copy.ms)
    return f"| {title} | {nbytes / 1e6:.0f} | {ms:.3f} | {nbytes / ms / 1e6:.0f} | {share:.2f} |"


HEAD = "| in a step | MB | ms | GB/s | of a copy's |\n|---|--:|--:|--:|--:|"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all, and prints each line as soon as it is there."""
    parser = argparse.ArgumentParser(description="What part of a copy's bandwidth Flow's kernels reach.")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="default: cuda")
    parser.add_argument("--batch-size", type=int, default=256, help="images of each normalisation; default: 256")
    parser.add_argument("--runs", type=int, default=10, help="of each, in a row; default: 10")
    asked = parser.parse_args(arguments)
    if asked.batch_size < 1 or asked.runs < 1:
        parser.error("--batch-size and --runs start at 1")
    import framework as flow

    if asked.device == "cuda" and not flow.cuda.is_available():
        parser.error(flow.cuda.why() or "there is no CUDA device")
    print(HEAD, flush=True)
    copy = Moved(1, 2 * _COPIED_BYTES, measured(flow, asked.device, copied(flow, asked.device), asked.runs))
    print(row("a copy of 1 GiB, for comparison", [copy], copy), flush=True)
    try:
        for residual, what in ((False, "BN + ReLU"), (True, "BN + add + ReLU")):
            both = zip(
                *normalisations(flow, asked.device, asked.batch_size, asked.runs, residual=residual), strict=True
            )
            for direction, moved in zip(("forward", "backward"), both, strict=True):
                print(row(f"{what}, N = {asked.batch_size}, {direction}", moved, copy), flush=True)
        print(row("SGD with momentum", [sgd(flow, asked.device, asked.runs)], copy), flush=True)
    except flow.OutOfMemoryError as refused:
        parser.error(f"N = {asked.batch_size} is too large: {refused}")


if __name__ == "__main__":
    main()
