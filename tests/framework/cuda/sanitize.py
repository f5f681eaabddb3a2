"""Runs the own CUDA kernels under compute-sanitizer: `python -m tests.framework.cuda.sanitize [--seconds N]`.

memcheck and racecheck run at the same time, each over the cases of the generic kernel check and over the tests of the own
kernels. Every block comes from the driver alone, so that memcheck sees where it ends. Prints a line for each run; the exit status
is 1 where one of them found something, 2 where none could run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import framework as flow
from framework.dtype import bfloat16, float32, float64
from framework.kernels import cuda as own
from framework.kernels.cuda import compiler, normalization_plans, normalization_sum, space_to_depth
from framework.vm import CachingAllocator, machine, runtime
from tests.framework.kernels import check

TOOLS = ("memcheck", "racecheck")
FOUND = 9  # what the sanitizer exits with where it found something
# Those of cuDNN and cuBLAS, and those that are drawn: the check of values is not for them.
LEFT_OUT = (
    "conv2d", "conv2d_backward_input", "conv2d_backward_weight", "matmul", "linear", "linear_backward",
    "random_uniform", "random_normal",
)  # fmt: skip
OWN_TESTS = "one_launch or no_class or many_tensors or odd_address"
PROCESSES = 12  # that compile at the same time
SOURCES = Path(own.__file__).parent


def main() -> int:
    """Compiles everything, then runs all tools at once; see above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long each run over the cases goes on")
    parser.add_argument("--inside", metavar="I/N", help="only run every N-th case from the I-th on, without a tool")
    options = parser.parse_args()
    if options.inside:
        first, step = map(int, options.inside.split("/"))
        return _inside(first, step, options.seconds)
    reason, tool = flow.cuda.why(), _find()
    if reason is not None:
        print(f"SKIP {reason}")
        return 2
    if tool is None:
        print(
            "SKIP compute-sanitizer is not here: it comes with the CUDA toolkit (or `pip install nvidia-cuda-sanitizer-api`)"
        )
        return 2
    cases = [sys.executable, "-m", "tests.framework.cuda.sanitize", "--seconds", str(options.seconds), "--inside"]
    for compiling in [
        subprocess.Popen([*cases, f"{i}/{PROCESSES}"], stdout=subprocess.DEVNULL) for i in range(PROCESSES)
    ]:
        compiling.wait()
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "tests/framework/cuda/test_own_kernels.py", "-k", OWN_TESTS]
    works = {"cases": [*cases, "0/1"], "tests": tests}
    under_way = []
    for name in TOOLS:
        for what, command in works.items():
            log = tempfile.TemporaryFile()  # noqa: SIM115 - read below
            under = [tool, "--tool", name, "--error-exitcode", str(FOUND), "--print-limit", "10", *command]
            under_way.append((f"{name} {what}", log, subprocess.Popen(under, stdout=log, stderr=subprocess.STDOUT)))
    failed = False
    for title, log, process in under_way:
        status = process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()
        said = [line for line in lines if re.search(r"SUMMARY|kernels ran|passed|failed|skipped|Error", line)]
        print(f"{'PASS' if status == 0 else 'FAIL'} {title}: {' | '.join(line.strip() for line in said[-3:])}")
        if status != 0:
            failed = True
            print("\n".join(lines[-60:]))
    return int(failed)


