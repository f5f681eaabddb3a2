"""cuBLASLt through ctypes: matrix products with handles of their own, and scratch memory that is given to them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from framework.device import Device
from framework.kernels.cuda import library
from framework.vm import cuda

_WORKSPACE_BYTES = 32 * 1024 * 1024
# cudaDataType_t, cublasComputeType_t.
_TYPES = {"float32": 0, "float64": 1, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70
# cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t.
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# cublasLtReductionScheme_t.
_IN_COMPUTE_TYPE = 2
_EPILOGUE_BIAS = 4
_STATUS = {
    1: "not initialized",
    3: "allocation failed",
    7: "invalid value",
    8: "architecture mismatch",
    11: "mapping error",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}


class CublasError(library.LibraryError):
    """A cuBLASLt function refused."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(
            f"cuBLAS's {function} failed: {_STATUS.get(status, 'unknown status')} ({status});"
            " CUBLASLT_LOG_LEVEL=1 in the environment makes it say why"
        )


class Matrix(NamedTuple):
    """How an operand lies: `rows` by `columns` in column-major order with columns `leading` elements apart.

    `transposed` says that the product takes its transpose. Batches lie `batch_stride` elements apart.
    """

    rows: int
    columns: int
    leading: int
    transposed: bool
    batch_stride: int


class Request(NamedTuple):
    """A product d = op(a) · op(b) (+ a bias for each row of d), of `batch` matrices each."""

    a: Matrix
    b: Matrix
    d: Matrix
    batch: int
    dtype: str
    allow_tf32: bool
    has_bias: bool
    alignment: int


_Words = ctypes.c_uint64 * 8


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", _Words),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product:
    """A prepared product of one request on one device. `workspace_bytes` is the scratch memory that it needs."""

    def __init__(self, operation: _Operation, algorithm: _Algorithm) -> None:
        self.device = operation.device
        self.workspace_bytes = int(algorithm.workspace_bytes)
        self._operation = operation
        self._algorithm = algorithm
        self._matmul = library.load("cublasLt").cublasLtMatmul

    def launch(self, stream: int, a: int, b: int, d: int, workspace: int, bias: int = 0) -> None:
        """Multiplies the matrices at these addresses on `stream`. Raises CublasError.

        Scratch memory starts at a multiple of 256.
        """
        pointer, operation = ctypes.c_void_p, self._operation
        layout_a, layout_b, layout_d = operation.layouts
        # Where the bias lies is part of the description: who launches takes one, and others meanwhile make their own.
        try:
            description = operation.idle.pop()
        except IndexError:
            description = _describe(operation.request)
        if bias:
            _set("MatmulDesc", description, _BIAS_POINTER, pointer(bias))
        status = self._matmul(
            operation.handle,
            description,
            ctypes.byref(operation.one),
            pointer(a),
            layout_a,
            pointer(b),
            layout_b,
            ctypes.byref(operation.zero),
            pointer(d),
            layout_d,
            pointer(d),
            layout_d,
            ctypes.byref(self._algorithm),
            pointer(workspace),
            ctypes.c_size_t(self.workspace_bytes),
            pointer(stream),
        )
        operation.idle.append(description)
        if status:
            raise CublasError("cublasLtMatmul", status)

    def text(self) -> bytes:
        """The algorithm in cuBLAS's own words, for `restored`."""
        return bytes(self._algorithm.algorithm).hex().encode()


