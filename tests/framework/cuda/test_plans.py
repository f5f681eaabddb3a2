"""What bounds the choice of a convolution's algorithm, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from framework.device import Device
from framework.kernels.cuda import plans
from framework.kernels.cuda.cublas import CublasError
from framework.kernels.cuda.library import LibraryError
from framework.kernels.cuda.problem import BACKWARD_INPUT, FORWARD, Problem, Settings, workspace_limit
from framework.vm import OutOfMemoryError
from tests.framework.cuda.fake_api import FakeCudaApi

MIB = 1 << 20
PROBLEM = Problem(FORWARD, "float32", (1, 8, 4, 4), (8, 8, 3, 3), (1, 8, 4, 4), (1, 1), (1, 1), (1, 1))
POINTWISE = Problem(BACKWARD_INPUT, "float32", (1, 8, 4, 4), (8, 8, 1, 1), (1, 8, 4, 4), (1, 1), (0, 0), (1, 1))


@pytest.mark.parametrize(
    ("batch", "dtype", "allowed", "limit"),
    [
        (1, "float32", 256 * MIB, 16 * MIB),  # small: any convolution may use so much
        (16, "float32", 256 * MIB, 2 * 4 * (2 * 16 * 64 * 56 * 56 + 64 * 64 * 9)),
        (16, "bfloat16", 256 * MIB, 2 * 2 * (2 * 16 * 64 * 56 * 56 + 64 * 64 * 9)),
        (256, "float32", 256 * MIB, 256 * MIB),
        (256, "float32", 2 * MIB, 2 * MIB),
        (1, "float32", 2 * MIB, 2 * MIB),
    ],
)
def test_scratch_memory_is_bounded_by_operands_and_by_the_setting(batch, dtype, allowed, limit):
    images = (batch, 64, 56, 56)
    problem = Problem(FORWARD, dtype, images, (64, 64, 3, 3), images, (1, 1), (1, 1), (1, 1))
    assert workspace_limit(problem, Settings(True, False, allowed, 8)) == limit


@pytest.mark.parametrize(("free", "found"), [(300, "fast"), (256, "fast"), (255, "small"), (63, "slow")])
def test_near_the_end_of_memory_the_search_is_among_what_fits(free, found, monkeypatch) -> None:
    lent: list[int] = []

    @contextmanager
    def borrowed(device, nbytes):
        if nbytes > free:
            raise OutOfMemoryError("out of memory")
        lent.append(nbytes)
        yield 4096

    _fake_search(monkeypatch, [_Plan("small", 64, 2.0), _Plan("slow", 0, 3.0), _Plan("fast", 256, 1.0)])
    monkeypatch.setattr(plans, "borrowed", borrowed)
    written: list[bytes] = []
    monkeypatch.setattr(plans.disk, "write", lambda kind, key, value: written.append(value))
    choice = plans.choose(PROBLEM, Settings(True, False, 256 * MIB, 8), Device("cuda"), (0, 0, 0))
    assert (choice.plan.name, lent) == (found, [{"fast": 256, "small": 64, "slow": 0}[found]])
    # What only a lack of memory made the best is no word for later processes.
    kept = {"library": "cuDNN", "pieces": 1, "plan": "fast"}
    assert [json.loads(value) for value in written] == ([kept] if found == "fast" else [])


def test_a_search_without_room_for_any_is_out_of_memory(monkeypatch) -> None:
    @contextmanager
    def refused(device, nbytes):
        raise OutOfMemoryError(f"asked for {nbytes}")
        yield

    _fake_search(monkeypatch, [_Plan("fast", 256, 1.0), _Plan("small", 64, 2.0)])
    monkeypatch.setattr(plans, "borrowed", refused)
    with pytest.raises(OutOfMemoryError, match="asked for 64"):
        plans.choose(PROBLEM, Settings(True, False, 256 * MIB, 8), Device("cuda"), (0, 0, 0))


@pytest.mark.parametrize(
    ("cudnn_ms", "cublas_ms", "found"),
    [([2.0, 3.0], [4.0, 1.0], "cuBLASLt 1"), ([2.0, 1.0], [4.0, 1.0], "cuDNN 1"), ([2.0], [1.0], "cuBLASLt 0")],
)
def test_the_fastest_of_both_libraries_is_taken_and_kept(cudnn_ms, cublas_ms, found, monkeypatch, tmp_path) -> None:
    _fake_search(monkeypatch, _plans("cuDNN", cudnn_ms), _plans("cuBLASLt", cublas_ms), folder=tmp_path)
    assert _chosen(POINTWISE) == found
    monkeypatch.setattr(plans, "_time", lambda *given: pytest.fail("what is on disk was timed again"))
    assert _chosen(POINTWISE) == found


def test_no_product_is_timed_for_what_is_none(monkeypatch, tmp_path) -> None:
    _fake_search(monkeypatch, _plans("cuDNN", [2.0, 3.0]), _plans("cuBLASLt", [1.0]), folder=tmp_path)
    assert _chosen(PROBLEM) == "cuDNN 0"


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"library": "cuBLASLt", "pieces": 1, "plan": "of another build"}'])
def test_an_entry_that_cannot_be_read_is_found_again_and_written_anew(damaged, monkeypatch, tmp_path) -> None:
    _fake_search(monkeypatch, _plans("cuDNN", [2.0]), _plans("cuBLASLt", [1.0]), folder=tmp_path)
    assert _chosen(POINTWISE) == "cuBLASLt 0"
    (entry,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = entry.read_bytes()
    entry.write_text(damaged)
    assert _chosen(POINTWISE) == "cuBLASLt 0"
    assert entry.read_bytes() == whole


def test_another_cublas_is_another_choice_for_products_alone(monkeypatch, tmp_path) -> None:
    _fake_search(monkeypatch, _plans("cuDNN", [1.0, 2.0]), _plans("cuBLASLt", [2.0]), folder=tmp_path)
    for problem, entries in ((POINTWISE, 2), (PROBLEM, 3)):
        for version in (1, 2):
            monkeypatch.setattr(plans.cublas, "version", lambda version=version: version)
            _chosen(problem)
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == entries


@pytest.mark.parametrize("refused", ["cuDNN", "cuBLASLt"])
def test_what_its_library_refuses_to_run_is_not_taken(refused, monkeypatch, tmp_path) -> None:
    suggested = {"cuDNN": _plans("cuDNN", [2.0, 2.0]), "cuBLASLt": _plans("cuBLASLt", [2.0, 2.0])}
    suggested[refused] = [_Plan(f"{refused} refused", 0, None, refused), *suggested[refused]]
    _fake_search(monkeypatch, *suggested.values(), folder=tmp_path)
    assert _chosen(POINTWISE) == "cuDNN 0"


def test_a_search_where_everything_is_refused_says_why(monkeypatch, tmp_path) -> None:
    none = [_Plan(f"cuDNN {i}", 0, None, "cuDNN") for i in range(2)]
    _fake_search(monkeypatch, none, [], folder=tmp_path)
    with pytest.raises(LibraryError, match="cuDNN 1 does not run"):
        _chosen(PROBLEM)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("notes", "behaviour", "settings", "is_allowed"),
    [
        ([], [], {}, True),
        ([4], [], {}, True),
        ([4], [], {"deterministic": True}, False),
        ([0], [], {"deterministic": True}, True),
        ([0], [], {}, True),
        ([0], [], {"allow_tf32": False}, False),
        ([], [], {"allow_tf32": False}, True),
        ([1], [], {}, False),
        ([], [0], {}, False),
    ],
)
def test_an_engine_is_allowed_by_what_cudnn_notes_of_it(notes, behaviour, settings, is_allowed) -> None:
    """Numerical notes: 0 it uses tensor cores, 1 it converts to fewer bits, 4 it has other bits at each run; behaviour 0: it compiles."""
    engine = SimpleNamespace(get=lambda attribute, kind, most: {1303: notes, 1305: behaviour}[attribute])
    config = SimpleNamespace(get_descriptors=lambda attribute, kind, most: [engine])
    wanted = replace(Settings(True, False, 256 * MIB, 8), **settings)
    assert plans._is_allowed(config, PROBLEM, wanted) is is_allowed


def test_a_choice_is_kept_for_its_device_its_libraries_its_problem_and_its_settings(monkeypatch) -> None:
    api, wanted = FakeCudaApi(), Settings(True, False, 256 * MIB, 8)
    monkeypatch.setattr(plans.cuda, "api", lambda: api)
    for library in (plans.cudnn, plans.cublas):
        monkeypatch.setattr(library, "version", lambda: 1)

    def key(problem: Problem = POINTWISE, settings: Settings = wanted) -> str:
        return plans._key(problem, settings, Device("cuda"))

    keys = [key()]
    assert key() == keys[0]
    keys += [key(replace(POINTWISE, stride=(2, 2))), key(replace(POINTWISE, dtype="bfloat16")), key(PROBLEM)]
    keys += [key(settings=replace(wanted, deterministic=True)), key(settings=replace(wanted, workspace_bytes=MIB))]
    properties = api.getDeviceProperties(0)
    for change in ({"name": b"Another"}, {"major": 10}, {"multiProcessorCount": 78}):
        monkeypatch.setattr(api, "getDeviceProperties", lambda index, change=change: properties | change)
        keys.append(key())
    monkeypatch.setattr(api, "driverGetVersion", lambda: 13010)
    keys.append(key())
    for library in (plans.cudnn, plans.cublas):
        monkeypatch.setattr(library, "version", lambda: 2)
        keys.append(key())
    assert len(set(keys)) == len(keys) == 12


class _Plan(NamedTuple):
    """What stands for a library's plan, and the milliseconds that it takes; none where the library refuses to run it."""

    name: str
    workspace_bytes: int
    milliseconds: float | None
    library: str = "cuDNN"

    def text(self) -> bytes:
        return self.name.encode()


