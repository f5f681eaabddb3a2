"""The part of the pytest plugin for single operations: two sides, each in a process of its own, in turn in one sitting.

A test names two sides as `flowbench.operation` describes them, the subject first, and compares one operation of theirs:

    SIDES = {"Flow": "suites.flow_operations", "PyTorch": "suites.torch_operations"}

    def test_relu(side_by_side):
        side_by_side(SIDES, "relu", {"size": 1000}, tolerance=1e-6)

The processes live until pytest ends. A table at the end has a row for each comparison; they are also kept as lines of
JSON beside the run documents, as they come. Times of one pair of processes say where time goes; they are no verdict.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flowbench.errors import FlowbenchError

if TYPE_CHECKING:
    from flowbench.measure.operations import Sides
    from flowbench.record.operations import Comparison

DEFAULT_ROUNDS = 4


class Operations:
    """All comparisons of this run of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._sides: dict[tuple[tuple[str, str], ...], Sides] = {}
        self._comparisons: list[Comparison] = []
        self._file: Path | None = None

    @property
    def device(self) -> str:
        """`--flowbench-device`, or cuda where a GPU answers and cpu elsewhere."""
        from flowbench.record.machine import read_machine

        asked = self._config.getoption("flowbench_device")
        return str(asked or ("cuda" if read_machine().gpus else "cpu"))

    def compare(self, sides: Mapping[str, str], operation: str, arguments: Mapping[str, Any], **how: Any) -> Comparison:
        """Measures one operation by two sides; the test fails where one of them does or their results differ."""
        rounds = self._config.getoption("flowbench_pairs") or DEFAULT_ROUNDS
        try:
            comparison = self._sides_of(sides).compare(operation, arguments, rounds=rounds, **how)
            self._keep(comparison)
        except FlowbenchError as error:
            pytest.fail(str(error), pytrace=False)
        self._comparisons.append(comparison)
        return comparison

    def _sides_of(self, sides: Mapping[str, str]) -> Sides:
        from datetime import UTC, datetime

        from flowbench.measure.operations import Sides
        from flowbench.record.machine import default_threads, read_machine
        from flowbench.record.store import new_run_id

        key = tuple(sides.items())
        if key not in self._sides:
            threads = self._config.getoption("flowbench_threads") or default_threads(read_machine())
            self._sides[key] = Sides(sides, self.device, threads, new_run_id(datetime.now(UTC)))
        return self._sides[key]

    def _keep(self, comparison: Comparison) -> None:
        from datetime import UTC, datetime

        from flowbench.codec import encode
        from flowbench.record.machine import read_machine, read_versions
        from flowbench.record.store import new_run_id

        lines = [json.dumps(encode(comparison))]
        if self._file is None:
            folder = Path(self._config.getoption("flowbench_out"))
            self._file = folder / f"operations-{new_run_id(datetime.now(UTC))}.jsonl"
            lines.insert(0, json.dumps({"machine": encode(read_machine()), "versions": read_versions()}))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            raise FlowbenchError(
                f"cannot write {self._file}: {error.strerror}; choose another --flowbench-out"
            ) from None

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table."""
        from flowbench.report.operations import table

        for line in table(self._comparisons):
            terminalreporter.write_line(line)
        if self._file is not None:
            terminalreporter.write_line(f"flowbench: {self._file} has every round")

    def pytest_unconfigure(self) -> None:
        """End the processes."""
        for sides in self._sides.values():
            sides.close()


_OPERATIONS = pytest.StashKey[Operations]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of single operations; those of `flowbench.pytest_plugin` for pairs, threads and the folder count here too."""
    group = parser.getgroup("flowbench")
    group.addoption(
        "--flowbench-device", choices=["cpu", "cuda"], help="Where operations run; cuda where a GPU answers."
    )
    group.addoption("--flowbench-batch-size", type=_count, metavar="N", help="The batch size of single operations.")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a batch has at least one image, not {value}")
    return value


def pytest_configure(config: pytest.Config) -> None:
    """Register the comparisons of this run."""
    config.stash[_OPERATIONS] = Operations(config)
    config.pluginmanager.register(config.stash[_OPERATIONS], "flowbench-operations")


@pytest.fixture
def side_by_side(request: pytest.FixtureRequest) -> Callable[..., Comparison]:
    """`side_by_side(sides, operation, arguments, tolerance=, title=None, label="", uses=0)` measures one by two sides.

    `arguments` are numbers, texts and lists of them. The table shows `title` and `label` for the operation and for what it is
    done to, and adds up times by `uses`: how often a model has it. Returns the Comparison.
    """
    return request.config.stash[_OPERATIONS].compare


@pytest.fixture
def operations_device(request: pytest.FixtureRequest) -> str:
    """`cpu` or `cuda`: where operations run."""
    return request.config.stash[_OPERATIONS].device


@pytest.fixture
def batch_size(request: pytest.FixtureRequest, operations_device: str) -> int:
    """`--flowbench-batch-size`, or a size that suits the device."""
    return request.config.getoption("flowbench_batch_size") or (32 if operations_device == "cuda" else 2)
