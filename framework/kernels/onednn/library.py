"""The oneDNN library through ctypes: finding it, calling it, and the size of its thread pool."""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any

_PACKAGE = "onednn-cpu-gomp"
_FILE = "libdnnl.so.3"
_CPU_ENGINE = 1
_IN_ORDER_STREAM = 1
# An instruction set has the bits of all that it includes.
_AVX512_CORE = 0x27

# The names that oneDNN's header gives to what its functions return.
_STATUS = {
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "last implementation reached",
    5: "runtime error",
    6: "not required",
    7: "invalid graph",
    8: "invalid graph operation",
    9: "invalid shape",
    10: "invalid data type",
}
UNIMPLEMENTED = 3


class OneDnnError(RuntimeError):
    """A oneDNN function refused. `status` is the number it returned."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(
            f"oneDNN's {function} failed: {_STATUS.get(status, 'unknown status')} ({status}); "
            "ONEDNN_VERBOSE=2 in the environment makes oneDNN say why"
        )
        self.status = status


class Library:
    """The loaded library with one CPU engine and one stream. Work on a CPU stream is done when the call returns."""

    def __init__(self) -> None:
        self.functions = ctypes.CDLL(str(find()))
        # oneDNN is linked against this one, so that it is the same pool.
        self.openmp = ctypes.CDLL("libgomp.so.1")
        self.is_forked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._note_fork)
        self._declare()
        # What oneDNN generates code for here: what the processor has, or less where ONEDNN_MAX_CPU_ISA says so.
        self.has_avx512 = self.functions.dnnl_get_effective_cpu_isa() & _AVX512_CORE == _AVX512_CORE
        self.engine = self.make("engine_create", _CPU_ENGINE, ctypes.c_size_t(0))
        self.stream = self.make("stream_create", self.engine, _IN_ORDER_STREAM)

    def _note_fork(self) -> None:
        # A fork copies no threads: what waits for the pool's would wait for ever.
        self.is_forked = True

    def call(self, name: str, *arguments: Any) -> None:
        """Calls dnnl_`name`. Raises OneDnnError where it does not return success."""
        status = getattr(self.functions, "dnnl_" + name)(*arguments)
        if status:
            raise OneDnnError("dnnl_" + name, status)

    def make(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Calls a function whose first argument receives a new object, and returns that."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        return made

    def destroy_with(self, owner: object, name: str, handle: ctypes.c_void_p) -> None:
        """Calls dnnl_`name` on `handle` when `owner` goes, but not at the end of the process, which frees all anyway."""
        weakref.finalize(owner, getattr(self.functions, "dnnl_" + name), handle).atexit = False

    def version(self) -> str:
        """Such as "3.2.0"."""

        class Version(ctypes.Structure):
            _fields_ = [(part, ctypes.c_int) for part in ("major", "minor", "patch")]

        self.functions.dnnl_version.restype = ctypes.POINTER(Version)
        found = self.functions.dnnl_version().contents
        return f"{found.major}.{found.minor}.{found.patch}"

    def _declare(self) -> None:
        pointer, functions = ctypes.c_void_p, self.functions
        functions.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
        functions.dnnl_primitive_desc_query_md.restype = pointer
        functions.dnnl_primitive_execute.argtypes = [pointer, pointer, ctypes.c_int, pointer]
        functions.dnnl_memory_set_data_handle.argtypes = [pointer, pointer]
        self.openmp.omp_set_num_threads.argtypes = [ctypes.c_int]
        self.openmp.omp_set_num_threads.restype = None


def find() -> Path:
    """Where the installed package keeps the library. Raises OSError, with the way out, where there is none."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        installed = files(_PACKAGE) or []
    except PackageNotFoundError:
        raise OSError(f"the package {_PACKAGE} is not installed; `pip install {_PACKAGE}` brings it") from None
    for file in installed:
        if PurePath(file).name == _FILE:
            return Path(str(file.locate())).resolve()
    raise OSError(f"the package {_PACKAGE} holds no {_FILE}; `pip install --force-reinstall {_PACKAGE}` repairs it")


@lru_cache(maxsize=1)
def library() -> Library:
    """The library, loaded at the first call. Raises OSError or OneDnnError where it cannot be."""
    return Library()


@lru_cache(maxsize=1)
def why() -> str:
    """Why oneDNN cannot be used, with the way out, or which version is used."""
    reason = _refusal()
    return reason if reason is not None else f"oneDNN {library().version()}"


def available() -> bool:
    """Whether oneDNN can be used here."""
    return _refusal() is None


def set_num_threads(count: int) -> None:
    """The number of threads of every later kernel call from this thread. Raises ValueError for less than 1.

    It is OpenMP's own setting, which each thread that calls kernels has for itself.
    """
    if count < 1:
        raise ValueError(f"a number of threads is at least 1, not {count}")
    library().openmp.omp_set_num_threads(count)


def get_num_threads() -> int:
    """The number of threads that a kernel called from this thread uses at most."""
    return int(library().openmp.omp_get_max_threads())


@lru_cache(maxsize=1)
def _refusal() -> str | None:
    try:
        library()
    except (OSError, OneDnnError) as refused:
        return str(refused)
    return None