class _Operation:
    """What cuBLASLt has to know of a request, for all algorithms that serve it."""

    def __init__(self, device: Device, request: Request) -> None:
        self.device = device
        self.request = request
        self.handle = _handle(device)
        scalar: Any = ctypes.c_double if request.dtype == "float64" else ctypes.c_float
        self.one, self.zero = scalar(1), scalar(0)
        self.description = _describe(request)
        self.layouts = [_layout(matrix, request) for matrix in (request.a, request.b, request.d)]
        # Those that nobody launches with just now.
        self.idle = [self.description]

    def suggestions(self, most: int, workspace_bytes: int) -> list[_Algorithm]:
        """Up to `most` algorithms with no more scratch memory than given, cuBLAS's best guess first."""
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _set("MatmulPreference", preference, _WORKSPACE, ctypes.c_uint64(workspace_bytes))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(self.request.alignment))
        if self.request.dtype == "bfloat16":
            # The parts of a sum that is cut must not be rounded before they are added up.
            _set("MatmulPreference", preference, _REDUCTIONS, ctypes.c_uint32(_IN_COMPUTE_TYPE))
        found, count = (_Algorithm * most)(), ctypes.c_int()
        asked = (self.handle, self.description, *self._layouts_with_c(), preference)
        try:
            _call("cublasLtMatmulAlgoGetHeuristic", *asked, ctypes.c_int(most), found, ctypes.byref(count))
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        return [algorithm for algorithm in found[: count.value] if algorithm.state == 0]

    def checked(self, words: bytes) -> _Algorithm:
        """The algorithm of these bytes, and what it needs. Raises CublasError where it does not serve the request here."""
        result = _Algorithm()
        kept = _Words.from_buffer_copy(words)
        asked = (self.handle, self.description, *self._layouts_with_c(), ctypes.byref(kept))
        _call("cublasLtMatmulAlgoCheck", *asked, ctypes.byref(result))
        result.algorithm = kept
        return result

    def _layouts_with_c(self) -> tuple[ctypes.c_void_p, ...]:
        """Those of a, b, c and d: nothing is added, so c lies as d does."""
        return (*self.layouts, self.layouts[2])

    # Bound here: at the end of the process a module's names may be gone before its last objects.
    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Absent where __init__ failed.
        if hasattr(self, "idle") and not _is_finalizing():
            for layout in self.layouts:
                _call("cublasLtMatrixLayoutDestroy", layout)
            for description in (self.description, *[other for other in self.idle if other is not self.description]):
                _call("cublasLtMatmulDescDestroy", description)


def product(device: Device, request: Request) -> Product:
    """The product for a request by cuBLAS's first choice. Raises RuntimeError where it has none."""
    found = suggestions(device, request, 1, _WORKSPACE_BYTES)
    if not found:
        raise RuntimeError(f"cuBLAS has no algorithm for {request}")
    return found[0]


def suggestions(device: Device, request: Request, most: int, workspace_bytes: int) -> list[Product]:
    """Up to `most` products for a request with no more scratch memory than given, cuBLAS's best guess first.

    Raises CublasError where cuBLAS does not take the request at all.
    """
    operation = _Operation(device, request)
    return [Product(operation, algorithm) for algorithm in operation.suggestions(most, workspace_bytes)]


def restored(device: Device, request: Request, text: bytes) -> Product:
    """The product whose algorithm gave `text` on a like device, with the same version of cuBLAS.

    Raises ValueError where this is no such text, CublasError where its algorithm does not serve the request.
    """
    operation = _Operation(device, request)
    return Product(operation, operation.checked(bytes.fromhex(text.decode())))


def version() -> int:
    """Such as 130100 for 13.1."""
    loaded = library.load("cublasLt")
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(loaded.cublasLtGetVersion())


@cache
def _handle(device: Device) -> ctypes.c_void_p:
    cuda.choose(device)
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _describe(request: Request) -> ctypes.c_void_p:
    if request.dtype == "float64":
        compute, scale = _COMPUTE_64F, _TYPES["float64"]
    else:
        fast = request.allow_tf32 and request.dtype == "float32"
        compute, scale = _COMPUTE_32F_FAST_TF32 if fast else _COMPUTE_32F, _TYPES["float32"]
    description = ctypes.c_void_p()
    _call("cublasLtMatmulDescCreate", ctypes.byref(description), compute, scale)
    _set("MatmulDesc", description, _TRANSPOSE_A, ctypes.c_int32(request.a.transposed))
    _set("MatmulDesc", description, _TRANSPOSE_B, ctypes.c_int32(request.b.transposed))
    if request.has_bias:
        _set("MatmulDesc", description, _EPILOGUE, ctypes.c_uint32(_EPILOGUE_BIAS))
    return description


def _layout(matrix: Matrix, request: Request) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call(
        "cublasLtMatrixLayoutCreate",
        ctypes.byref(layout),
        _TYPES[request.dtype],
        ctypes.c_uint64(matrix.rows),
        ctypes.c_uint64(matrix.columns),
        ctypes.c_int64(matrix.leading),
    )
    if request.batch > 1:
        _set("MatrixLayout", layout, _BATCH_COUNT, ctypes.c_int32(request.batch))
        _set("MatrixLayout", layout, _BATCH_STRIDE, ctypes.c_int64(matrix.batch_stride))
    return layout


def _set(what: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"cublasLt{what}SetAttribute", target, attribute, ctypes.byref(value), size)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(library.load("cublasLt"), name)(*arguments)
    if status:
        raise CublasError(name, status)
