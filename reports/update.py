"""Makes what is made from run documents: the texts beside each one, and the tables and quotations of pages, between two marks.

    python reports/update.py            writes them
    python reports/update.py --check    says which are not as they would be written, and exits 1

The pages are README and those that lie in `reports/`. A table stands between `<!-- figures: FOLDER -->` and
`<!-- end of figures -->`: that of every document in the folder. Between `<!-- speed stats: FOLDER -->` and
`<!-- end of speed stats -->` stands how the folder's first Speed stats text begins.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, from a checkout that is not installed

from flowbench.cell import Case, Cell  # noqa: E402
from flowbench.judge.compare import judge_document  # noqa: E402
from flowbench.judge.pairs import matched_samples, ratio_of  # noqa: E402
from flowbench.judge.stats import process_median  # noqa: E402
from flowbench.record.document import read_document  # noqa: E402
from flowbench.record.run import RunDocument  # noqa: E402
from flowbench.record.sample import Sample  # noqa: E402
from flowbench.report import render  # noqa: E402
from flowbench.report.words import range_of_pairs  # noqa: E402

SUBJECT = "flow-eager"
TEXTS = ((".txt", "speed-stats"), (".md", "markdown"))
MARKED = re.compile(r"(<!-- figures: (\S+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
QUOTED = re.compile(r"(<!-- speed stats: (\S+) -->\n)(.*?)(<!-- end of speed stats -->)", re.DOTALL)
MIB = 2**20
# What the memory of a step is judged by, with its field of the run document.
MEMORY = {"peak resident": "resident_peak_bytes"}
GPU_MEMORY = {"peak allocated": "allocated_peak_bytes", "peak reserved": "reserved_peak_bytes"}


def main(arguments: list[str]) -> int:
    """Write, or with `--check` name, what is not as it would be written."""
    stale = {path: text for path, text in wanted(ROOT).items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'not up to date' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.write_text(text)
    return 1 if stale and "--check" in arguments else 0


def wanted(root: Path) -> dict[Path, str]:
    """Every file that is made from run documents, and its text."""
    texts: dict[Path, str] = {}
    for path in documents(root / "reports"):
        document = read_document(path)
        verdicts = judge_document(document) if document.comparison else None
        texts |= {path.with_suffix(suffix): render(document, form, comparison=verdicts) for suffix, form in TEXTS}
    for page in (root / "README.md", *sorted((root / "reports").glob("*.md"))):
        made = MARKED.sub(
            lambda found, page=page: found[1] + figures(root, found[2], page) + found[4], page.read_text()
        )
        texts[page] = QUOTED.sub(lambda found: found[1] + quotation(root / found[2]) + found[4], made)
    return texts


def documents(folder: Path) -> list[Path]:
    """The run documents below a folder of reports, but for those that were only just measured (`out/`)."""
    return sorted(path for path in folder.rglob("*.json") if "out" not in path.relative_to(folder).parts)


def figures(root: Path, name: str, page: Path) -> str:
    """The tables of the documents in folder `name`, each above a link from `page` to its document; empty without one."""
    folder, tables = root / name, []
    for path in documents(folder) if folder.is_dir() else []:
        link = Path(os.path.relpath(path, page.parent)).as_posix()
        source = f"From [{path.stem}]({link}), {device(read_document(path))}."
        tables.append("\n".join([*table(read_document(path)), "", source]))
    return "\n\n".join(tables) + "\n" if tables else ""


def quotation(folder: Path) -> str:
    """The names and the first case of the Speed stats text of the folder's first document."""
    names, first, *_ = render(read_document(documents(folder)[0]), "speed-stats").split("\n\n")
    return f"```\n{names}\n\n{first.rstrip()}\n```\n"


def device(document: RunDocument) -> str:
    """What was measured on, in a few words."""
    machine = document.machine
    if document.on_gpu:
        return f"{machine.gpus[0].name}, driver {machine.gpu_driver}"
    return f"{machine.cpu_model}, {document.protocol.threads} threads"


