"""NVIDIA's libraries beside the driver: found where pip or the system keeps them, and loaded once."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import NamedTuple


class LibraryError(RuntimeError):
    """A function of a library refused."""


class _Library(NamedTuple):
    title: str
    file: str
    package: str
    package_of_cuda12: str


# {cuda} is the major version of CUDA that CuPy is built for.
_LIBRARIES = {
    "cudnn": _Library("cuDNN 9", "libcudnn.so.9", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "nvrtc": _Library("NVRTC, CUDA's compiler", "libnvrtc.so.{cuda}", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nccl": _Library("NCCL 2", "libnccl.so.2", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "cublasLt": _Library("cuBLAS", "libcublasLt.so.{cuda}", "nvidia-cublas", "nvidia-cublas-cu12"),
}


@cache
def load(name: str) -> ctypes.CDLL:
    """The library called `name`. Raises OSError, saying which package brings it, where there is none."""
    try:
        return ctypes.CDLL(_find(name) or _LIBRARIES[name].file.format(cuda=_cuda_major()))
    except OSError as missing:
        raise OSError(without(name, missing)) from missing


def without(name: str, missing: Exception) -> str:
    """What to say where a library cannot be loaded: which it is, and the package that brings it."""
    library, cuda = _LIBRARIES[name], _cuda_major()
    package = library.package_of_cuda12 if cuda == 12 else library.package
    return (
        f"CUDA devices need {library.title}, which cannot be loaded ({' '.join(str(missing).split())});"
        f" `pip install {package}` brings it, as does `pip install 'flowbench[cuda{cuda}]'`"
    )


def why(name: str) -> str | None:
    """Why a library cannot be loaded, with the way out; None where it can."""
    try:
        load(name)
    except OSError as missing:
        return str(missing)
    return None


def _find(name: str) -> str | None:
    """Where cuda-pathfinder, which comes with CuPy, finds the library; None leaves it to the system's loader."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return None
    try:
        return load_nvidia_dynamic_lib(name).abs_path
    except DynamicLibNotFoundError:
        return None


@lru_cache(maxsize=1)
def _cuda_major() -> int:
    from framework.vm import cuda

    return int(cuda.api().runtimeGetVersion() // 1000)
