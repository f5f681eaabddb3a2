"""Matrix products through cuBLASLt, for operands of any strides; shapes and meanings as in the reference."""

from __future__ import annotations

from functools import lru_cache
from itertools import product as every
from math import prod

from framework import backends
from framework.device import Device
from framework.kernels.cuda import cublas, elementwise, launches, plan, reduction
from framework.kernels.cuda.cublas import Matrix, Request
from framework.kernels.table import kernel
from framework.vm import scratch
from framework.vm.array import Array, contiguous_stride

_TYPES = ("float32", "float64", "bfloat16")


@kernel(outputs=1)
def matmul(c: Array, a: Array, b: Array) -> None:
    """c = a @ b: [..., M, K] times [..., K, N], the leading dimensions broadcast."""
    _multiply(c, a, b)


@kernel(outputs=1)
def linear(y: Array, x: Array, weight: Array, bias: Array | None) -> None:
    """y = x · weightᵀ + bias, with x [N, I], weight [O, I], bias [O]."""
    _multiply(y, x, _transposed(weight), bias)


@kernel(outputs=3)
def linear_backward(
    grad_x: Array | None,
    grad_weight: Array | None,
    grad_bias: Array | None,
    grad_y: Array,
    x: Array | None,
    weight: Array | None,
) -> None:
    """grad_x = grad_y · weight, grad_weight = grad_yᵀ · x, grad_bias = Σ_n grad_y. What none of these needs may be left out."""
    if grad_x is not None:
        _multiply(grad_x, grad_y, weight)
    if grad_weight is not None:
        _multiply(grad_weight, _transposed(grad_y), x)
    if grad_bias is not None:
        reduction.sum(grad_bias, grad_y, axes=(0,), keepdims=False)


class Plan(plan.Plan):
    """A product of cuBLASLt's, of x and weight, with y as its result."""

    __slots__ = ("_product",)
    library = "cuBLASLt"

    def __init__(self, product: cublas.Product) -> None:
        super().__init__(product.device, product.workspace_bytes)
        self._product = product

    def text(self) -> bytes:
        """The product's algorithm."""
        return self._product.text()

    def _run_by_library(self, stream: int, at: launches.Addresses) -> None:
        self._product.launch(stream, *at)


# Products that cuBLAS takes as their operands lie, in one call.
_direct: dict[tuple, Plan] = {}


def _multiply(c: Array, a: Array, b: Array, bias: Array | None = None) -> None:
    """c = a @ b + bias along the last dimension."""
    key = (
        c.shape, c.stride, a.shape, a.stride, b.shape, b.stride, None if bias is None else bias.stride,
        c.dtype, c.storage.device, backends.cuda.matmul.allow_tf32,
    )  # fmt: skip
    product = _direct.get(key)
    at_a, at_b, at_c, at_bias = a.ptr, b.ptr, c.ptr, 0 if bias is None else bias.ptr
    if product is not None and not (at_a | at_b | at_c | at_bias) & 15:
        product.run(at_b, at_a, at_c, at_bias)
    else:
        _multiply_slowly(c, a, b, bias, key)


def _multiply_slowly(c: Array, a: Array, b: Array, bias: Array | None, key: tuple) -> None:
    """Everything but the usual case: the first call, empty operands, odd strides, and batches that take several calls."""
    if c.dtype.name not in _TYPES:
        raise TypeError(f"matrix products on {c.storage.device} take {', '.join(_TYPES)}, not {c.dtype.name}")
    if not c.size:
        return
    if not a.size:
        elementwise.fill(c, value=0)
        if bias is not None:
            elementwise.add(c, c, bias)
        return
    used_a, used_b = _row_or_column_major(a), _row_or_column_major(b)
    used_c = c if c.stride[-1] == 1 and _is_matrix(c) else _room(c)
    used_bias = _dense_copy(bias) if bias is not None and (bias.stride[0] != 1 or bias.ptr % 16) else bias
    calls = _batches(used_c, used_a, used_b)
    for batch, *starts in calls:
        pointers = tuple(
            [
                array.ptr + start * array.dtype.itemsize
                for array, start in zip((used_c, used_a, used_b), starts, strict=True)
            ]
        )
        product = _plan(used_c.storage.device, _request(used_c, used_a, used_b, used_bias is not None, batch, pointers))
        operands = (pointers[2], pointers[1], pointers[0], 0 if used_bias is None else used_bias.ptr)
        product.run(*operands)
        if len(calls) == 1 and used_a is a and used_b is b and used_c is c and used_bias is bias:
            if not (pointers[0] | pointers[1] | pointers[2]) & 15:
                product.learn(*operands)
                _direct[key] = product
    if used_c is not c:
        elementwise.copy(c, used_c)


