"""What each kernel is tried with: the one list that a new kernel adds its cases to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from framework.dtype import DType, bool_, float64, int64, uint8


@dataclass(frozen=True)
class Out:
    """An output that the kernel writes; of the element type under test where none is named."""

    shape: tuple[int, ...]
    dtype: DType | None = None


@dataclass(frozen=True, eq=False)
class InOut:
    """An output that the kernel updates from these values."""

    values: np.ndarray
    dtype: DType | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@dataclass(frozen=True)
class Alias:
    """An output that is the array of an input."""

    input: int


@dataclass(frozen=True, eq=False)
class Opaque:
    """An output that only the same table's backward reads: `kind(table, inputs, attributes)` gives type and shape.

    It gives None where the table writes no such output.
    """

    kind: Callable[..., tuple[DType, tuple[int, ...]] | None]


@dataclass(frozen=True)
class Before:
    """An input that is operand number `operand` (outputs first) of the call that the case makes before.

    Where that call had none, `otherwise` is the operand that stands in.
    """

    operand: int
    otherwise: int | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """One call. Arrays of floats take the element type under test.

    `before` is a call (kernel's name, case) whose operands this one uses. `terms(inputs, attributes, outputs)` gives for
    each output the sum of the magnitudes of what is added up in it; where it is left out, the reference is run on the
    magnitudes of the inputs, which is that sum for everything that adds up products.
    """

    name: str
    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    before: tuple[str, Case] | None = None
    terms: Callable[[list[Any], dict[str, Any], list[Any]], list[Any]] | None = None


Cases = Iterator[tuple[str, Case]]
# Above 8192 elements a device may take another way than for small arrays.
LARGE = (2, 16, 20, 24)


def draw(*shape: int, seed: int = 0, low: float | None = None) -> np.ndarray:
    """Normal numbers, or uniform ones from `low` to `low` + 1."""
    random = np.random.default_rng([seed, *shape])
    return random.standard_normal(shape) if low is None else random.uniform(low, low + 1, shape)


# ---- elementwise


def elementwise() -> Cases:
    for name in ("add", "subtract", "multiply", "divide"):
        for label, shape, a, b in _pairs(low=0.5 if name == "divide" else None):
            yield name, Case(label, (Out(shape),), (a, b), terms=_sum_of_both if name == "subtract" else None)
        a, b = draw(3, 4, 2, 5), draw(3, 4, 2, 5, seed=1, low=0.5)
        yield name, Case("in place", (Alias(0),), (a, b), terms=_sum_of_both if name == "subtract" else None)
        large, other = draw(*LARGE), draw(*LARGE, seed=1, low=0.5)
        yield (
            name,
            Case("large in place", (Alias(0),), (large, other), terms=_sum_of_both if name == "subtract" else None),
        )
    for name in ("subtract", "divide"):
        a = draw(3, 4, low=0.5)
        yield name, Case("number first", (Out((3, 4)),), (2.5, a), terms=_sum_of_both if name == "subtract" else None)
    ones, zeros = np.array([1.0, -1.0, 0.0, np.nan]), np.zeros(4)
    yield "divide", Case("by zero", (Out((4,)),), (ones, zeros))
    ints = np.array([[1, 2, 3], [4, -5, 6]])
    yield "add", Case("integers", (Out((2, 3), int64),), (ints, ints))
    for name in ("negative", "exp", "log", "sqrt", "relu"):
        for label, values in _singles(low=0.5 if name in ("log", "sqrt") else None):
            yield name, Case(label, (Out(values.shape),), (values,), terms=_result)
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-30, 80.0])
    for name in ("negative", "exp", "log", "sqrt", "relu"):
        yield name, Case("special values", (Out((9,)),), (special,), terms=_result)
    yield "negative", Case("in place", (Alias(0),), (draw(3, 4),))
    for label, y in (
        ("images", draw(2, 3, 4, 5)),
        ("large", draw(*LARGE)),
        ("1x1", draw(3, 8, 1, 1)),
        ("empty", draw(0, 3, 2, 2)),
    ):
        y = np.maximum(y, 0)
        yield "relu_backward", Case(label, (Out(y.shape),), (draw(*y.shape, seed=1), y))
    y = np.array([0.0, 1.0, np.inf, np.nan, 1e-30, 80.0])
    yield "relu_backward", Case("special values", (Out((6,)),), (draw(6, seed=1), y))
    repeated = np.broadcast_to(np.array(0.25), (2, 3, 4, 5))
    yield "relu_backward", Case("repeated gradient", (Out((2, 3, 4, 5)),), (repeated, np.maximum(draw(2, 3, 4, 5), 0)))
    same = np.array([[1.0, 2.0, np.nan], [0.0, -0.0, np.inf]])
    yield "equal", Case("values", (Out((2, 3), bool_),), (same, same[:, ::-1].copy()))
    yield "equal", Case("same", (Out((2, 3), bool_),), (same, same))
    yield "equal", Case("number", (Out((2, 3), bool_),), (same, 2.0))
    yield "equal", Case("integers", (Out((2, 3), bool_),), (ints, ints[1]))
    yield "equal", Case("empty", (Out((0, 3), bool_),), (draw(0, 3), draw(0, 3)))


def copies() -> Cases:
    for label, values in _singles():
        yield "copy", Case(label, (Out(values.shape),), (values,))
    yield "copy", Case("broadcast", (Out((2, 3, 4)),), (draw(3, 1),))
    yield "copy", Case("to float64", (Out(LARGE, float64),), (draw(*LARGE),))
    yield "copy", Case("to integers", (Out((3, 4), int64),), (draw(3, 4) * 10,))
    yield "copy", Case("from integers", (Out((2, 3)),), (np.array([[1, -2, 3], [4, 5, 6]]),))
    yield "copy", Case("from bool", (Out((3,)),), (np.array([True, False, True]),))
    yield "copy", Case("repeated", (Out((2, 3, 4, 5)),), (np.broadcast_to(draw(3, 1, 1), (2, 3, 4, 5)),))
    yield "copy", Case("repeated, large", (Out(LARGE),), (np.broadcast_to(draw(16, 1, 1), LARGE),))
    for label, shape in (
        ("images", (2, 3, 4, 5)),
        ("large", LARGE),
        ("0-d", ()),
        ("empty", (2, 0)),
        ("1x1", (3, 8, 1, 1)),
    ):
        yield "fill", Case(label, (Out(shape),), (), {"value": -1.5}, terms=_result)
    yield "fill", Case("integers", (Out((3, 2), int64),), (), {"value": 7})


def _pairs(low: float | None) -> Iterator[tuple[str, tuple[int, ...], Any, Any]]:
    def second(*shape: int) -> np.ndarray:
        return draw(*shape, seed=1, low=low)

    yield "vector", (7,), draw(7), second(7)
    yield "images", (2, 3, 4, 5), draw(2, 3, 4, 5), second(2, 3, 4, 5)
    yield "large", LARGE, draw(*LARGE), second(*LARGE)
    yield "1x1", (3, 8, 1, 1), draw(3, 8, 1, 1), second(3, 8, 1, 1)
    yield "0-d", (), draw(), second()
    yield "empty", (0, 3), draw(0, 3), second(0, 3)
    yield "channels broadcast", (2, 3, 4, 5), draw(2, 3, 4, 5), second(3, 1, 1)
    yield "both broadcast", (4, 3, 5), draw(4, 1, 5), second(3, 1)
    yield "large with a row", LARGE, draw(*LARGE), second(LARGE[-1])
    yield "large with 0-d", LARGE, draw(*LARGE), second()
    yield "number", (3, 4), draw(3, 4), 1.5
    yield "repeated", LARGE, draw(*LARGE), np.broadcast_to(second(1), LARGE)


def _singles(low: float | None = None) -> Iterator[tuple[str, np.ndarray]]:
    for label, shape in (
        ("vector", (7,)), ("images", (2, 3, 4, 5)), ("large", LARGE), ("matrix", (90, 110)), ("1x1", (3, 8, 1, 1)),
        ("0-d", ()), ("empty", (0, 3, 2, 2)),
    ):  # fmt: skip
        yield label, draw(*shape, low=low)


def _sum_of_both(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    return [np.abs(inputs[0]) + np.abs(inputs[1])]


def _off_by(*sizes: float) -> Callable[..., list[Any]]:
    return lambda inputs, attributes, outputs: list(sizes)


def _result(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    return [None if a is None else np.abs(a) for a in outputs]


# ---- reductions and random numbers


def reductions() -> Cases:
    images, ints = draw(2, 3, 4, 5), np.arange(24).reshape(2, 3, 4) - 7
    for axes, keepdims, shape in (
        ((0, 1, 2, 3), False, ()),
        ((0, 2, 3), False, (3,)),
        ((0, 2, 3), True, (1, 3, 1, 1)),
        ((1,), True, (2, 1, 4, 5)),
        ((3, 0), False, (3, 4)),
        ((), False, (2, 3, 4, 5)),
    ):
        for name in ("sum", "mean", "max"):
            terms = _result if name == "max" else None
            attributes = {"axes": axes, "keepdims": keepdims}
            yield name, Case(f"axes {axes} {'kept' * keepdims}", (Out(shape),), (images,), attributes, terms=terms)
    large = {"axes": (0, 2, 3), "keepdims": False}
    repeated = np.broadcast_to(draw(16, 1, 1), LARGE)
    for name in ("sum", "mean", "max"):
        terms = _result if name == "max" else None
        yield name, Case("large", (Out((16,)),), (draw(*LARGE),), large, terms=terms)
        yield name, Case("repeated", (Out((16,)),), (repeated,), large, terms=terms)
        yield (
            name,
            Case("1x1", (Out((2, 5, 1, 1)),), (draw(2, 5, 1, 1),), {"axes": (2, 3), "keepdims": True}, terms=terms),
        )
        yield name, Case("empty result", (Out((0,)),), (draw(0, 4),), {"axes": (1,), "keepdims": False}, terms=terms)
    for name in ("sum", "mean"):
        yield name, Case("empty sum", (Out((3,)),), (draw(0, 3),), {"axes": (0,), "keepdims": False})
    yield "sum", Case("integers", (Out((3,), int64),), (ints,), {"axes": (0, 2), "keepdims": False})
    yield (
        "max",
        Case("NaN", (Out((2,)),), (np.array([[1, np.nan], [2, 3]]),), {"axes": (1,), "keepdims": False}, terms=_result),
    )
    for axis, shape in ((0, (3, 4, 5)), (1, (2, 4, 5)), (3, (2, 3, 4))):
        yield "argmax", Case(f"axis {axis}", (Out(shape, int64),), (images,), {"axis": axis})
    ties = np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 1.0], [1.0, np.nan, 5.0]])
    yield "argmax", Case("first of equals", (Out((3,), int64),), (ties,), {"axis": 1})
    yield "argmax", Case("empty", (Out((0,), int64),), (draw(0, 3),), {"axis": 1})


def random_numbers() -> Cases:
    for label, shape in (
        ("vector", (7,)),
        ("images", (2, 3, 4, 5)),
        ("large", LARGE),
        ("0-d", ()),
        ("empty", (0, 2)),
        ("1x1", (3, 2, 1, 1)),
    ):
        where = {"seed": 2**40 + 17, "offset": 2**33 + 5}
        yield (
            "random_uniform",
            Case(label, (Out(shape),), (), {**where, "low": -2.0, "high": 3.0}, terms=_off_by(3)),
        )
        # A cosine near 0 is off by a rounding of its angle times the radius, which is 5.8 at most.
        yield (
            "random_normal",
            Case(label, (Out(shape),), (), {**where, "mean": 1.0, "std": 2.0}, terms=_off_by(1 + 2 * 6 * 2)),
        )


# ---- matrix products and losses


def products() -> Cases:
    for label, a, b in (
        ("matrices", draw(4, 3), draw(3, 5, seed=1)),
        ("large", draw(130, 96), draw(96, 100, seed=1)),
        ("batch", draw(2, 4, 3), draw(2, 3, 5, seed=1)),
        ("broadcast batch", draw(2, 1, 4, 3), draw(6, 3, 5, seed=1)),
        ("one column", draw(4, 3), draw(3, 1, seed=1)),
        ("one element", draw(1, 1), draw(1, 1, seed=1)),
        ("nothing to add", draw(4, 0), draw(0, 5, seed=1)),
        ("empty", draw(0, 3), draw(3, 5, seed=1)),
        ("repeated", np.broadcast_to(draw(1, 3), (4, 3)), draw(3, 5, seed=1)),
    ):
        leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        yield "matmul", Case(label, (Out((*leading, a.shape[-2], b.shape[-1])),), (a, b))
    for label, n, i, o in (("small", 4, 3, 5), ("large", 65, 96, 130), ("empty", 0, 3, 5), ("one", 1, 1, 1)):
        x, weight, bias, grad = draw(n, i), draw(o, i, seed=1), draw(o, seed=2), draw(n, o, seed=3)
        yield "linear", Case(label, (Out((n, o)),), (x, weight, bias))
        yield "linear", Case(f"{label} without bias", (Out((n, o)),), (x, weight, None))
        shapes = (Out((n, i)), Out((o, i)), Out((o,)))
        yield "linear_backward", Case(label, shapes, (grad, x, weight))
        for only in range(3):
            some = tuple(out if k == only else None for k, out in enumerate(shapes))
            yield "linear_backward", Case(f"{label}, only {only}", some, (grad, x, weight))
        repeated = np.broadcast_to(np.array(0.5), (n, o))
        yield "linear_backward", Case(f"{label}, repeated gradient", shapes, (repeated, x, weight))


def losses() -> Cases:
    for label, n, c, scale in (
        ("small", 5, 4, 1.0),
        ("wide", 3, 1000, 3.0),
        ("large scores", 4, 3, 1e4),
        ("one class", 3, 1, 1.0),
    ):
        logits, target = draw(n, c) * scale, np.arange(n) * 7 % c
        for kind in (np.int64, np.int32):
            forward = Case(
                f"{label} {kind.__name__}",
                (Out(()), Out((n, c))),
                (logits, target.astype(kind)),
                terms=_cross_entropy_terms,
            )
            yield "cross_entropy", forward
            before = ("cross_entropy", forward)
            yield "cross_entropy_backward", Case(
                forward.name, (Out((n, c)),), (np.array(0.75), Before(1), Before(3)), {}, before, _off_by(2 + scale)
            )  # fmt: skip
    none = np.zeros(0, np.int64)
    yield "cross_entropy", Case("empty", (Out(()), Out((0, 4))), (draw(0, 4), none), terms=_off_by(0, 0))
    yield "cross_entropy_backward", Case("empty", (Out((0, 4)),), (np.array(1.0), draw(0, 4), none), terms=_off_by(0))


def _cross_entropy_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    # The scores' own rounding is taken out by the exponential: e^(s + δ) = e^s (1 + δ).
    scores = np.abs(inputs[0])
    size = scores + scores.max(axis=1, keepdims=True) + np.log(scores.shape[1])
    return [np.mean(size.max(axis=1)), outputs[1] * (1 + size)]


# ---- convolution and pooling


def convolutions() -> Cases:
    for label, x, weight, geometry in (
        ("3x3", (2, 3, 6, 5), (4, 3, 3, 3), {"padding": (1, 1)}),
        ("3x3 wide", (2, 16, 9, 10), (32, 16, 3, 3), {"padding": (1, 1)}),
        ("3x3 stride 2", (2, 16, 9, 8), (16, 16, 3, 3), {"padding": (1, 1), "stride": (2, 2)}),
        ("1x1", (2, 8, 5, 6), (16, 8, 1, 1), {}),
        ("1x1 stride 2", (2, 8, 6, 5), (16, 8, 1, 1), {"stride": (2, 2)}),
        ("7x7 stem", (2, 3, 20, 18), (16, 3, 7, 7), {"padding": (3, 3), "stride": (2, 2)}),
        ("oblong", (1, 2, 7, 9), (3, 2, 3, 2), {"padding": (2, 0), "stride": (1, 3)}),
        ("dilated", (2, 3, 9, 8), (4, 3, 3, 2), {"padding": (2, 1), "dilation": (2, 3)}),
        ("groups", (2, 6, 5, 4), (9, 2, 3, 3), {"padding": (1, 1), "groups": 3}),
        ("depthwise", (2, 8, 6, 6), (8, 1, 3, 3), {"padding": (1, 1), "groups": 8}),
        ("1x1 image", (3, 8, 1, 1), (16, 8, 1, 1), {}),
        ("1x1 image, 3x3 kernel", (3, 8, 1, 1), (8, 8, 3, 3), {"padding": (1, 1)}),
        ("1x1 result", (2, 8, 3, 3), (16, 8, 3, 3), {}),
        ("kernel larger than the images", (3, 16, 2, 2), (8, 16, 3, 3), {"padding": (1, 1)}),
        ("kernel larger than the images, many channels", (2, 64, 2, 2), (64, 64, 3, 3), {"padding": (1, 1)}),
        ("kernel larger than the images, stride 2", (2, 8, 2, 3), (16, 8, 5, 7), {"padding": (4, 3), "stride": (2, 2)}),
        ("kernel larger than the images, dilated", (2, 8, 3, 2), (8, 8, 3, 3), {"padding": (3, 3), "dilation": (3, 2)}),
        ("kernel larger than the images, groups", (2, 8, 2, 2), (8, 4, 3, 3), {"padding": (1, 1), "groups": 2}),
        ("padding wider than the kernel", (2, 8, 2, 1), (8, 8, 3, 3), {"padding": (4, 5)}),
        ("one channel", (2, 1, 4, 4), (1, 1, 3, 3), {}),
        ("rows left over", (1, 2, 8, 8), (2, 2, 3, 3), {"stride": (3, 3)}),
        ("empty batch", (0, 3, 6, 5), (4, 3, 3, 3), {"padding": (1, 1)}),
    ):
        yield from _convolution(label, x, weight, geometry)


def _convolution(label: str, x: tuple[int, ...], weight: tuple[int, ...], geometry: dict[str, Any]) -> Cases:
    geometry = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **geometry}
    size = [
        (x[2 + i] + 2 * geometry["padding"][i] - geometry["dilation"][i] * (weight[2 + i] - 1) - 1)
        // geometry["stride"][i]
        + 1
        for i in (0, 1)
    ]
    y, bias = (x[0], weight[0], *size), weight[:1]
    images, filters, gradient = draw(*x), draw(*weight, seed=1), draw(*y, seed=2)
    yield "conv2d", Case(label, (Out(y),), (images, filters, None), geometry)
    yield "conv2d", Case(f"{label} with bias", (Out(y),), (images, filters, draw(*bias, seed=3)), geometry)
    yield "conv2d_backward_input", Case(label, (Out(x),), (gradient, filters), geometry)
    yield "conv2d_backward_weight", Case(label, (Out(weight), None), (gradient, images), geometry)
    yield "conv2d_backward_weight", Case(f"{label} with bias", (Out(weight), Out(bias)), (gradient, images), geometry)
    repeated = np.broadcast_to(np.array(0.5), y)
    yield "conv2d_backward_input", Case(f"{label}, repeated gradient", (Out(x),), (repeated, filters), geometry)
    yield (
        "conv2d_backward_weight",
        Case(f"{label}, repeated gradient", (Out(weight), Out(bias)), (repeated, images), geometry),
    )


def pooling() -> Cases:
    ties = np.zeros((1, 2, 5, 5))
    nans = draw(1, 2, 6, 6)
    nans[0, 0, 2, 3] = nans[0, 1, 0, 0] = np.nan
    low = np.full((1, 1, 4, 4), -np.inf)
    for label, x, kernel, stride, padding in (
        ("3x3 stride 2", draw(2, 3, 9, 8), (3, 3), (2, 2), (1, 1)),
        ("many channels", draw(2, 16, 12, 12), (3, 3), (2, 2), (1, 1)),
        ("2x2", draw(2, 3, 6, 7), (2, 2), (2, 2), (0, 0)),
        ("oblong", draw(1, 2, 7, 9), (2, 3), (1, 2), (1, 0)),
        ("apart", draw(1, 2, 9, 9), (2, 2), (3, 3), (0, 0)),
        ("1x1 image", draw(3, 8, 1, 1), (1, 1), (1, 1), (0, 0)),
        ("1x1 image padded", draw(3, 8, 1, 1), (3, 3), (2, 2), (1, 1)),
        ("all negative", -np.abs(draw(2, 8, 5, 5)) - 1, (3, 3), (2, 2), (1, 1)),
        ("first of equals", ties, (3, 3), (2, 2), (1, 1)),
        ("NaN", nans, (3, 3), (2, 2), (1, 1)),
        ("minus infinity", low, (2, 2), (2, 2), (0, 0)),
        ("empty batch", draw(0, 3, 6, 5), (3, 3), (2, 2), (1, 1)),
    ):
        geometry = {"kernel": kernel, "stride": stride, "padding": padding}
        size = [(x.shape[2 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]
        y = (*x.shape[:2], *size)
        forward = Case(label, (Out(y), Opaque(_pooling_indices)), (x,), geometry, terms=_result)
        yield "max_pool2d", forward
        for kind, gradient in (("", draw(*y, seed=2)), (", repeated gradient", np.broadcast_to(np.array(0.5), y))):
            yield (
                "max_pool2d_backward",
                Case(label + kind, (Out(x.shape),), (gradient, Before(1)), geometry, ("max_pool2d", forward)),
            )
    for label, shape in (
        ("images", (2, 3, 4, 5)), ("many channels", (3, 64, 7, 7)), ("1x1", (3, 8, 1, 1)), ("empty batch", (0, 3, 4, 5)),
    ):  # fmt: skip
        pooled = (*shape[:2], 1, 1)
        yield "global_avg_pool2d", Case(label, (Out(pooled),), (draw(*shape),))
        yield "global_avg_pool2d_backward", Case(label, (Out(shape),), (draw(*pooled, seed=1),))
        repeated = np.broadcast_to(np.array(0.5), pooled)
        yield "global_avg_pool2d_backward", Case(f"{label}, repeated", (Out(shape),), (repeated,))


def _pooling_indices(table: Any, inputs: list[Any], attributes: dict[str, Any]) -> tuple[DType, tuple[int, ...]]:
    n, c, *image = inputs[0].shape
    kernel, stride, padding = attributes["kernel"], attributes["stride"], attributes["padding"]
    size = [(image[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1)]
    return table.max_pool2d_indices((n, c, *size), kernel)


# ---- batch normalisation


def normalisation() -> Cases:
    for label, shape in (
        ("images", (3, 5, 4, 6)), ("many channels", (2, 16, 7, 5)), ("large", LARGE), ("1x1", (6, 8, 1, 1)), ("one channel", (4, 1, 3, 3)),
    ):  # fmt: skip
        for has_residual in (False, True):
            for relu in (False, True):
                name = label + " + residual" * has_residual + " + relu" * relu
                yield from _batch_norm(name, shape, has_residual=has_residual, relu=relu, affine=True)
    yield from _batch_norm("without weight and bias", (3, 8, 4, 6), has_residual=False, relu=True, affine=False)
    yield from _batch_norm("far from 0", (3, 8, 4, 6), has_residual=False, relu=False, affine=True, shift=30.0)
    yield from _batch_norm_eval("empty batch", (0, 8, 4, 6), has_residual=True, relu=True, affine=True)
    for label, shape in (
        ("images", (3, 5, 4, 6)), ("many channels", (2, 16, 7, 5)), ("large", LARGE), ("1x1", (6, 8, 1, 1)),
        ("one channel", (4, 1, 3, 3)), ("many rows", (2, 8, 72, 72)), ("no channels", (2, 0, 4, 6)),
    ):  # fmt: skip
        yield from _batch_norm_sum(label, shape, affine=True)
    yield from _batch_norm_sum("without weight and bias", (3, 8, 4, 6), affine=False)


def _batch_norm(
    label: str, shape: tuple[int, ...], *, has_residual: bool, relu: bool, affine: bool, shift: float = 0.0
) -> Cases:
    x, weight, bias, residual = _batch_norm_inputs(shape, has_residual, affine)
    x, c = x + shift, shape[1:2]
    running = (InOut(draw(*c, seed=5)), InOut(draw(*c, seed=6, low=0.5)))
    settings = {"eps": 1e-5, "momentum": 0.1, "relu": relu}
    mask = Opaque(_batch_norm_mask(0, 3))
    for kind, moved in (("", running), (" without running figures", (None, None))):
        for kept in (mask, None) if relu else (None,):
            name = label + kind + (" without mask" if relu and kept is None else "")
            outputs = (Out(shape), Out(c), Out(c), kept, *moved)
            yield "batch_norm_train", Case(name, outputs, (x, weight, bias, residual), settings, terms=_train_terms)
    outputs = (Out(shape), Out(c), Out(c), mask if relu else None, None, None)
    forward = Case(label, outputs, (x, weight, bias, residual), settings, terms=_train_terms)
    saved = (Before(6), Before(7), Before(1), Before(2), Before(3, otherwise=0 if relu else None))
    yield from _gradients(
        "batch_norm_backward", label, forward, "batch_norm_train", saved, {"relu": relu}, _backward_terms
    )
    yield from _gradients(
        "batch_norm_backward", f"{label}, two parts", forward, "batch_norm_train", (*saved, draw(*shape, seed=7)),
        {"relu": relu}, _backward_terms,
    )  # fmt: skip
    before = ("batch_norm_train", forward)
    if relu and not has_residual:
        made = (Before(6), Before(7), Before(8), Before(1), Before(2), Before(3))
        yield "batch_norm_again", Case(label, (Out(shape),), made, {}, before, _again_terms)
    gradient, second, vector = draw(*shape, seed=4), draw(*shape, seed=7), Out(c)
    yield (
        "batch_norm_backward",
        Case(
            f"{label}, in place", (Alias(0), vector, vector, Out(shape) if has_residual else None), (gradient, *saved),
            {"relu": relu}, before, _backward_terms,
        ),
    )  # fmt: skip
    yield (
        "batch_norm_backward",
        Case(
            f"{label}, two parts, in place", (Alias(6), vector, vector, Alias(0) if has_residual else None),
            (gradient, *saved, second), {"relu": relu}, before, _backward_terms,
        ),
    )  # fmt: skip
    yield from _batch_norm_eval(label, shape, has_residual=has_residual, relu=relu, affine=affine)


def _batch_norm_eval(label: str, shape: tuple[int, ...], *, has_residual: bool, relu: bool, affine: bool) -> Cases:
    x, weight, bias, residual = _batch_norm_inputs(shape, has_residual, affine)
    c = shape[1:2]
    mean, variance = draw(*c, seed=5), draw(*c, seed=6, low=0.5)
    settings = {"eps": 1e-5, "relu": relu}
    mask = Opaque(_batch_norm_mask(0, 5))
    inputs = (x, weight, bias, mean, variance, residual)
    forward = Case(label, (Out(shape), mask if relu else None), inputs, settings, terms=_eval_terms)
    yield "batch_norm_eval", forward
    if relu:
        yield "batch_norm_eval", Case(f"{label} without mask", (Out(shape), None), inputs, settings, terms=_eval_terms)
    saved = (Before(2), Before(3), Before(5), Before(6), Before(1, otherwise=0 if relu else None))
    yield from _gradients(
        "batch_norm_eval_backward", label, forward, "batch_norm_eval", saved, settings, _eval_backward_terms
    )


def _gradients(
    name: str,
    label: str,
    forward: Case,
    forward_name: str,
    saved: tuple[Any, ...],
    settings: dict[str, Any],
    terms: Any,
) -> Cases:
    shape = forward.outputs[0].shape
    vector = Out(shape[1:2])
    residual = Out(shape) if forward.inputs[-1] is not None else None
    wanted = (Out(shape), vector, vector, residual)
    gradient = draw(*shape, seed=4)
    before = (forward_name, forward)
    yield name, Case(label, wanted, (gradient, *saved), settings, before, terms)
    repeated = np.broadcast_to(np.array(0.5), shape)
    yield name, Case(f"{label}, repeated gradient", wanted, (repeated, *saved), settings, before, terms)
    for only in range(4) if label.startswith("many channels") else ():
        if wanted[only] is not None:
            some = tuple(out if k == only else None for k, out in enumerate(wanted))
            yield name, Case(f"{label}, only {only}", some, (gradient, *saved), settings, before, terms)


def _batch_norm_sum(label: str, shape: tuple[int, ...], *, affine: bool) -> Cases:
    c = shape[1:2]
    vector = Out(c)
    # Both branches of one sign, well away from 0: rounding what is added must not open or close the ReLU.
    n, _, height, width = shape
    place = np.arange(n * height * width).reshape(n, 1, height, width) + np.arange(*c).reshape(1, -1, 1, 1)
    sign = 1 - 2 * (place % 2)
    inputs = tuple(
        operand
        for seed, scale, shift in ((0, 2.0, 0.5), (10, 3.0, -0.2))
        for operand in (
            sign * draw(*shape, seed=seed, low=1.0) * scale + shift,
            draw(*c, seed=seed + 1, low=0.5) if affine else None,
            draw(*c, seed=seed + 2, low=-0.5) * 0.2 if affine else None,
        )
    )
    running = tuple(InOut(draw(*c, seed=seed, low=low)) for seed, low in ((5, None), (6, 0.5), (15, None), (16, 0.5)))
    settings = {"eps": 1e-5, "momentum": 0.1, "shortcut_eps": 1e-3, "shortcut_momentum": 0.3}
    figures = (vector,) * 4
    mask = Opaque(_batch_norm_mask(0, 3))
    for kind, kept, moved in (
        ("", mask, running), (" without mask", None, running), (" without running figures", mask, (None,) * 4),
    ):  # fmt: skip
        outputs = (Out(shape), *figures, kept, *moved)
        yield "batch_norm_sum_train", Case(label + kind, outputs, inputs, settings, terms=_sum_train_terms)
    forward = Case(label, (Out(shape), *figures, mask, *(None,) * 4), inputs, settings, terms=_sum_train_terms)
    before = ("batch_norm_sum_train", forward)
    saved = (
        Before(10), Before(11), Before(1), Before(2), Before(13), Before(14), Before(3), Before(4),
        Before(5, otherwise=0),
    )  # fmt: skip
    gradient, second = draw(*shape, seed=4), draw(*shape, seed=7)
    repeated = np.broadcast_to(np.array(0.5), shape)
    wanted = (Out(shape), vector, vector) * 2
    name = "batch_norm_sum_backward"
    for kind, outputs, given in (
        ("", wanted, (gradient, *saved)),
        (", two parts", wanted, (gradient, *saved, second)),
        (", repeated gradient", wanted, (repeated, *saved)),
        (", in place", (Alias(0), *wanted[1:]), (gradient, *saved)),
        (", two parts, in place", (Alias(10), *wanted[1:3], Alias(0), *wanted[4:]), (gradient, *saved, second)),
        (", two parts, in place the other way", (Alias(0), *wanted[1:3], Alias(10), *wanted[4:]), (gradient, *saved, second)),
    ):  # fmt: skip
        yield name, Case(label + kind, outputs, given, {}, before, _sum_backward_terms)
    for only in range(6) if label in ("many channels", "large") else ():
        some = tuple(out if k == only else None for k, out in enumerate(wanted))
        yield name, Case(f"{label}, only {only}", some, (gradient, *saved), {}, before, _sum_backward_terms)
        others = tuple(None if k == only else out for k, out in enumerate(wanted))
        yield (
            name,
            Case(f"{label}, all but {only}", others, (gradient, *saved, second), {}, before, _sum_backward_terms),
        )


def _batch_norm_inputs(shape: tuple[int, ...], has_residual: bool, affine: bool) -> tuple[Any, ...]:
    c = shape[1:2]
    return (
        draw(*shape) * 2 + 0.5,
        draw(*c, seed=1) if affine else None,
        draw(*c, seed=2) if affine else None,
        draw(*shape, seed=3) if has_residual else None,
    )


def _batch_norm_mask(x: int, residual: int) -> Callable[..., tuple[DType, tuple[int, ...]] | None]:
    def kind(table: Any, inputs: list[Any], attributes: dict[str, Any]) -> tuple[DType, tuple[int, ...]] | None:
        nbytes = table.batch_norm_mask_bytes(inputs[x], has_residual=inputs[residual] is not None)
        return None if nbytes is None else (uint8, (nbytes,))

    return kind


def _channels(a: Any) -> Any:
    return 1.0 if a is None else np.abs(a).reshape(1, -1, 1, 1)


def _train_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    x, weight, bias, residual = inputs
    mean, inv_std = outputs[1], outputs[2]
    size = np.mean(np.abs(x), axis=(0, 2, 3))
    # A variance errs with the rounding of what was centred, (x - mean), which is that of x.
    spread = 1 + np.mean(np.square(x), axis=(0, 2, 3)) ** 0.5 * inv_std
    y = _channels(weight) * _channels(inv_std) * (np.abs(x) + _channels(mean)) * _channels(spread)
    variance = 2 * inv_std**-2 * spread + 3
    return [
        y + (0 if bias is None else _channels(bias)) + (0 if residual is None else np.abs(residual)),
        size,
        inv_std * spread,
        0,
        size + 3,
        variance,
    ]


def _sum_train_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    x, weight, bias, shortcut, shortcut_weight, shortcut_bias = inputs
    added = _train_terms([shortcut, shortcut_weight, shortcut_bias, None], {}, [None, outputs[3], outputs[4]])
    own = _train_terms([x, weight, bias, None], {}, outputs[:3])
    return [own[0] + added[0], *own[1:3], *added[1:3], 0, *own[4:], *added[4:]]


def _again_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    x, weight, bias, mean, inv_std, _ = inputs
    return _train_terms([x, weight, bias, None], attributes, [outputs[0], mean, inv_std])[:1]


def _eval_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    x, weight, bias, mean, variance, residual = inputs
    y = _channels(weight) * (np.abs(x) + _channels(mean)) / np.sqrt(_channels(variance))
    return [y + (0 if bias is None else _channels(bias)) + (0 if residual is None else np.abs(residual)), 0]


def _backward_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    gradient, x, weight, mean, inv_std, _, *second = inputs
    gradient = np.abs(gradient) + sum(map(np.abs, second))
    normalised = (np.abs(x) + _channels(mean)) * _channels(inv_std)
    axes = (0, 2, 3)
    inner = (
        gradient + gradient.mean(axes, keepdims=True) + normalised * (gradient * normalised).mean(axes, keepdims=True)
    )
    grad_x = inner * _channels(weight) * _channels(inv_std) * (1 + normalised)
    return [grad_x, 2 * (gradient * normalised).sum(axes), gradient.sum(axes), gradient]


def _sum_backward_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    gradient, x, weight, mean, inv_std, shortcut, *others, mask = inputs[:10]
    own = _backward_terms([gradient, x, weight, mean, inv_std, mask, *inputs[10:]], {}, [])
    return own[:3] + _backward_terms([gradient, shortcut, *others, mask, *inputs[10:]], {}, [])[:3]


def _eval_backward_terms(inputs: list[Any], attributes: dict[str, Any], outputs: list[Any]) -> list[Any]:
    gradient, x, weight, mean, variance, _ = inputs
    gradient, inverse = np.abs(gradient), 1 / np.sqrt(_channels(variance))
    normalised = (np.abs(x) + _channels(mean)) * inverse
    axes = (0, 2, 3)
    return [gradient * _channels(weight) * inverse, (gradient * normalised).sum(axes), gradient.sum(axes), gradient]


# ---- optimizers


def optimizers() -> Cases:
    plain = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "first": False}
    for label, shape in (("vector", (7,)), ("filters", (8, 4, 3, 3)), ("large", LARGE), ("0-d", ()), ("empty", (0, 3))):
        parameter, gradient = InOut(draw(*shape)), draw(*shape, seed=1)
        for kind, buffered, settings in (
            ("plain", False, {}),
            ("decay", False, {"weight_decay": 0.2}),
            ("first", True, {"momentum": 0.9, "first": True}),
            ("momentum", True, {"momentum": 0.9}),
            ("momentum and decay", True, {"momentum": 0.9, "weight_decay": 0.2}),
            ("dampening", True, {"momentum": 0.9, "dampening": 0.3}),
            ("nesterov", True, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
            ("nesterov, first", True, {"momentum": 0.9, "nesterov": True, "first": True}),
        ):
            buffer = InOut(draw(*shape, seed=2)) if buffered else None
            yield "sgd_step", Case(
                f"{label}, {kind}", (parameter, buffer), (gradient,), {**plain, **settings},
                terms=lambda i, a, o, p=parameter, b=buffer: _sgd_terms(p, b, i[0], a),
            )  # fmt: skip


def _sgd_terms(parameter: InOut, buffer: InOut | None, gradient: Any, attributes: dict[str, Any]) -> list[Any]:
    size = np.abs(gradient) + attributes["weight_decay"] * np.abs(parameter.values)
    held = size + (0 if buffer is None else np.abs(buffer.values))
    return [np.abs(parameter.values) + attributes["lr"] * 2 * held, held]


def _collected() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    rooms = (
        elementwise, copies, reductions, random_numbers, products, losses, convolutions, pooling, normalisation, optimizers,
    )  # fmt: skip
    for room in rooms:
        for name, case in room():
            found.setdefault(name, []).append(case)
    return found


CASES = _collected()
