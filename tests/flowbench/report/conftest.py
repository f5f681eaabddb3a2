"""Run documents and comparisons of the situations a report has to cope with, built by hand."""

from __future__ import annotations

import dataclasses

import pytest

from flowbench.cell import Case, Cell
from flowbench.judge import series
from flowbench.judge import verdict as judge
from flowbench.judge.verdict import Verdict
from flowbench.record import gpu, profile, run
from flowbench.record.sample import Memory, RankSample, Sample

MIB = 1024 * 1024
FLOW = run.Engine("flow-eager", "Flow", "framework", "0.1.0")
TORCH = run.Engine("torch-eager", "PyTorch", "torch", "2.14.0")
NHWC = run.Engine("torch-channels-last", "PyTorch-NHWC", "torch", "2.14.0")
CASE = Case("resnet50", (4, 3, 224, 224), "float32", "eager", 1, False, True, True, 2)
PROTOCOL = run.Protocol(2, 1, 2, 2, "ABBA", 1, 0.01, 0.9, 1e-4, 600.0, None)
CPU_BOX = run.Machine("AMD EPYC 9B14", "x86_64", 2, 4, 2, 16 * 1024**3, (), None, "Linux 6.8", "3.11.9")
GPU_BOX = dataclasses.replace(
    CPU_BOX, gpus=(run.Gpu("NVIDIA H200", 140 * 1024**3), run.Gpu("NVIDIA H200", 140 * 1024**3)), gpu_driver="580.65"
)
STEPS = {"flow-eager": 500.0, "torch-eager": 700.0, "torch-channels-last": 550.0}


def batch(size: int, **changes: object) -> Case:
    return dataclasses.replace(CASE, input_shape=(size, 3, 224, 224), **changes)


def rank_sample(engine: str, scale: float, rank: int) -> RankSample:
    allocated = None if engine.startswith("torch") else int(800 * scale * MIB)
    memory = Memory(allocated, allocated, int((1700 if allocated is None else 1100) * scale * MIB), 200 * MIB)
    step = STEPS.get(engine, 600.0) * scale + 10 * rank
    return RankSample(rank, 2, "cpu", (step * 2,), (step, step * 1.02), (6.9, 6.8, 6.7), memory)


def sample(cell: Cell, pair: int, scale: float, status: str = "ok", error: str | None = None) -> Sample:
    ranks = (
        () if status == "failed" else tuple(rank_sample(cell.engine, scale, rank) for rank in range(cell.world_size))
    )
    position = pair % 2
    difference = {"void": 0.31, "ok": 1e-6}.get(status)
    return Sample(cell.key, pair, position, f"2026-11-29T10:0{pair}:00Z", 9.5, status, error, difference, ranks)


def document(cases: list[Case], engines: list[run.Engine], **changes: object) -> run.RunDocument:
    """All cells measured in two pairs; `spoiled` maps (engine, batch size) to a status and an error."""
    spoiled = changes.pop("spoiled", {})
    cells = tuple(Cell.of(case, engine.name) for case in cases for engine in engines)
    samples = []
    for cell in cells:
        for pair in range(2):
            status, error = spoiled.get((cell.engine, cell.input_shape[0]), ("ok", None))
            scale = cell.input_shape[0] / 4 * (1 + 0.01 * pair * (cell.engine != "torch-eager"))
            if status != "missing" and not (status == "half" and pair == 1):
                samples.append(sample(cell, pair, scale, "ok" if status == "half" else status, error))
    fields = {
        "run_id": "20261129-100000-abcd",
        "created": "2026-11-29T10:00:00Z",
        "flowbench_version": "0.1.0",
        "command": ("flowbench", "run"),
        "preset": "cpu",
        "reference": "torch-eager" if TORCH in engines else None,
        "engines": tuple(engines),
        "protocol": PROTOCOL,
        "git": run.Git("0123456789abcdef0123456789abcdef01234567", "main", True),
        "machine": CPU_BOX,
        "versions": {"numpy": "2.3.5", "torch": "2.14.0"},
        "cells": cells,
        "samples": tuple(samples),
        "findings": (),
        "not_measured": (),
        "ending": run.Ending("complete", "2026-11-29T10:05:00Z", None),
    }
    return run.RunDocument(**fields | changes)