def _find() -> str | None:
    """Where compute-sanitizer lies: on the path, in a toolkit, or in a wheel."""
    folders = [
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")),
        *Path("/usr/local").glob("cuda*"),
        *Path("/opt").glob("cuda*"),
    ]
    wheels = [Path(entry) / "nvidia" for entry in sys.path]
    found = shutil.which("compute-sanitizer")
    places = [*(folder / "bin" for folder in folders), *(place for wheel in wheels for place in wheel.glob("*/bin"))]
    places += [folder / "compute-sanitizer" for folder in folders]
    return found or next((str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").is_file()), None)


def _inside(first: int, step: int, seconds: float) -> int:
    """Runs cases, each kernel's next one in turn, until the time is up."""
    device = flow.device("cuda")
    kernels = runtime(device)
    ran: set[tuple[str, str]] = set()
    function = compiler.function

    def noted(device: flow.device, file: str, name: str, **definitions: Any) -> compiler.Function:
        ran.add((file, name))
        return function(device, file, name, **definitions)

    compiler.function = noted
    # Every block a piece of the driver's memory of just its size.
    CachingAllocator._take = lambda self, nbytes, frugal=False: self._whole_segment(max(nbytes, 1))  # type: ignore[method-assign]
    until, count = time.monotonic() + seconds, 0
    for small_rows in (normalization_plans._SMALL_ROWS, 0):
        # Without the one-launch kernels the second time, in half of the time that is left.
        normalization_plans._SMALL_ROWS = small_rows
        for plan in (*vars(normalization_plans).values(), *vars(normalization_sum).values()):
            if hasattr(plan, "cache_clear"):
                plan.cache_clear()
        _run_others()
        now = time.monotonic()
        end = now + (until - now) * (2 / 3 if small_rows else 1)
        for name, case, dtype in _in_turn("batch_norm" if not small_rows else "", first, step):
            if time.monotonic() > end:
                break
            epsilon = 2.0**-8 if dtype is bfloat16 else None
            check.kernel(device, kernels.table, name, case, dtype, epsilon=epsilon)
            count += 1
    machine.synchronize()
    missing = sorted(_all_kernels() - ran)
    print(
        f"{count} cases, {len(ran)} of {len(_all_kernels())} kernels ran; not: {', '.join(map('/'.join, missing)) or 'none'}"
    )
    return 0


def _in_turn(prefix: str, first: int, step: int) -> Iterator[tuple[Any, ...]]:
    """The cases of the own kernels whose names begin so: of each kernel and element type the first, then the second, and so on."""
    queues: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for parameter in check.all_cases(dtypes=(float32, bfloat16, float64))[first::step]:
        name, _, dtype = parameter.values
        if name.startswith(prefix) and name not in LEFT_OUT:
            queues.setdefault((name, dtype.name), []).append(parameter.values)
    while queues:
        for key, queue in list(queues.items()):
            yield queue.pop(0)
            if not queue:
                del queues[key]


def _run_others() -> None:
    """What the cases leave out: the folding of images for a first convolution, and random numbers."""
    kernels = runtime(flow.device("cuda"))
    for draw in (flow.rand, flow.randn):
        for count in (1, 1001):
            draw(count, device="cuda")
    x, weight = flow.randn(2, 3, 33, 31, device="cuda").array, flow.randn(8, 3, 7, 7, device="cuda").array
    y = kernels.empty((2, 8, 17, 16), float32)
    fold = space_to_depth.Fold.of(x.shape, weight.shape, y.shape, _Geometry(), float32)
    fold.images(x)
    fold.unfold_weights(weight, fold.weights(weight))


class _Geometry:
    """Of a ResNet's first convolution."""

    stride, padding, dilation, groups = (2, 2), (3, 3), (1, 1), 1


def _all_kernels() -> set[tuple[str, str]]:
    """(file, name) of every kernel in the sources, those that macros make too."""
    found = set()
    for path in sorted(SOURCES.glob("*.cu")):
        text = path.read_text()
        names = re.findall(r"^KERNEL (\w+)\(", text, re.MULTILINE)
        makers = re.findall(r"#define (\w+)\(NAME,.*\\\n *(?:CLUSTER_)?KERNEL NAME\(", text)
        names += [name for maker in makers for name in re.findall(rf"^{maker}\((\w+),", text, re.MULTILINE)]
        found |= {(path.name, name) for name in names}
    return found


if __name__ == "__main__":
    sys.exit(main())
