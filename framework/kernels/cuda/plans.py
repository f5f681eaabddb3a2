"""Which algorithm serves a convolution: the libraries' heuristics name some, the first few are timed, the best is kept.

What was found is kept in memory, and on disk for later processes with the same device and libraries.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, replace
from time import perf_counter

from framework.device import Device
from framework.kernels.cuda import cublas, cudnn, disk, pointwise
from framework.kernels.cuda.cudnn import CudnnError, Descriptor
from framework.kernels.cuda.library import LibraryError
from framework.kernels.cuda.plan import Plan
from framework.kernels.cuda.problem import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Problem,
    Settings,
    workspace_limit,
)
from framework.vm import OutOfMemoryError, borrowed, cuda, launch_groups
from framework.vm.array import channels_last_stride
from framework.vm.capture import captured

# For each kind: the operation's descriptor in cuDNN, and its attributes for convolution, x, weight, y, alpha and beta.
_OPERATIONS = {
    FORWARD: (10, (702, 704, 703, 705), (700, 701)),
    BACKWARD_INPUT: (12, (708, 710, 709, 711), (706, 707)),
    BACKWARD_WEIGHT: (11, (714, 716, 715, 717), (712, 713)),
}
_CROSS_CORRELATION = 1
_HEURISTICS_A, _HEURISTICS_FALLBACK = 3, 2
_MOST_SUGGESTIONS = 32
# Numerical notes of engines.
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC = 0, 1, 4
_COMPILES_AT_RUN_TIME = 0
_MOST_PIECES = 16
_TIMED_RUNS = 5
_KIND_ON_DISK = "convolution-plans-3"


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm. In several `pieces`, the batch is cut into as many equal parts, whose results are added up."""

    plan: Plan
    pieces: int = 1


def choose(problem: Problem, wanted: Settings, device: Device, addresses: tuple[int, int, int]) -> Choice:
    """The algorithm for `problem`: from disk, or by timing on the operands at `addresses`, whose output it overwrites.

    Raises RuntimeError where cuDNN has none.
    """
    handle = cudnn.handle(device)
    key = _key(problem, wanted, device)
    known = _from_disk(key, problem, wanted, device)
    if known is not None:
        return known
    if cuda.is_capturing(device):
        # Nothing can be timed now; cuDNN's first suggestion is seldom far from the best.
        return Choice(_suggestions(handle, problem, replace(wanted, timed_plans=1))[0][0])
    plans, first_fits = _suggestions(handle, problem, wanted)
    choices = [Choice(plan) for plan in plans]
    if not first_fits and problem.kind == BACKWARD_WEIGHT:
        choices += _in_pieces(handle, problem, wanted)
    if pointwise.applies(problem, wanted):
        choices += [Choice(plan) for plan in pointwise.suggestions(problem, wanted, device)]
    best, is_of_all = _fastest(choices, device, addresses) if len(choices) > 1 else (choices[0], True)
    if is_of_all:
        entry = {"library": best.plan.library, "pieces": best.pieces, "plan": best.plan.text().decode("latin-1")}
        disk.write(_KIND_ON_DISK, key, json.dumps(entry).encode())
    return best


def _fastest(choices: list[Choice], device: Device, addresses: tuple[int, int, int]) -> tuple[Choice, bool]:
    """The fastest of those whose scratch memory can be had now, and whether these are all.

    Raises OutOfMemoryError where there are none.
    """
    fitting = choices
    while True:
        most_bytes = max(choice.plan.workspace_bytes for choice in fitting)
        try:
            # The scratch memory of plans that are not taken must have no place among that of the steps to come.
            with borrowed(device, most_bytes) as scratch:
                best = _fastest_in(scratch, fitting, addresses)
            return best, fitting is choices
        except OutOfMemoryError:
            fitting = [choice for choice in fitting if choice.plan.workspace_bytes < most_bytes]
            if not fitting:
                raise


def _fastest_in(scratch: int, choices: list[Choice], addresses: tuple[int, int, int]) -> Choice:
    """The fastest, without those that their library refuses to run after all. Raises LibraryError where that is all."""
    times: list[tuple[float, Choice]] = []
    refused: LibraryError | None = None
    for choice in choices:
        try:
            times.append((_time(choice.plan, addresses, scratch) * choice.pieces, choice))
        except LibraryError as error:
            refused = error
    if refused is not None and not times:
        raise refused
    return min(times, key=lambda timed: timed[0])[1]