def table(document: RunDocument) -> Iterator[str]:
    """Flow's figures at every case beside those of each other engine: times, relative speeds, peaks of memory."""
    others = [engine for engine in document.engines if engine.name != SUBJECT]
    others.sort(key=lambda engine: engine.name != document.reference)
    # Flow's figure and the reference's stand in one column.
    names = {engine.name: engine.display_name for engine in document.engines}
    both = " / ".join(names.get(str(name), "-") for name in (SUBJECT, document.reference))
    host = [f"host, ms: {both}"] if document.on_gpu else []
    kinds = GPU_MEMORY if document.on_gpu else MEMORY
    heads = ["N" if differ_in_size_alone(document.cases) else "case", "Flow, ms", *host]
    for engine in others:
        heads += [f"{engine.display_name}, ms", f"speed relative to {engine.display_name} (pairs)"]
    heads += [f"{kind}, MiB: {both}" for kind in kinds]
    yield row(heads)
    yield "|" + "--:|" * len(heads)
    for case in document.cases:
        own = Cell.of(case, SUBJECT)
        cells = [case_name(case, document.cases), time_of(document, own)]
        cells += (
            [pair_of(host_ms(document, Cell.of(case, name)) for name in (SUBJECT, document.reference))] if host else []
        )
        for engine in others:
            other = Cell.of(case, engine.name)
            cells += [time_of(document, other), speed(document, other, own)]
        cells += [memory(document, case, field) for field in kinds.values()]
        yield row(cells)


def time_of(document: RunDocument, cell: Cell) -> str:
    """The median of the processes' medians, or what became of the cell."""
    samples = document.samples_of(cell)
    bad = [sample.status for sample in samples if sample.status != "ok"]
    if bad or not samples:
        return bad[0] if bad else "-"
    return digits(statistics.median(process_median(sample.steps_ms) for sample in samples))


def speed(document: RunDocument, other: Cell, own: Cell) -> str:
    """How many times the other's speed Flow runs at, with the lowest and the highest pair."""
    if any(sample.status != "ok" for cell in (other, own) for sample in document.samples_of(cell)):
        return "-"
    pairs = matched_samples(document, other, own)
    if not pairs:
        return "-"
    ratio = ratio_of(pairs)
    return f"{ratio.geometric_mean:.2f} ({range_of_pairs(ratio)})"


def host_ms(document: RunDocument, cell: Cell) -> float | None:
    """The host's time of a step: the median of the processes' medians, each its slowest rank's."""
    slowest = [
        max(statistics.median(rank.host_ms) for rank in sample.ranks if rank.host_ms)
        for sample in good(document, cell)
        if any(rank.host_ms for rank in sample.ranks)
    ]
    return statistics.median(slowest) if slowest else None


def memory(document: RunDocument, case: Case, field: str) -> str:
    """Flow's peak beside the reference's, each of its largest rank in any process, and their ratio."""
    peaks = []
    for name in (SUBJECT, document.reference):
        ranks = [rank.memory for sample in good(document, Cell.of(case, name)) for rank in sample.ranks]
        peaks.append(max((size for size in (getattr(each, field) for each in ranks) if size is not None), default=None))
    own, other = peaks
    if own is None or other is None:
        return "-"
    return f"{own / MIB:.0f} / {other / MIB:.0f}: {own / other:.2f}"


def good(document: RunDocument, cell: Cell) -> list[Sample]:
    """The samples that count; none where one is bad."""
    samples = document.samples_of(cell)
    return list(samples) if all(sample.status == "ok" for sample in samples) else []


def pair_of(figures_ms: Iterable[float | None]) -> str:
    """Flow's figure and the reference's."""
    return " / ".join("-" if figure is None else digits(figure) for figure in figures_ms)


def case_name(case: Case, cases: Sequence[Case]) -> str:
    """The batch size, where that is all in which the cases differ."""
    return str(case.input_shape[0]) if differ_in_size_alone(cases) else case.label


def differ_in_size_alone(cases: Sequence[Case]) -> bool:
    """Whether a batch size says which case it is."""
    return len({replace(each, input_shape=(0, *each.input_shape[1:])) for each in cases}) == 1


def digits(time_ms: float) -> str:
    """A time with three digits."""
    return f"{time_ms:.0f}" if time_ms >= 100 else f"{time_ms:.1f}" if time_ms >= 10 else f"{time_ms:.2f}"


def row(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
