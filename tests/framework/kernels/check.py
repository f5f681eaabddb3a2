"""The check that every kernel of every device's table has to pass: its values against the reference in float64.

    @pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64)))
    def test_values(name, case, dtype):
        check.kernel(cpu, TABLE, name, case, dtype)

Each case runs in every layout: row-major, NHWC, sliced, transposed, and mixed (float64 in two of them). Outputs hold poison beforehand, so that
an element that is not written shows, and gaps between elements hold it too, so that a write outside the view shows.
An element may be off by a few roundings of the terms that were added up to make it, not by a fixed amount.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from framework import dtype as dtypes
from framework.device import Device, cpu
from framework.dtype import DType, float32, float64
from framework.kernels import reference
from framework.kernels.table import Table
from framework.vm import Array, Instruction, Runtime, machine, runtime
from tests.framework.kernels.cases import CASES, Alias, Before, Case, InOut, Opaque, Out

LAYOUTS = ("row-major", "channels-last", "channel slice", "sliced", "transposed", "mixed", "odd strides of 1")
# How many roundings of the sum of the terms' magnitudes an element may be off by. A sum of K terms of random sign errs by
# √K roundings of one term, far less than one of K terms; what is left is for transcendental functions and Winograd.
ROUNDINGS = 8


def all_cases(dtypes: tuple[DType, ...] = (float32,), names: tuple[str, ...] | None = None) -> list[Any]:
    """Parameters (kernel's name, case, element type) for every case, or for those of the kernels named."""
    return [
        pytest.param(name, case, dtype, id=f"{name}-{case.name}-{dtype.name}".replace(" ", "_"))
        for name, cases in CASES.items()
        if names is None or name in names
        for case in cases
        for dtype in dtypes
    ]


def kernel(
    device: Device, table: Table, name: str, case: Case, dtype: DType = float32, *, epsilon: float | None = None
) -> None:
    """Runs a case in every layout and compares. `epsilon` is the spacing of numbers near 1, that of `dtype` if not given.

    Raises AssertionError naming kernel, case, layout and the worst element.
    """
    expected = _run(cpu, reference.TABLE, name, case, float64, "row-major", rounded_to=dtype)
    with np.errstate(all="ignore"):
        terms = _terms(name, case, dtype, expected)
    if epsilon is None:
        # bfloat16 keeps 8 bits of a number.
        epsilon = 2.0**-7 if dtype.numpy is None else float(np.finfo(dtype.numpy).eps)
    for layout in LAYOUTS if dtype is not float64 else ("row-major", "mixed"):
        if layout == "odd strides of 1" and not _has_unit_extent(case):
            continue
        got = _run(device, table, name, case, dtype, layout, poison=expected)
        where = f"{table.name}.{name}, case {case.name!r}, {dtype.name}, {layout}"
        for index, (mine, theirs, size) in enumerate(zip(got.outputs, expected.outputs, terms, strict=True)):
            if mine is not None and theirs is not None:
                _compare(f"{where}, output {index}", mine, theirs, ROUNDINGS * epsilon * np.asarray(size))
        got.assert_nothing_else_written(where)


# ---- running a case


@dataclass
class _Placed:
    """An array on the device inside a larger one, whose other elements are poison."""

    array: Array
    whole: Array
    is_gap: np.ndarray
    before: np.ndarray


@dataclass
class _Run:
    """What a call left behind. `operands` are the arrays, outputs first; `outputs` their values, None for opaque ones."""

    operands: list[Any]
    outputs: list[np.ndarray | None]
    read: list[_Placed]
    written: list[_Placed]
    kernels: Runtime

    def assert_nothing_else_written(self, where: str) -> None:
        for placed in self.read:
            after = np.array(self.kernels.to_host(placed.whole))
            assert np.array_equal(after, placed.before, equal_nan=after.dtype.kind == "f"), (
                f"{where}: wrote to an input"
            )
        for placed in self.written:
            after = np.array(self.kernels.to_host(placed.whole))[placed.is_gap]
            before = placed.before[placed.is_gap]
            assert np.array_equal(after, before, equal_nan=after.dtype.kind == "f"), f"{where}: wrote outside an output"


def _run(
    device: Device,
    table: Table,
    name: str,
    case: Case,
    dtype: DType,
    layout: str,
    *,
    poison: _Run | None = None,
    rounded_to: DType | None = None,
) -> _Run:
    kernels = runtime(device)
    before = None
    if case.before is not None:
        before = _run(device, table, *case.before, dtype, layout, rounded_to=rounded_to)
    inputs: list[Any] = []
    read: list[_Placed] = []
    for position, given in enumerate(case.inputs):
        if isinstance(given, np.ndarray):
            kind = dtype if given.dtype.kind == "f" else dtypes.from_numpy(given.dtype)
            if rounded_to is not None and given.dtype.kind == "f":
                given = _rounded(given, rounded_to)
            placed = _place(kernels, given, kind, _layout_of(layout, position))
            if Alias(position) not in case.outputs:
                read.append(placed)
            inputs.append(placed.array)
        else:
            inputs.append(_taken(before, given) if isinstance(given, Before) else given)
    outputs: list[Any] = []
    written: list[_Placed] = []
    for position, given in enumerate(case.outputs):
        if isinstance(given, Opaque):
            outputs.append(_opaque(kernels, table, given, case, inputs, layout))
        elif isinstance(given, Out | InOut):
            want = None if poison is None else poison.outputs[position]
            values = _initial(given, want, dtype)
            if rounded_to is not None and values.dtype.kind == "f":
                values = _rounded(values, rounded_to)
            placed = _place(kernels, values, given.dtype or dtype, _layout_of(layout, position + 1))
            written.append(placed)
            outputs.append(placed.array)
        else:
            outputs.append(inputs[given.input] if isinstance(given, Alias) else given)
    instruction = Instruction(table.kernels[name], (*outputs, *inputs), case.attributes)
    machine.issue(instruction, kernels.compute)
    machine.synchronize()
    values = [
        np.array(kernels.to_host(array)) if array is not None and not isinstance(given, Opaque) else None
        for array, given in zip(outputs, case.outputs, strict=True)
    ]
    return _Run([*outputs, *inputs], values, read, written, kernels)


def _initial(given: Out | InOut, want: np.ndarray | None, dtype: DType) -> np.ndarray:
    """What an output holds before the call: what it is to be updated from, or what cannot be the result."""
    if isinstance(given, InOut):
        return given.values
    kind = _host_type(given.dtype or dtype)
    if kind.kind == "f":
        poison = np.full(given.shape, np.nan)
        return poison if want is None else np.where(np.isnan(want), 0.0, poison)
    return np.zeros(given.shape, kind) if want is None else (want == 0).astype(kind)


def _taken(before: _Run | None, given: Before) -> Any:
    """The operand of the call made before, or the one that stands in for it."""
    assert before is not None
    operand = before.operands[given.operand]
    return before.operands[given.otherwise] if operand is None and given.otherwise is not None else operand


def _opaque(kernels: Runtime, table: Table, given: Opaque, case: Case, inputs: list[Any], layout: str) -> Array | None:
    """Room for what only the table's own backward can read, laid out as the operations do it."""
    kind = given.kind(table, inputs, case.attributes)
    if kind is None:
        return None
    dtype, shape = kind
    is_image = len(shape) == 4 and layout == "channels-last"
    values = np.full(shape, 0xA5, _host_type(dtype))
    return _place(kernels, values, dtype, "channels-last" if is_image else "row-major").array


def _host_type(dtype: DType) -> np.dtype:
    """What NumPy holds the numbers of `dtype` in."""
    return np.dtype(np.float32) if dtype.numpy is None else dtype.numpy


def _rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    """`values` as `dtype` holds them, with repeated elements still repeated."""
    core = values[tuple(slice(0, 1) if step == 0 else slice(None) for step in values.strides)]
    kernels = runtime(cpu)
    held = np.array(kernels.to_host(kernels.from_host(core, dtype)), np.float64)
    return np.broadcast_to(held, values.shape)


# ---- layouts


def _layout_of(layout: str, position: int) -> str:
    return LAYOUTS[position % 5] if layout == "mixed" else layout


def _place(kernels: Runtime, values: np.ndarray, dtype: DType, layout: str) -> _Placed:
    """Puts values on the device in a layout. What NumPy repeats by a stride of 0 is repeated there too."""
    repeated = [step == 0 and extent > 1 for extent, step in zip(values.shape, values.strides, strict=True)]
    core = values[tuple(slice(0, 1) if again else slice(None) for again in repeated)]
    stride, offset, size = _geometry(core.shape, layout)
    flat = np.full(size, np.nan if dtype.is_floating else 1, _host_type(dtype))
    is_gap = np.ones(size, bool)
    with np.errstate(invalid="ignore"):
        _strided(flat, core.shape, stride, offset)[...] = core
    if dtype.numpy is None:
        flat = dtype.decode(dtype.encode(flat))  # as the device gives it back where nothing writes
    _strided(is_gap, core.shape, stride, offset)[...] = False
    whole = kernels.from_host(flat, dtype)
    shown = [0 if again else step for again, step in zip(repeated, stride, strict=True)]
    if layout == "odd strides of 1":
        shown = [3 if extent == 1 else step for extent, step in zip(values.shape, shown, strict=True)]
    held = flat if dtype.numpy is not None else dtype.decode(dtype.encode(flat))
    return _Placed(whole.view(values.shape, tuple(shown), offset), whole, is_gap, held)


def _strided(flat: np.ndarray, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> np.ndarray:
    size = flat.itemsize
    return np.ndarray(shape, flat.dtype, flat, offset * size, tuple([step * size for step in stride]))


def _geometry(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], int, int]:
    """Strides, offset and size of the whole, in elements."""
    order = list(range(len(shape)))
    if layout in ("channels-last", "channel slice") and len(shape) == 4:
        order = [0, 2, 3, 1]
    elif layout == "transposed":
        order.reverse()
    gap = 1 if layout in ("channel slice", "sliced") else 0
    step = 2 if layout == "sliced" else 1
    offset = 5 if gap else 0
    stride = [0] * len(shape)
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1) + gap
    return tuple(stride), offset, offset + step


