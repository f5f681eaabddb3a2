"""What must be right on machines without a GPU: names, settings, the folding of images, the cache on disk."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import framework as flow
from framework.cuda import streams
from framework.destination import destination
from framework.device import Device, cuda_device, named_device
from framework.kernels import cuda as own
from framework.kernels import reference
from framework.kernels.cuda import cudnn, disk, launch, library, normalization, normalization_plans
from framework.vm.array import Layout, channels_last_stride


def test_devices_have_names():
    assert Device("cuda") is Device("cuda:0")
    assert str(Device("cuda:3")) == "cuda:3"
    assert Device("cuda", 2) is Device("cuda:2")
    with pytest.raises(ValueError, match="there are cpu, cuda"):
        Device("tpu")


def test_a_number_is_that_of_a_gpu():
    assert named_device(2) is Device("cuda:2")
    assert named_device("cpu") is Device("cpu")
    assert destination(3, None, None).device is Device("cuda:3")
    for wrong, error, words in (
        (-1, ValueError, "devices of a kind are numbered 0, 1, .*; got -1"),
        (True, TypeError, "a device is given by its name, .* got True"),
        (1.0, TypeError, "a device is given by its name, .* got 1.0"),
    ):
        for read in (named_device, cuda_device, lambda given: destination(given, None, None)):
            with pytest.raises(error, match=words):
                read(wrong)


def test_the_framework_imports_without_cupy_and_says_what_is_missing():
    program = (
        "import sys; sys.modules['cupy'] = None\n"
        "import framework as flow\n"
        "assert not flow.cuda.is_available()\n"
        "assert flow.cuda.memory_allocated() == 0\n"
        "assert flow.ones(3).sum().item() == 3\n"
        "try: flow.zeros(3, device='cuda')\n"
        "except flow.cuda.CudaUnavailableError as error: print(error)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'flowbench[cuda13]'" in answer.stdout


def test_cuda_is_the_current_device_or_the_one_named(monkeypatch):
    moved = []

    def move(a, device, *, non_blocking):
        moved.append((str(device), non_blocking))
        return a

    monkeypatch.setattr("framework.ops.view.move_to", move)
    x, layer = flow.ones(2), flow.nn.Linear(2, 2, bias=False)
    x.cuda()
    x.cuda(1)
    x.cuda("cuda:2", non_blocking=True)
    x.cuda(flow.device("cuda:3"), True)
    assert layer.cuda(1) is layer
    layer.cuda()
    assert moved == [("cuda:0", 0), ("cuda:1", 0), ("cuda:2", 1), ("cuda:3", 1), ("cuda:1", 0), ("cuda:0", 0)]
    for held in (x, layer):
        assert held.cpu() is held
        with pytest.raises(ValueError, match="this takes a CUDA device, such as 'cuda:1', or its number; got cpu"):
            held.cuda("cpu")
    assert len(moved) == 6


def test_no_kernel_of_the_reference_is_missing():
    assert sorted(set(reference.TABLE.kernels) - set(own.table().kernels)) == []


def test_of_cupy_nothing_is_used_that_could_not_be_captured():
    """Its arrays, its cuBLAS and its random numbers refuse to work, or allocate, while a stream is captured."""
    sources = Path(flow.__file__).parent.rglob("*.py")
    trees = [ast.parse(source.read_text()) for source in sources]
    taken = {
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    of_cupy = {name for name in taken if name.partition(".")[0] in ("cupy", "cupyx", "cupy_backends")}
    assert of_cupy == {f"cupy.cuda.{part}" for part in ("runtime", "driver", "nvrtc", "nccl")}


def test_settings_start_as_pytorchs():
    assert flow.backends.CudnnSettings().allow_tf32
    assert not flow.backends.MatmulSettings().allow_tf32
    assert flow.backends.CudnnSettings().workspace_bytes == 256 * 2**20


def test_a_misspelled_setting_is_refused():
    with pytest.raises(AttributeError):
        flow.backends.cudnn.alow_tf32 = False  # type: ignore[attr-defined]


def test_entries_on_disk_are_whole_or_absent(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.read("plans", "a") is None
    disk.write("plans", "a", b"one")
    disk.write("plans", "a", b"two")
    assert disk.read("plans", "a") == b"two"
    assert disk.read("plans", "b") is None
    (tmp_path / "blocked").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.warns(UserWarning, match="cannot be used"):
        disk.write("plans", "a", b"three")


def test_bfloat16_on_the_host():
    bits = flow.bfloat16.encode(np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, np.inf], np.float64))
    assert bits.dtype == np.uint16
    assert flow.bfloat16.decode(bits).tolist() == [1.0, -2.5, 1.0, 1 + 2**-6, np.inf]
    assert np.isnan(flow.bfloat16.decode(flow.bfloat16.encode(np.array([np.nan])))).all()
    on_host = flow.tensor([1.0, 2.0], dtype=flow.bfloat16)
    assert on_host.tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="no kernel takes it on the host"):
        on_host + on_host


@pytest.mark.parametrize(("dtype", "is_aligned", "most"), [(flow.float32, True, 2**18), (flow.float32, False, 2**17)])
def test_channels_that_there_are_no_counters_for_are_refused(dtype, is_aligned, most, monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "prepare", lambda function, grid, *given: grid)
    monkeypatch.setattr(normalization_plans.compiler, "function", lambda *given, **settings: None)
    device, types = Device("cuda"), normalization_plans.Types(dtype, dtype, dtype)
    spread = normalization_plans.Spread(device, (1, most, 1, 2), types, is_aligned)
    assert spread.reduce(device, "statistics", "", "") == (1, launch.COUNTER_BYTES // 4)
    more = normalization_plans.Spread(device, (1, most + 4, 1, 2), types, is_aligned)
    with pytest.raises(
        ValueError, match=rf"of {most + 4} channels is more than one CUDA kernel call takes, which is {most};"
    ):
        more.reduce(device, "statistics", "", "")


@pytest.mark.parametrize(("cuda", "package"), [(13, "nvidia-cudnn-cu13"), (12, "nvidia-cudnn-cu12")])
def test_a_missing_library_names_its_package(monkeypatch, cuda, package):
    monkeypatch.setattr(library, "_find", lambda name: "/nowhere/libcudnn.so.9")
    monkeypatch.setattr(library, "_cuda_major", lambda: cuda)
    library.load.cache_clear()
    assert f"`pip install {package}` brings it" in (library.why("cudnn") or "")
    library.load.cache_clear()


@pytest.mark.parametrize(
    ("of", "held"),
    [
        (cudnn.Descriptor, {"pointer": 1}),
        (cudnn.Plan, {"_packs": {0: 1}}),
        (streams.Stream, {"_is_own": True, "_stream": None}),
        (streams.Event, {"_event": 1}),
    ],
)
def test_what_dies_with_the_process_leaves_the_driver_alone(of: type, held: dict, monkeypatch: pytest.MonkeyPatch):
    module = sys.modules[of.__module__]
    for name in [name for name in vars(module) if not name.startswith("__")]:
        monkeypatch.delattr(module, name)  # as at the end of an interpreter
    of.__del__(SimpleNamespace(**held), lambda: True)
    with pytest.raises((NameError, AttributeError)):  # it would have gone on to the driver
        of.__del__(SimpleNamespace(**held), lambda: False)


def test_what_is_large_for_its_step_is_made_again_for_backward():
    def is_remade(batch: int, channels: int, size: int) -> bool:
        shape = (batch, channels, size, size)
        return normalization.batch_norm_remakes(Layout.of(shape, channels_last_stride(shape), flow.float32))

    inner = {batch: [is_remade(batch, 64 * 2**i, 56 // 2**i) for i in range(4)] for batch in (1, 4, 8, 16, 32, 64, 256)}
    first, two = [True, False, False, False], [True, True, False, False]
    assert inner == {1: [False] * 4, 4: [False] * 4, 8: first, 16: first, 32: first, 64: two, 256: two}
