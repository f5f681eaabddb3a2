"""cuBLASLt through ctypes: matrix products with handles of their own and scratch memory from the vm's allocator."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any, NamedTuple

from framework.device import Device
from framework.kernels.cuda import library
from framework.vm import cuda, scratch

_WORKSPACE_BYTES = 32 * 1024 * 1024
_WORKSPACE_ALIGNMENT = 256
# cudaDataType_t, cublasComputeType_t.
_TYPES = {"float32": 0, "float64": 1, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70
# cublasLtMatmulDescAttributes_t, cublasLtMatrixLayoutAttribute_t, cublasLtMatmulPreferenceAttributes_t.
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
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


class CublasError(RuntimeError):
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


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Product:
    """A prepared product of one request on one device."""

    def __init__(self, device: Device, request: Request) -> None:
        self.device = device
        self._handle = _handle(device)
        scalar: Any = ctypes.c_double if request.dtype == "float64" else ctypes.c_float
        self._one, self._zero = scalar(1), scalar(0)
        self._description = _describe(request)
        self._layouts = [_layout(matrix, request) for matrix in (request.a, request.b, request.d)]
        self._algorithm = self._find(request)
        self.workspace_bytes = int(self._algorithm.workspace_bytes)

    def run(self, a: int, b: int, d: int, bias: int = 0) -> None:
        """Multiplies the matrices at these addresses."""
        stream = cuda.stream_pointer(self.device)
        room, workspace = None, 0
        if self.workspace_bytes:
            room = scratch(self.device, self.workspace_bytes + _WORKSPACE_ALIGNMENT)
            workspace = -(-room.storage.ptr // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        pointer = ctypes.c_void_p
        if bias:
            _set("MatmulDesc", self._description, _BIAS_POINTER, pointer(bias))
        layout_a, layout_b, layout_d = self._layouts
        _call(
            "cublasLtMatmul",
            self._handle,
            self._description,
            ctypes.byref(self._one),
            pointer(a),
            layout_a,
            pointer(b),
            layout_b,
            ctypes.byref(self._zero),
            pointer(d),
            layout_d,
            pointer(d),
            layout_d,
            ctypes.byref(self._algorithm),
            pointer(workspace),
            ctypes.c_size_t(self.workspace_bytes),
            pointer(stream),
        )

    def _find(self, request: Request) -> _Algorithm:
        """cuBLAS's first choice within the workspace."""
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        _set("MatmulPreference", preference, _WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
        for attribute in _ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(request.alignment))
        found, count = _Algorithm(), ctypes.c_int()
        layout_a, layout_b, layout_d = self._layouts
        try:
            _call(
                "cublasLtMatmulAlgoGetHeuristic",
                self._handle,
                self._description,
                layout_a,
                layout_b,
                layout_d,
                layout_d,
                preference,
                1,
                ctypes.byref(found),
                ctypes.byref(count),
            )
        finally:
            _call("cublasLtMatmulPreferenceDestroy", preference)
        if not count.value:
            raise RuntimeError(f"cuBLAS has no algorithm for {request}")
        return found


def version() -> int:
    """Such as 130100 for 13.1."""
    loaded = library.load("cublasLt")
    loaded.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(loaded.cublasLtGetVersion())


@lru_cache(maxsize=4096)
def product(device: Device, request: Request) -> Product:
    """The product for a request, prepared at the first call."""
    return Product(device, request)


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