@lru_cache(maxsize=4096)
def _plan(device: Device, request: Request) -> Plan:
    """What computes a request, by cuBLAS's first choice. Raises RuntimeError where it has none."""
    return Plan(cublas.product(device, request))


def _request(
    c: Array, a: Array, b: Array, has_bias: bool, batch: tuple[int, int, int, int], pointers: tuple[int, ...]
) -> Request:
    """One call: `batch` is the number of matrices and their strides.

    cuBLAS counts by columns, so that it sees the transpose of each row-major matrix: cᵀ = bᵀ · aᵀ.
    """
    count, step_c, step_a, step_b = batch
    aligned = pointers[0] | pointers[1] | pointers[2] | 16
    return Request(
        _seen_by_columns(b, step_b),
        _seen_by_columns(a, step_a),
        _seen_by_columns(c, step_c),
        count,
        c.dtype.name,
        backends.cuda.matmul.allow_tf32,
        has_bias,
        aligned & -aligned,
    )


def _seen_by_columns(array: Array, batch_stride: int) -> Matrix:
    """The transpose of a matrix, as cuBLAS sees what lies row by row."""
    rows, columns = array.shape[-2:]
    step_row, step_column = array.stride[-2:]
    if step_column == 1 or columns == 1:
        return Matrix(columns, rows, max(step_row, columns) if rows > 1 else columns, False, batch_stride)
    return Matrix(rows, columns, max(step_column, rows), True, batch_stride)


def _batches(c: Array, a: Array, b: Array) -> list[tuple]:
    """The calls that all leading dimensions take: (number of matrices and their strides), and where each starts."""
    leading = c.shape[:-2]
    strides = [c.stride[:-2], _broadcast_strides(a, leading), _broadcast_strides(b, leading)]
    count, steps, outer = 1, (0, 0, 0), len(leading)
    # From the innermost dimension outwards, as long as one stride serves each operand.
    while outer and (leading[outer - 1] == 1 or count == 1 or _continues(strides, steps, count, outer - 1)):
        if leading[outer - 1] > 1:
            if count == 1:
                steps = tuple([s[outer - 1] for s in strides])  # type: ignore[assignment]
            count *= leading[outer - 1]
        outer -= 1
    calls = []
    for place in every(*[range(extent) for extent in leading[:outer]]):
        starts = [sum(i * step for i, step in zip(place, s[:outer], strict=True)) for s in strides]
        calls.append(((count, *steps), *starts))
    return calls


def _continues(strides: list[tuple[int, ...]], steps: tuple[int, ...], count: int, dim: int) -> bool:
    return all(s[dim] == step * count for s, step in zip(strides, steps, strict=True))


def _broadcast_strides(array: Array, leading: tuple[int, ...]) -> tuple[int, ...]:
    own = array.shape[:-2]
    missing = len(leading) - len(own)
    kept = [0 if extent == 1 else step for extent, step in zip(own, array.stride, strict=False)]
    return (0,) * missing + tuple(kept)


def _row_or_column_major(array: Array) -> Array:
    """The array, or a dense copy where neither rows nor columns lie densely."""
    return array if _is_matrix(array) else _dense_copy(array)


def _is_matrix(array: Array) -> bool:
    (rows, columns), (step_row, step_column) = array.shape[-2:], array.stride[-2:]
    by_rows = (step_column == 1 or columns == 1) and (step_row >= columns or rows == 1)
    return by_rows or ((step_row == 1 or rows == 1) and (step_column >= rows or columns == 1))


def _transposed(array: Array) -> Array:
    return array.view(array.shape[::-1], array.stride[::-1])


def _room(array: Array) -> Array:
    """Scratch memory of the same shape and type, dense in row-major order."""
    room = scratch(array.storage.device, prod(array.shape) * array.dtype.itemsize)
    return Array(room.storage, array.shape, contiguous_stride(array.shape), array.dtype)


def _dense_copy(array: Array) -> Array:
    copy = _room(array)
    elementwise.copy(copy, array)
    return copy
