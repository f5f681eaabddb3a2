"""Compiles the CUDA C++ sources beside this file for the device at hand, and keeps the machine code on disk."""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from framework.device import Device
from framework.dtype import DType
from framework.kernels.cuda import disk, library
from framework.vm import cuda

_FOLDER = Path(__file__).parent
_KIND = "kernels"
_DIGEST_BYTES = 32
# The attributes of a device that say what machine code it runs: the two parts of its compute capability.
_MAJOR, _MINOR = 75, 76
# The first architecture whose kernels can wait for the one in front of them.
_WAITS_ITSELF = 90
_CXX_TYPES = {
    "bool": "bool",
    "uint8": "uint8",
    "int32": "int",
    "int64": "int64",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
}


class Function(NamedTuple):
    """A compiled kernel: where it is, and whether it waits itself for what runs in front of it, so that it may start early."""

    address: int
    starts_early: bool


class KernelCompileError(RuntimeError):
    """A kernel's source did not compile; the message has the compiler's log."""


def cxx(dtype: DType) -> str:
    """What the sources call an element type."""
    return _CXX_TYPES[dtype.name]


def function(device: Device, file: str, name: str, **definitions: str | int) -> Function:
    """The kernel `name` of a source file, compiled with `definitions` as macros.

    It is compiled once per source, macros and architecture; everything else with the same macros comes along.
    """
    module = _module(device, file, tuple(sorted(definitions.items())))
    from cupy.cuda import driver

    # As grid_dependency_synchronize in common.cuh, by what the code is compiled for.
    starts_early = _generation(_target(_architecture(device))) >= _WAITS_ITSELF
    return Function(int(driver.moduleGetFunction(module, name)), starts_early)


@cache
def capability(device: Device) -> tuple[int, int]:
    """The compute capability of a device, such as (9, 0)."""
    read = cuda.api().deviceGetAttribute
    return int(read(_MAJOR, device.index)), int(read(_MINOR, device.index))


def machine_code(file: str, definitions: tuple[tuple[str, Any], ...], architecture: int) -> bytes:
    """A source file compiled for an architecture, such as 90 for compute capability 9.0: from disk, or made now.

    Raises KernelCompileError with the compiler's log where the source is wrong.
    """
    version, target = _version(), _target(architecture)
    options = (
        *(f"-D{name}={value}" for name, value in definitions),
        "-std=c++17",
        "-default-device",
        f"-arch={target}",
    )
    source = (_FOLDER / file).read_text()
    headers = {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.cuh"))}
    key = "\n".join((str(version), file, *options, source, *headers.values()))
    kept = disk.read(_KIND, key)
    if kept is not None:
        digest, code = kept[:_DIGEST_BYTES], kept[_DIGEST_BYTES:]
        # An entry that was damaged, by a full disk say, is made anew.
        if hashlib.sha256(code).digest() == digest:
            return code
    code = _compile(file, source, headers, options)
    disk.write(_KIND, key, hashlib.sha256(code).digest() + code)
    return code


@cache
def _module(device: Device, file: str, definitions: tuple[tuple[str, Any], ...]) -> int:
    from cupy.cuda import driver

    code = machine_code(file, definitions, _architecture(device))
    cuda.choose(device)
    if not driver.ctxGetCurrent():
        # A call that needs a context makes the device's own one current; loading a module does not.
        cuda.api().free(0)
    return int(driver.moduleLoadData(code))


def _architecture(device: Device) -> int:
    major, minor = capability(device)
    return 10 * major + minor


def _generation(target: str) -> int:
    """The number in a target such as sm_90."""
    return int(target.partition("_")[2])


@lru_cache(maxsize=1)
def _version() -> tuple[int, int]:
    try:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as missing:
        # CuPy loads it when it is first asked something.
        raise OSError(library.without("nvrtc", missing)) from missing
    return int(major), int(minor)


@cache
def _target(architecture: int) -> str:
    """The device itself where the compiler knows it, else the newest before it, for the driver to translate."""
    from cupy.cuda import nvrtc

    known = [int(number) for number in nvrtc.getSupportedArchs()]
    if architecture in known:
        return f"sm_{architecture}"
    older = [number for number in known if number < architecture]
    if not older:
        raise KernelCompileError(
            f"the CUDA compiler (NVRTC {'.'.join(map(str, _version()))}) makes code for compute capability"
            f" {min(known) / 10} and newer; this device has {architecture / 10}. Install flowbench[cuda12] for older ones"
        )
    return f"compute_{max(older)}"


def _compile(file: str, source: str, headers: dict[str, str], options: tuple[str, ...]) -> bytes:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(
        source, file, [text.encode() for text in headers.values()], [name.encode() for name in headers]
    )
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise KernelCompileError(
            f"{file} does not compile with {' '.join(options)}: {error}\n{nvrtc.getProgramLog(program)}"
        ) from error
    else:
        is_final = options[-1].startswith("-arch=sm_")
        code = nvrtc.getCUBIN(program) if is_final else nvrtc.getPTX(program)
        return code if isinstance(code, bytes) else code.encode()
    finally:
        nvrtc.destroyProgram(program)