def _in_pieces(handle: cudnn.Handle, problem: Problem, wanted: Settings) -> list[Choice]:
    """The largest pieces of the batch whose first suggestion fits the workspace, if there are any.

    For some shapes only an algorithm with a large workspace is fast, and it grows with the batch.
    """
    batch = problem.x[0]
    for pieces in range(2, min(batch, _MOST_PIECES) + 1):
        if batch % pieces == 0:
            part = replace(problem, x=(batch // pieces, *problem.x[1:]), y=(batch // pieces, *problem.y[1:]))
            plans, first_fits = _suggestions(handle, part, replace(wanted, timed_plans=1))
            if first_fits:
                return [Choice(plans[0], pieces)]
    return []


def _suggestions(handle: cudnn.Handle, problem: Problem, wanted: Settings) -> tuple[list[cudnn.Plan], bool]:
    """cuDNN's first plans, up to `timed_plans`, and whether none before the first was too large for the workspace."""
    graph = _graph(handle, problem)
    most = workspace_limit(problem, wanted)
    plans: list[cudnn.Plan] = []
    larger: cudnn.Plan | None = None
    first_fits = True
    refused: CudnnError | None = None
    for mode in (_HEURISTICS_A, _HEURISTICS_FALLBACK):
        for config in _configurations(graph, mode):
            if not _is_allowed(config, problem, wanted):
                continue
            try:
                plan = cudnn.Plan.of_config(handle, config)
            except CudnnError as error:
                # The heuristics also name engines that do not serve the shape; the next one may.
                refused = error
                continue
            if plan.workspace_bytes > most:
                first_fits = first_fits and bool(plans)
                if plan.workspace_bytes <= wanted.workspace_bytes:
                    larger = larger or plan
                continue
            plans.append(plan)
            if len(plans) >= wanted.timed_plans:
                return plans, first_fits
        if plans:
            return plans, first_fits
    if larger is not None:
        return [larger], True
    raise RuntimeError(
        f"cuDNN {cudnn.version()} has no algorithm for {problem} under {wanted}; convert to float32, raise"
        " flow.backends.cudnn.workspace_bytes, or allow more of flow.backends"
    ) from refused


def _graph(handle: cudnn.Handle, problem: Problem) -> Descriptor:
    """The convolution as cuDNN's operation graph."""
    precise = problem.dtype == "float64"
    convolution = (
        Descriptor(cudnn.CONVOLUTION)
        .set(100, cudnn.DATA_TYPE, cudnn.DATA_TYPES["float64" if precise else "float32"])
        .set(101, cudnn.MODE, _CROSS_CORRELATION)
        .set(106, cudnn.INT64, 2)
        .set(102, cudnn.INT64, *problem.dilation)
        .set(103, cudnn.INT64, *problem.stride)
        .set(104, cudnn.INT64, *problem.padding)
        .set(105, cudnn.INT64, *problem.padding)
        .finalize()
    )
    kind, (at_convolution, *at_operands), (alpha, beta) = _OPERATIONS[problem.kind]
    operation = Descriptor(kind).set(at_convolution, cudnn.DESCRIPTOR, convolution)
    for name, at, shape in zip(("x", "weight", "y"), at_operands, (problem.x, problem.weight, problem.y), strict=True):
        stride = channels_last_stride(shape)
        operation.set(at, cudnn.DESCRIPTOR, cudnn.tensor(name, problem.dtype, shape, stride))
    scalar = cudnn.DOUBLE if precise else cudnn.FLOAT
    operation.set(alpha, scalar, 1.0).set(beta, scalar, 0.0).finalize()
    graph = Descriptor(cudnn.OPERATION_GRAPH).set(800, cudnn.HANDLE, handle.pointer.value)
    return graph.set(801, cudnn.DESCRIPTOR, operation).finalize()


def _configurations(graph: Descriptor, mode: int) -> list[Descriptor]:
    """What cuDNN's heuristics suggest for a graph, best first."""
    heuristics = Descriptor(cudnn.HEURISTICS).set(201, cudnn.DESCRIPTOR, graph).set(200, cudnn.HEURISTIC_MODE, mode)
    try:
        heuristics.finalize()
    except CudnnError as refused:
        if refused.status // 1000 == 3:  # not supported: this mode knows nothing of such a graph
            return []
        raise
    return heuristics.get_descriptors(202, cudnn.ENGINE_CONFIG, _MOST_SUGGESTIONS)


def _is_allowed(config: Descriptor, problem: Problem, wanted: Settings) -> bool:
    engine = config.get_descriptors(300, cudnn.ENGINE, 1)[0]
    notes = engine.get(1303, cudnn.NUMERICAL_NOTE, 16)
    if wanted.deterministic and _NONDETERMINISTIC in notes:
        return False
    if problem.dtype == "float32" and (_DOWN_CONVERT in notes or (not wanted.allow_tf32 and _TENSOR_CORE in notes)):
        return False
    # Compiling takes seconds, and these engines are made for fused graphs.
    return _COMPILES_AT_RUN_TIME not in engine.get(1305, cudnn.BEHAVIOR_NOTE, 16)


def _time(plan: Plan, addresses: tuple[int, int, int], scratch: int) -> float:
    """Milliseconds of one run: the device's, or the host's to issue it, whichever is longer. Nothing runs afterwards.

    The device's is that of runs replayed as a graph, where the host does not hold it up.
    """
    runtime = cuda.api()
    stream = cuda.stream_pointer(plan.device)
    with plan.working_in(scratch):
        plan.run(*addresses)  # loads what has to be loaded, which cannot be captured
        runtime.streamSynchronize(stream)
        issuing = []
        for _ in range(_TIMED_RUNS):
            start = perf_counter()
            plan.run(*addresses)
            issuing.append(perf_counter() - start)
        return max(1000 * min(issuing), _replayed(plan, addresses, stream))


def _replayed(plan: Plan, addresses: tuple[int, int, int], stream: int) -> float:
    """Milliseconds of one run in a graph."""
    runtime = cuda.api()

    def issue() -> None:
        for _ in range(_TIMED_RUNS):
            plan.run(*addresses)

    # What another thread put on the stream meanwhile would be recorded, and run as often as the graph.
    with launch_groups.alone_on(stream), captured(runtime, stream, issue) as graph:
        executable = runtime.graphInstantiate(graph)
    start, stop = runtime.eventCreate(), runtime.eventCreate()
    runtime.graphLaunch(executable, stream)
    runtime.eventRecord(start, stream)
    runtime.graphLaunch(executable, stream)
    runtime.eventRecord(stop, stream)
    runtime.eventSynchronize(stop)
    elapsed = runtime.eventElapsedTime(start, stop) / _TIMED_RUNS
    runtime.eventDestroy(start)
    runtime.eventDestroy(stop)
    runtime.graphExecDestroy(executable)
    return float(elapsed)


def _key(problem: Problem, wanted: Settings, device: Device) -> str:
    """What a choice depends on, in words."""
    runtime = cuda.api()
    properties = runtime.getDeviceProperties(device.index)
    capability = f"{properties['major']}.{properties['minor']}"
    return repr(
        (
            astuple(problem),
            astuple(wanted),
            properties["name"],
            capability,
            properties["multiProcessorCount"],
            cudnn.version(),
            cublas.version() if pointwise.applies(problem, wanted) else None,
            runtime.driverGetVersion(),
        )
    )


def _from_disk(key: str, problem: Problem, wanted: Settings, device: Device) -> Choice | None:
    kept = disk.read(_KIND_ON_DISK, key)
    if kept is None:
        return None
    try:
        entry = json.loads(kept)
        text = entry["plan"].encode("latin-1")
        if entry["library"] == pointwise.Plan.library:
            return Choice(pointwise.Plan.of_text(problem, wanted, device, text))
        return Choice(cudnn.Plan.of_text(cudnn.handle(device), text), entry["pieces"])
    except (ValueError, KeyError, TypeError, LibraryError):
        # Cut off or of another build: it is found again and written anew.
        return None