def _plans(library: str, milliseconds: list[float]) -> list[_Plan]:
    return [_Plan(f"{library} {i}", 0, taken, library) for i, taken in enumerate(milliseconds)]


def _chosen(problem: Problem) -> str:
    """The name of the plan that is chosen."""
    return plans.choose(problem, Settings(True, False, 256 * MIB, 8), Device("cuda"), (0, 0, 0)).plan.name


def _fake_search(monkeypatch, suggested: list[_Plan], products: list[_Plan] = (), folder: Path | None = None) -> None:
    """Lets a search find these, without a device, and keep what it chose in a folder."""

    def of_text(problem, wanted, device, text):
        for plan in products:
            if plan.text() == text:
                return plan
        raise CublasError("cublasLtMatmulAlgoCheck", 7)

    def time(plan, addresses, scratch):
        if plan.milliseconds is None:
            raise LibraryError(f"{plan.name} does not run")
        return plan.milliseconds

    monkeypatch.setattr(plans.cudnn, "handle", lambda device: None)
    monkeypatch.setattr(plans.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(plans.cublas, "version", lambda: 130100)
    monkeypatch.setattr(plans.cuda, "is_capturing", lambda device: False)
    monkeypatch.setattr(plans, "_suggestions", lambda handle, problem, wanted: (suggested, True))
    monkeypatch.setattr(plans, "_time", time)
    monkeypatch.setattr(plans.pointwise, "suggestions", lambda problem, wanted, device: products)
    monkeypatch.setattr(plans.pointwise.Plan, "of_text", of_text)
    monkeypatch.setattr(plans.cudnn.Plan, "of_text", lambda handle, text: {p.text(): p for p in suggested}[text])
    if folder is None:
        monkeypatch.setattr(plans, "_key", lambda *given: "key")
        monkeypatch.setattr(plans, "_from_disk", lambda *given: None)
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(plans.cuda, "api", lambda: FakeCudaApi())
    monkeypatch.setattr(plans, "borrowed", lambda device, nbytes: nullcontext(4096))


@pytest.mark.gpu
def test_a_search_leaves_no_more_memory_reserved_than_what_it_found_needs(tmp_path) -> None:
    program = (
        "import framework as flow\n"
        "model = flow.models.resnet18().to('cuda')\n"
        "for _ in range(3):\n"
        "    model(flow.zeros(8, 3, 224, 224, device='cuda')).sum().backward()\n"
        "print(flow.cuda.memory_reserved())\n"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    searching, knowing = (
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert searching.stdout == knowing.stdout
