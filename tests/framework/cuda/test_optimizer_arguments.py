"""The arguments of the optimizer's kernel: they lie as its struct in C++ says, and every element of every tensor is some block's."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

import framework as flow
from framework.dtype import DType, bfloat16, float32, float64
from framework.kernels.cuda import optimizer
from framework.vm import Array, runtime

# What CUDA takes as the arguments of one kernel.
MOST_BYTES = 32764
SETTINGS = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01, "nesterov": True, "first": False}


def _arguments(most: int) -> type[Any]:
    """The parameters of sgd_step in optimizer.cu, for so many tensors in one launch."""
    addresses = ctypes.c_void_p * most

    class Tensors(ctypes.Structure):
        _fields_ = [(name, addresses) for name in ("parameter", "buffer", "gradient")]

    class Chunks(ctypes.Structure):
        _fields_ = [
            ("count", ctypes.c_int64 * most),
            ("first", ctypes.c_int * (most + 1)),
            ("tensors", ctypes.c_int),
        ]

    class Arguments(ctypes.Structure):
        _fields_ = [
            ("tensors", Tensors),
            *((name, ctypes.c_double) for name in ("rate", "momentum", "kept", "decay")),
            ("flags", ctypes.c_int64),
            ("chunks", Chunks),
        ]

    return Arguments


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """What is launched from now on: the number of blocks, and the arguments as the kernel sees them."""
    launched: list[tuple[int, Any]] = []

    def prepare(most: int, grid: tuple[int, int], varying: str, constants: str, values: tuple[Any, ...]) -> Any:
        def launch(stream: int, *given: Any) -> None:
            block = struct.pack("@" + varying, *given) + struct.pack("@" + constants, *values)
            assert len(block) == ctypes.sizeof(_arguments(most)) <= MOST_BYTES
            launched.append((grid[0], _arguments(most).from_buffer_copy(block)))

        return launch

    monkeypatch.setattr(optimizer.compiler, "function", lambda device, file, name, TYPE, MOST: MOST)
    monkeypatch.setattr(optimizer.launch, "prepare", prepare)
    monkeypatch.setattr(optimizer.launch, "stream", lambda device: 0)
    optimizer._plan.cache_clear()
    yield launched
    optimizer._plan.cache_clear()


def _arrays(counts: list[int], dtype: DType) -> tuple[Array, ...]:
    kernels = runtime(flow.device("cpu"))
    return tuple([kernels.empty((count,), dtype) for count in counts])


@pytest.mark.parametrize("dtype", [float32, float64, bfloat16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("tensors", [1, 16, 17, 64, 192, 193, 512, 900, 901, 1850])
def test_every_element_of_every_tensor_is_some_blocks(
    launches: list[tuple[int, Any]], tensors: int, dtype: DType
) -> None:
    chunk = 256 * 4 * 16 // dtype.itemsize  # CHUNK in optimizer.cu
    counts = [(1, 0, chunk, chunk + 1, 3 * chunk - 1)[i % 5] for i in range(tensors)]
    parameters, buffers, grads = (_arrays(counts, dtype) for _ in range(3))
    optimizer.sgd_step(parameters, buffers, grads, **SETTINGS)
    assert len(launches) == -(-tensors // 900)
    written = []
    for blocks, given in launches:
        assert (given.rate, given.momentum, given.kept, given.decay) == (0.1, 0.9, 0.75, 0.01)
        assert given.flags == 1 | 4
        chunks = given.chunks
        for block in range(blocks):
            place = max(i for i in range(chunks.tensors) if chunks.first[i] <= block)
            start = (block - chunks.first[place]) * chunk
            stop = min(chunks.count[place], start + chunk)
            at = [getattr(given.tensors, name)[place] for name in ("parameter", "buffer", "gradient")]
            written.append((*at, start, stop))
    assert written == [
        (parameter.ptr, buffer.ptr, grad.ptr, start, min(count, start + chunk))
        for parameter, buffer, grad, count in zip(parameters, buffers, grads, counts, strict=True)
        for start in range(0, count, chunk)
    ]


def test_tensors_of_two_types_and_none_with_momentum(launches: list[tuple[int, Any]]) -> None:
    arrays = (*_arrays([5, 7], float32), *_arrays([3], float64), *_arrays([9], float32))
    optimizer.sgd_step(arrays, None, arrays, **SETTINGS | {"momentum": 0.0, "nesterov": False, "first": True})
    found = sorted(list(given.chunks.count[: given.chunks.tensors]) for _, given in launches)
    assert found == [[3], [5, 7, 9]]
    assert all(given.flags == 2 and not any(given.tensors.buffer) for _, given in launches)


def test_a_count_of_more_than_32_bits(launches: list[tuple[int, Any]]) -> None:
    # Nobody touches what is not there.
    parameter = _arrays([1], bfloat16)[0].view((2**31 + 5,), (1,), 0)
    optimizer.sgd_step(parameter, None, parameter, **SETTINGS)
    ((blocks, given),) = launches
    assert (blocks, given.chunks.count[0]) == (2**18 + 1, 2**31 + 5)


def test_nothing_is_launched_for_tensors_without_elements(launches: list[tuple[int, Any]]) -> None:
    empty = _arrays([0, 0], float32)
    optimizer.sgd_step(empty, empty, empty, **SETTINGS)
    assert launches == []
