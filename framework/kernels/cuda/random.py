"""Random numbers in CUDA C++, the same as the reference kernels draw."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import compiler, launch
from framework.kernels.cuda.geometry import Shape, Walk
from framework.kernels.table import kernel
from framework.vm.array import Array


@kernel(outputs=1)
def random_uniform(out: Array, *, seed: int, offset: int, low: float, high: float) -> None:
    """As the reference kernel of the same name."""
    _draw("random_uniform", out, seed, offset, low, high)


@kernel(outputs=1)
def random_normal(out: Array, *, seed: int, offset: int, mean: float, std: float) -> None:
    """As the reference kernel of the same name."""
    _draw("random_normal", out, seed, offset, mean, std)


def _draw(name: str, out: Array, seed: int, offset: int, first: float, second: float) -> None:
    device = out.storage.device
    if out.size:
        run = _plan(device, name, out.dtype, out.shape, out.stride)
        run(launch.stream(device), out.ptr, seed, offset, first, second)


@lru_cache(maxsize=1024)
def _plan(device: Device, name: str, dtype: DType, shape: Shape, stride: Shape) -> Callable[..., None]:
    count = 1
    for extent in shape:
        count *= extent
    # In row-major order whatever the layout: which number an element gets depends on its place alone.
    kept = [i for i, extent in enumerate(shape) if extent != 1]
    steps = Walk(tuple([shape[i] for i in kept]), (tuple([stride[i] for i in kept]),))
    return launch.prepare(
        compiler.function(device, "random.cu", name, TYPE=compiler.cxx(dtype)),
        (launch.blocks(device, -(-count // 4)), 1),
        "3Q2d",
        f"q{steps.code()}",
        (count, *steps.values()),
    )