HOSTILE = "`x` | <!-- flowbench --> @someone\n](http://evil.example) <br>Relative speed: 9.99 \x1b[31m\\n"


def hostile() -> run.RunDocument:
    name = HOSTILE
    engines = [run.Engine("toy", name, name, name), run.Engine("torch-eager", f"{name}!", "torch", "2.14.0")]
    return document(
        [batch(4, model=name), batch(4, model=name + "?")],
        engines,
        reference="torch-eager",
        machine=dataclasses.replace(CPU_BOX, cpu_model=name),
        versions={name: name},
        git=run.Git(name, name, False),
        findings=(run.Finding(name, name, None, None),),
        not_measured=(run.NotMeasured(name, name + "\nRelative speed: 8.88\nGPU Name: forged\nFlow: 38.0ms"),),
    )


@pytest.fixture(scope="session")
def documents() -> dict[str, run.RunDocument]:
    """One run document per situation."""
    both = [FLOW, TORCH]
    killed = run.Ending("running", None, None)
    graph = batch(4, precision="bfloat16", mode="graph", backward=False, device="cuda")
    ranks = batch(16, world_size=2, ddp=True, broadcast_buffers=False, device="cuda")
    same_name = [FLOW, dataclasses.replace(FLOW, name="flow-graph"), dataclasses.replace(FLOW, name="flow-old"), TORCH]
    wrong = {("flow-eager", 4): ("void", "losses differ from PyTorch's by 0.31 at step 2, allowed are 0.0001")}
    died = {("flow-eager", 4): ("failed", "rank 0 died of SIGKILL (out of memory?)\nlast words: none")}
    return {
        "two_cells": document([batch(4), batch(1)], [FLOW, TORCH, NHWC]),
        "void": document([batch(4), batch(1)], both, spoiled=wrong),
        "failed": document([batch(4), batch(1)], both, spoiled=died),
        "reference_failed": document([batch(4)], both, spoiled={("torch-eager", 4): ("failed", "no memory left")}),
        "no_reference": document(
            [batch(4)], [FLOW], not_measured=(run.NotMeasured("torch-eager", "torch is not installed: pip install torch"),)
        ),
        "nothing_measured": document(
            [batch(4)], both, spoiled={("flow-eager", 4): ("missing", None), ("torch-eager", 4): ("missing", None)}
        ),
        "interrupted": document(
            [batch(4), batch(2), batch(1)], both,
            spoiled={("torch-eager", 2): ("half", None), ("flow-eager", 1): ("missing", None),
                     ("torch-eager", 1): ("missing", None)},
            ending=run.Ending("interrupted", "2026-11-29T10:02:00Z", "Ctrl-C"),
        ),
        "killed": document([batch(4)], both, spoiled={("torch-eager", 4): ("missing", None)}, ending=killed),
        "same_names": document([batch(4), batch(4, threads=1)], same_name),
        "two_ranks": document([ranks, graph], both, machine=GPU_BOX),
        "disturbed": document(
            [batch(4)], both, findings=(run.Finding("load", "another process used 1.4 cores", None, None),), git=None
        ),
        "hostile_names": hostile(),
        "no_cells": document([], both),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a report is made from."""

    document: run.RunDocument
    comparison: judge.ComparisonSet | None = None
    history: tuple[series.Series, ...] = ()


BASE = dataclasses.replace(FLOW, name="flow-eager@base", display_name="Flow@base", side="base")
HEAD = dataclasses.replace(FLOW, name="flow-eager@head", display_name="Flow@head", side="head")
SIDES = judge.SideName("main", "1a2b3c4d5e6f", False), judge.SideName("working tree", "0123456789ab", True)
WHY = {
    Verdict.SLOWER: "the interval lies beyond 1 %, and 10 new pairs agree",
    Verdict.FASTER: "the interval lies beyond 1 %, and 10 new pairs agree",
    Verdict.SAME: "the interval lies within 1 %",
    Verdict.UNCLEAR: "the interval is wider than 1 % after 20 pairs",
    Verdict.LARGER: "larger in every pair, by more than a block of 2 MiB",
    Verdict.SMALLER: "smaller in every pair, by more than a block of 2 MiB",
    Verdict.FAILED: "head: rank 0 died of SIGKILL (out of memory?)",
    Verdict.VOID: "head's losses differ from PyTorch's by 0.31 at step 2, allowed are 0.0001",
    Verdict.LOST: "in main, not in the working tree",
    Verdict.NEW: "not in main",
}
RATIO = {Verdict.SLOWER: 1.052, Verdict.FASTER: 0.931, Verdict.SAME: 1.001, Verdict.UNCLEAR: 1.02,
         Verdict.LARGER: 1.125, Verdict.SMALLER: 0.75}  # fmt: skip


def judged(case: Case, quantity: judge.Quantity, verdict: Verdict, **changes: object) -> judge.Comparison:
    """One comparison; what a verdict of its kind has not is left out."""
    size = case.input_shape[0]
    base = 125.0 * size if quantity.unit == "ms" else float((800 + 50 * size) * MIB)
    ratio = RATIO.get(verdict)
    figures = {}
    if ratio is not None:
        ends = (ratio * 0.992, ratio * 1.008) if quantity.unit == "ms" else (None, None)
        figures = {"base": base, "head": base * ratio, "change": judge.Change(ratio, *ends), "pairs": 10}
        if quantity.unit == "ms":
            figures |= {"base_relative_speed": 1.4, "head_relative_speed": 1.4 / ratio}
            figures |= {"base_relative_interval": (1.36, 1.44), "head_relative_interval": (1.36 / ratio, 1.44 / ratio)}
    words = {"engine": "flow-eager", "label": case.label, "reason": WHY[verdict]}
    return judge.Comparison(case=case, quantity=quantity, verdict=verdict, **words | figures | changes)


TIME, PEAK = judge.Quantity("step time"), judge.Quantity("peak allocated", rank=0)


def compared(
    cases: list[Case], verdicts: dict[int, tuple[Verdict, Verdict | None]], **changes: object
) -> judge.ComparisonSet:
    """A comparison in which each batch size of `verdicts` has its verdict of time and of memory, and all else is the same."""
    comparisons = []
    for case in cases:
        time, memory = verdicts.get(case.input_shape[0], (Verdict.SAME, Verdict.SAME))
        comparisons.append(judged(case, TIME, time))
        if memory is not None:
            comparisons.append(judged(case, PEAK, memory))
    good = [one.change.ratio for one in comparisons if one.change and one.quantity is TIME]
    fields = {
        "base": SIDES[0],
        "head": SIDES[1],
        "comparisons": tuple(comparisons),
        "overall": judge.Overall(sum(good) / len(good) if good else None, len(good), len(cases)),
        "canary": judge.Canary("clear", "main against itself: 1.000 (0.996 - 1.004)"),
        "stopping": "after 10 pairs every interval was narrower than 2 %",
    }
    return judge.ComparisonSet(**fields | changes)


def compared_document(cases: list[Case], **changes: object) -> run.RunDocument:
    """Base, head and PyTorch, on a machine that raised one false alarm in sixty sittings."""
    git = run.Git("1a2b3c4d5e6f1a2b3c4d5e6f1a2b3c4d5e6f1a2b", "main", False)
    sides = run.SidesCompared(
        base=run.Side("main", git), head=run.Side("working tree", run.Git("0" * 40, None, True)), least_margin=0.01,
        least_pairs=6, confirmation_pairs=0, noise_floors={}, stopped={}, aa_sittings=60, aa_alarms=1,
    )  # fmt: skip
    return document(cases, [BASE, HEAD, TORCH], comparison=sides, **changes)


def sitting(sizes: list[int], verdicts: dict[int, tuple[Verdict, Verdict | None]], **changes: object) -> Situation:
    """Base, head and PyTorch measured in one sitting."""
    cases = [batch(size) for size in sizes]
    measured = {key: changes.pop(key) for key in ("spoiled", "machine", "findings") if key in changes}
    return Situation(compared_document(cases, **measured), compared(cases, verdicts, **changes))


def with_few_pairs(made: Situation) -> Situation:
    """Of the first cell head's relative speed says nothing, of the others base's."""
    assert made.comparison is not None
    times = iter([{"head_relative_interval": (0.7, 2.9)}])
    comparisons = tuple(
        dataclasses.replace(one, **next(times, {"base_relative_interval": None})) if one.quantity is TIME else one
        for one in made.comparison.comparisons
    )
    return dataclasses.replace(made, comparison=dataclasses.replace(made.comparison, comparisons=comparisons))


def on_gpus(plain: run.RunDocument, stray: str) -> run.RunDocument:
    """Every rank holds memory on its own GPU; the later ranks of the engine `stray` on the first one's too."""

    def placed(rank: RankSample, engine: str) -> RankSample:
        uses = [gpu.GpuUse(rank.rank, 6000 * MIB)]
        if rank.rank and engine == stray:
            uses.insert(0, gpu.GpuUse(0, 508 * MIB))
        memory = dataclasses.replace(rank.memory, gpu_uses=tuple(uses), gpu_uses_how="asked by process")
        return dataclasses.replace(rank, device=f"cuda:{rank.rank}", memory=memory, host_ms=(11.0, 12.0))

    samples = tuple(
        dataclasses.replace(one, ranks=tuple(placed(rank, plain.by_key[one.cell].engine) for rank in one.ranks))
        for one in plain.samples
    )
    return dataclasses.replace(plain, samples=samples)


def stray_context() -> Situation:
    """Two ranks on two GPUs; head's second rank holds a context on the first one's GPU."""
    case = batch(16, world_size=2, ddp=True, device="cuda")
    grown = judge.Quantity("peak on the GPU", rank=1, gpu=0)
    alike = judge.Quantity("peak on the GPU", rank=1, gpu=1)
    comparisons = (
        judged(case, TIME, Verdict.SAME),
        judged(case, grown, Verdict.LARGER, base=0.0, head=float(508 * MIB), change=None,
               reason="rank 1 holds 508 MiB on GPU 0, where it has nothing to do: a context of its own"),
        judged(case, alike, Verdict.SAME),
    )  # fmt: skip
    measured = on_gpus(compared_document([case], machine=GPU_BOX), stray=HEAD.name)
    return Situation(measured, compared([case], {}, comparisons=comparisons))


def profiled() -> run.RunDocument:
    """A step of Flow, observed op by op."""
    plain = document([batch(4)], [FLOW, TORCH])
    tensors = tuple(
        profile.ProfiledTensor(
            "conv2d", f"float32[4, {64 * 2**layer}, 56, 56]", f"layer{layer + 1}.0.conv1", 3, (90 - 20 * layer) * MIB
        )
        for layer in range(3)
    )
    heights = [200, 340, 480, 610, 800, 640, 420, 210]
    seen = profile.Profile(
        cell=plain.cells[0].key, step_ms=520.0, ops_ms=500.0,
        ops=(profile.ProfiledOp("conv2d_backward", "float32[4, 64, 56, 56]", "layer1.0.conv1", 2, 80.0),),
        peak_bytes=800 * MIB, peak_at_ms=260.0, tensors=tensors,
        timeline=tuple(profile.MemoryPoint(65.0 * index, height * MIB) for index, height in enumerate(heights)),
        missing=("modules of the backward ops: this engine does not keep them",),
    )  # fmt: skip
    return dataclasses.replace(plain, profiles=(seen,))


def explained() -> Situation:
    """One cell slower and larger, both sides profiled: its convolution takes longer, and a tensor is held that was not."""
    made = sitting([4], {4: (Verdict.SLOWER, Verdict.LARGER)})
    conv, extra = (
        ("conv2d", "float32[4, 64, 56, 56]", "layer1.0.conv1"),
        ("relu", "float32[4, 256, 56, 56]", "layer1.0"),
    )

    def seen(cell: Cell, conv_ms: float, held: tuple[tuple[str, str, str], ...]) -> profile.Profile:
        tensors = tuple(profile.ProfiledTensor(*one, 1, 100 * MIB) for one in held)
        ops = (profile.ProfiledOp(*conv, 1, conv_ms), profile.ProfiledOp(*extra, 2, 10.0))
        return profile.Profile(cell=cell.key, step_ms=conv_ms + 440, ops_ms=conv_ms + 10, ops=ops, peak_bytes=len(held) * 100 * MIB,
                               peak_at_ms=1.0, tensors=tensors, timeline=(), missing=())  # fmt: skip

    base, head, _ = made.document.cells
    profiles = (seen(base, 80.0, (conv,)), seen(head, 106.0, (conv, extra)))
    return dataclasses.replace(made, document=dataclasses.replace(made.document, profiles=profiles))


def unexplained() -> Situation:
    """Profiled steps that do not show what was judged: one cell is slower, one as fast and larger, one unclear, one faster."""
    verdicts = {
        16: (Verdict.SLOWER, Verdict.SAME), 8: (Verdict.SAME, Verdict.LARGER), 4: (Verdict.UNCLEAR, Verdict.LARGER),
        2: (Verdict.FASTER, Verdict.LARGER),
    }  # fmt: skip
    made = sitting([*verdicts], verdicts)

    def seen(cell: Cell, step_ms: float, *times_ms: float) -> profile.Profile:
        ops = tuple(profile.ProfiledOp(f"op{place}", "", "", 1, time_ms) for place, time_ms in enumerate(times_ms))
        held = 1 if cell.engine == BASE.name or cell.input_shape[0] in (16, 4) else 2
        tensors = (profile.ProfiledTensor("conv2d", "float32[8, 64, 56, 56]", "conv1", held, held * 100 * MIB),)
        return profile.Profile(cell.key, step_ms, sum(times_ms), ops, 100 * held * MIB, 1.0, tensors, (), ())

    steps_ms = {
        (16, BASE.name): (1900.0, 400.0, 300.0, 200.0, 100.0, 90.0, 10.0),
        (16, HEAD.name): (1890.0, 310.0, 220.0, 130.0, 40.0, 40.0, 12.0),
        (2, BASE.name): (250.0, 100.0, 20.0),
        (2, HEAD.name): (230.0, 70.0, 30.0),
    }
    profiles = tuple(
        seen(
            cell,
            *steps_ms.get((cell.input_shape[0], cell.engine), (900.0, 100.0 if cell.engine == BASE.name else 170.0)),
        )
        for cell in made.document.cells
        if cell.engine != TORCH.name
    )
    return dataclasses.replace(made, document=dataclasses.replace(made.document, profiles=profiles))


def measured_before(cell: Cell) -> series.Series:
    """Twelve runs of a cell, slower by a tenth and a third larger from the seventh on; one of them failed."""
    points = []
    for number in range(12):
        time_ms = 500.0 * (1.1 if number > 5 else 1.0) + number % 3
        peaks = {"peak allocated": (1067 if number > 5 else 800) * MIB}
        failed = number == 3
        figures = (None, None, None, None, {}) if failed else (time_ms, time_ms - 4, time_ms + 4, 1.4, peaks)
        when = f"2026-11-{number + 10}T08:00:00Z"
        points.append(
            series.SeriesPoint(
                when, f"run-{number}", f"{number:x}" * 12, number == 5, "failed" if failed else "ok", *figures
            )
        )
    shifts = (series.Shift(6, "step time", 501.0, 551.0), series.Shift(6, "peak allocated", 800.0 * MIB, 1067.0 * MIB))
    return series.Series(cell.key, cell.label, "AMD EPYC 9B14", False, tuple(points), shifts)


def told_before() -> series.Series:
    """What old comments told; the first has no date."""
    label = "Flow resnet50 [16, 3, 224, 224]"
    times = [(None, 131.2), ("2021-07-01", 128.4), ("2021-09-12", 127.9), ("2022-02-03", 128.3)]
    points = tuple(
        series.SeriesPoint(when, "comment", None, False, "ok", time, None, None, 1.1) for when, time in times
    )
    return series.Series(label, label, "NVIDIA GeForce GTX 1080", True, points)


def hostile_comparison(name: str) -> judge.ComparisonSet:
    case = batch(4, model=name)
    bad = {"label": name, "engine": name, "reason": name, "tags": (name,)}
    sides = judge.SideName(name, name, True)
    comparisons = (judged(case, TIME, Verdict.SLOWER, **bad), judged(case, PEAK, Verdict.FAILED, **bad))
    limit = judge.LimitResult(name, name, name, 1.0, 2.0, False, 1, name)
    return compared([case], {}, comparisons=comparisons, base=sides, head=sides, stopping=name, limits=(limit,),
                    canary=judge.Canary("not measured", name), not_measured=(run.NotMeasured(name, name),))  # fmt: skip


@pytest.fixture(scope="session")
def situations(documents: dict[str, run.RunDocument], many: run.RunDocument) -> dict[str, Situation]:
    """What each report has to cope with: single runs, and base against head."""
    same, slower, faster, unclear = Verdict.SAME, Verdict.SLOWER, Verdict.FASTER, Verdict.UNCLEAR
    sizes = [16, 8, 4, 2, 1]
    died = "rank 0 died of SIGKILL (out of memory?)\nlast words: none"
    wrong = "losses differ from PyTorch's by 0.31 at step 2, allowed are 0.0001"
    stuck = "rank 1 hangs: no progress for 600 s in step 3"
    flagged = judge.Canary("flagged", "main against itself: 1.034 (1.021 - 1.047), beyond 1 %")
    told = {name: Situation(made) for name, made in documents.items()}
    return told | {
        "all_same": sitting(sizes, {}),
        "slower": sitting(sizes, {16: (slower, same), 8: (slower, same), 1: (unclear, same)}),
        "faster": sitting(sizes, {16: (faster, Verdict.SMALLER), 8: (faster, same)}),
        "memory_grew": sitting(sizes, {4: (same, Verdict.LARGER)}),
        "void": sitting([4, 1], {4: (Verdict.VOID, None)}, spoiled={("flow-eager@head", 4): ("void", wrong)}),
        "failed": sitting([4, 1], {4: (Verdict.FAILED, None)}, spoiled={("flow-eager@head", 4): ("failed", died)}),
        "hung": sitting([4, 1], {4: (Verdict.FAILED, None)}, spoiled={("flow-eager@head", 4): ("failed", stuck)}),
        "no_baseline": sitting([4, 1], {4: (Verdict.NEW, Verdict.NEW), 1: (Verdict.NEW, Verdict.NEW)}),
        "other_machine": sitting(
            [4, 1], {4: (unclear, unclear), 1: (unclear, unclear)}, interleaved=False,
            differences=("cpu_model: Intel Xeon / AMD EPYC 9B14", "usable_cores: 8 / 2"),
            canary=judge.Canary("not measured", "two sittings have none"),
        ),
        "nothing_measured": Situation(documents["nothing_measured"]),
        "unclear": with_few_pairs(sitting(
            [4, 1], {4: (unclear, same), 1: (unclear, same)},
            findings=tuple(
                run.Finding("other load", f"other processes used {cores} of 2 cores", None, None) for cores in (1.6, 1.6, 0.3, 1.6)
            ),
        )),
        "canary_flagged": sitting([4, 1], {4: (unclear, same), 1: (unclear, same)}, canary=flagged),
        "one_cell": sitting([4], {4: (slower, Verdict.LARGER)}),
        "five_hundred_cells": Situation(many, compared(list(many.cases), {3: (slower, same), 5: (same, Verdict.LARGER)})),
        "hostile_names": Situation(documents["hostile_names"], hostile_comparison(HOSTILE)),
        "no_gpu": Situation(documents["two_cells"]),
        "stray_context": stray_context(),
        "profiled": Situation(profiled()),
        "explained": explained(),
        "unexplained": unexplained(),
        "with_history": Situation(
            documents["two_cells"], history=(measured_before(documents["two_cells"].cells[0]), told_before())
        ),
        "old_comments_only": Situation(documents["two_cells"], history=(told_before(),)),
        "many_models": Situation(
            document(
                [batch(size, model=model, world_size=world, ddp=world > 1) for model in ("resnet18", "resnet50") for world in (1, 2)
                 for size in (1, 2)], [FLOW, TORCH],
            )
        ),
        "lost": sitting([4, 2, 1], {2: (Verdict.LOST, Verdict.LOST), 1: (Verdict.NEW, Verdict.NEW)}),
    }  # fmt: skip


@pytest.fixture(scope="session")
def many() -> run.RunDocument:
    """Five hundred cells."""
    return document([batch(size) for size in range(1, 251)], [FLOW, TORCH])
