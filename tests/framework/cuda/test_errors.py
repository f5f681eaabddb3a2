"""What goes wrong with CUDA devices is said in one line, with the way out; tried on devices that are none."""

from __future__ import annotations

import sys
import types

import pytest

import framework as flow
from framework.kernels import cuda as own
from framework.kernels.cuda import compiler, library, loss

pytest_plugins = ["tests.framework.cuda.fake_api"]


def _refusing(error: Exception):
    def refuse(*_: object) -> None:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("status", "name", "said"),
    [
        (35, "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
         "driver is too old .*update it to 580 or newer for CUDA 13, or install `flowbench.cuda12.`"),
        (100, "cudaErrorNoDevice: no CUDA-capable device is detected", "`nvidia-smi` should list one"),
        (999, "cudaErrorUnknown: unknown error", "no CUDA device can be used .cudaErrorUnknown"),
    ],
)  # fmt: skip
def test_a_driver_that_refuses(fake_cuda, monkeypatch, status: int, name: str, said: str) -> None:
    monkeypatch.setattr(fake_cuda, "getDeviceCount", _refusing(fake_cuda.CUDARuntimeError(status, name)))
    assert not flow.cuda.is_available()
    assert flow.cuda.device_count() == 0
    with pytest.raises(flow.cuda.CudaUnavailableError, match=said) as refused:
        flow.zeros(3, device="cuda")
    assert "\n" not in str(refused.value)
    assert str(refused.value) == flow.cuda.why()


def test_no_device(fake_cuda) -> None:
    fake_cuda.count = 0
    for ask in (lambda: flow.ones(1).to("cuda"), flow.cuda.get_device_name, flow.cuda.Stream, flow.cuda.Event):
        with pytest.raises(flow.cuda.CudaUnavailableError, match="CUDA_VISIBLE_DEVICES must not hide it") as refused:
            ask()
        assert "\n" not in str(refused.value)
    assert flow.cuda.memory_allocated() == 0
    flow.cuda.synchronize()


@pytest.mark.parametrize(
    ("name", "package"),
    [("cudnn", "nvidia-cudnn-cu13"), ("cublasLt", "nvidia-cublas"), ("nvrtc", "nvidia-cuda-nvrtc")],
)
def test_a_library_that_is_missing_names_its_wheel(monkeypatch, name: str, package: str) -> None:
    monkeypatch.setattr(library, "_find", lambda name: f"/nowhere/{name}.so")
    monkeypatch.setattr(library, "_cuda_major", lambda: 13)
    library.load.cache_clear()
    with pytest.raises(OSError, match=rf"which cannot be loaded .*nowhere.*`pip install {package}` brings it"):
        library.load(name)
    library.load.cache_clear()


def test_a_compiler_that_is_missing_names_its_wheel(monkeypatch) -> None:
    nvrtc = types.SimpleNamespace(
        getVersion=_refusing(RuntimeError("CuPy failed to load libnvrtc.so.13:\nOSError: no such file"))
    )
    for name, module in (("cupy", types.ModuleType("cupy")), ("cupy.cuda", types.SimpleNamespace(nvrtc=nvrtc))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(library, "_cuda_major", lambda: 12)
    compiler._version.cache_clear()
    with pytest.raises(OSError, match=r"need NVRTC.*`pip install nvidia-cuda-nvrtc-cu12` brings it") as refused:
        compiler.machine_code("copy.cu", (), 90)
    assert "\n" not in str(refused.value)
    compiler._version.cache_clear()


def test_out_of_memory_leaves_the_tensors_usable(fake_cuda, monkeypatch) -> None:
    held = flow.tensor([1.0, 2.0], device="cuda")
    monkeypatch.setattr(
        fake_cuda, "malloc", _refusing(fake_cuda.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory"))
    )
    with pytest.raises(flow.OutOfMemoryError, match=r"asked for 4\.0 GiB, 3\.0 GiB left on the device") as refused:
        flow.empty(1 << 30, device="cuda")
    assert "\n" not in str(refused.value)
    assert held.tolist() == [1, 2]


def test_a_fault_is_told_where_it_is_noticed_with_the_way_to_its_cause(fake_cuda) -> None:
    flow.tensor([1.0]).pin_memory().to("cuda", non_blocking=True)
    fake_cuda.failure = fake_cuda.CUDARuntimeError(
        700, "cudaErrorIllegalAddress: an illegal memory access was encountered"
    )
    with pytest.raises(
        flow.cuda.CudaError, match=r"waiting for cuda:0 failed: .*run again under .*launch_blocking\(\)"
    ):
        flow.cuda.synchronize()
    fake_cuda.failure = None


@pytest.mark.parametrize("call", ["memcpyAsync", "eventRecord", "eventSynchronize"])
def test_after_a_fault_every_copy_tells_the_way_to_its_cause(fake_cuda, monkeypatch, call: str) -> None:
    there = flow.tensor([1.0]).to("cuda")
    monkeypatch.setattr(
        fake_cuda, call, _refusing(fake_cuda.CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access"))
    )
    with pytest.raises(flow.cuda.CudaError, match=r"failed: cudaErrorIllegalAddress.*launch_blocking") as told:
        there.tolist()
    assert "\n" not in str(told.value)


def test_waiting_for_each_instruction_names_the_one_that_failed(fake_cuda, monkeypatch) -> None:
    source = flow.tensor([1.0, 2.0]).pin_memory()
    monkeypatch.setattr(loss, "raise_for_bad_target", lambda device: None)
    with flow.cuda.launch_blocking():
        source.to("cuda", non_blocking=True)
        fake_cuda.failure = fake_cuda.CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access")
        with pytest.raises(
            flow.cuda.CudaError,
            match=r"^copy_from_pinned\(float32\[2\], float32\[2\]\) in to failed on the device: .*700|Illegal",
        ):
            source.to("cuda", non_blocking=True)
        fake_cuda.failure = None


def test_an_older_fault_is_no_instructions_within(fake_cuda) -> None:
    flow.tensor([1.0]).to("cuda")
    fake_cuda.failure = fake_cuda.CUDARuntimeError(700, "cudaErrorIllegalAddress: before")
    with pytest.raises(flow.cuda.CudaError, match=r"^waiting for cuda:0 failed"), flow.cuda.launch_blocking():
        pass
    fake_cuda.failure = None


def test_waiting_for_each_instruction_names_the_one_with_a_bad_target(fake_cuda, monkeypatch) -> None:
    def bad(device: flow.device) -> None:
        raise loss.BadTargetError("cross_entropy: targets must lie in [0, C); got 12")

    monkeypatch.setattr(loss, "raise_for_bad_target", bad)
    with (
        flow.cuda.launch_blocking(),
        pytest.raises(ValueError, match=r"^copy_from_pinned\(.*\) in to: cross_entropy: .*12"),
    ):
        flow.tensor([1.0]).pin_memory().to("cuda", non_blocking=True)


def test_a_kernel_that_is_missing_is_named_and_not_sought_on_the_host(fake_cuda, monkeypatch) -> None:
    monkeypatch.delitem(own.table().kernels, "sqrt")
    here = flow.ones(3).to("cuda")
    with pytest.raises(AttributeError, match="cuda:0 has no kernel called 'sqrt'"):
        here.sqrt()