def _has_unit_extent(case: Case) -> bool:
    operands = [given.shape for given in (*case.inputs, *case.outputs) if isinstance(given, np.ndarray | Out)]
    return any(1 in shape for shape in operands)


# ---- comparing


def _terms(name: str, case: Case, dtype: DType, expected: _Run) -> list[Any]:
    """For each output the sum of the magnitudes of what is added up in it."""
    if case.terms is not None:
        host = runtime(cpu).to_host
        inputs = [np.array(host(a)) if isinstance(a, Array) else a for a in expected.operands[len(case.outputs) :]]
        for alias in case.outputs:
            if isinstance(alias, Alias):
                # What was there before the output was written over it.
                inputs[alias.input] = case.inputs[alias.input]
        return case.terms(inputs, case.attributes, expected.outputs)
    positive = replace(case, inputs=tuple(_magnitude(given) for given in case.inputs))
    return _run(cpu, reference.TABLE, name, positive, float64, "row-major", rounded_to=dtype).outputs


def _magnitude(given: Any) -> Any:
    is_number = isinstance(given, float) or (isinstance(given, np.ndarray) and given.dtype.kind == "f")
    return np.asarray(np.abs(given)) if is_number else given


def _compare(where: str, got: np.ndarray, expected: np.ndarray, tolerance: np.ndarray) -> None:
    assert got.shape == expected.shape, f"{where}: shape {got.shape}, expected {expected.shape}"
    if got.dtype.kind != "f":
        assert np.array_equal(got, expected), f"{where}: {got} differs from {expected}"
        return
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - expected)
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    smallest = float(np.finfo(got.dtype).tiny)
    wrong = ~(same | (error <= tolerance + smallest))
    if np.any(wrong):
        excess = np.where(wrong, np.where(np.isnan(error), np.inf, error) / (tolerance + smallest), 0)
        worst = np.unravel_index(np.argmax(excess), got.shape)
        raise AssertionError(
            f"{where}: {wrong.sum()} of {wrong.size} elements are off; at {tuple(map(int, worst))} "
            f"{got[worst]} for {expected[worst]}, {excess[worst]:.3g} times the tolerance"
        )
