"""relu(bn(x) + bn(shortcut)) in one pass: on CUDA devices it has the bits of two normalisations, in less memory."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.dtype import bfloat16, float32, float64, uint8
from framework.kernels.cuda import launch, normalization, normalization_plans, normalization_sum
from framework.models import resnet
from framework.vm import runtime
from framework.vm.array import Layout, channels_last_stride
from tests.framework.block_ends import End, assert_same_bits, force_apart, images, outcome, trained

gpu = pytest.mark.gpu

DTYPES = (float32, float64, bfloat16)
# One block, a cluster of blocks, two passes, two passes of elements moved one by one, more channels than a tile.
SHAPES = (
    (2, 64, 7, 7),
    (4, 64, 28, 28),
    (2, 48, 60, 60),
    (8, 64, 56, 56),
    (3, 21, 30, 31),
    (16, 2048, 7, 7),
    (64, 256, 14, 14),
)


# ---- without a device


IMAGES = Layout.of((2, 8, 4, 4), channels_last_stride((2, 8, 4, 4)), float32)
VECTOR = Layout.of((8,), (1,), float32)
BITS = Layout.of((IMAGES.size // 8,), (1,), uint8)
DEVICE = flow.device("cpu")  # only asked for, never used
# Those that every call gives, as the kernels declare them: structures count as what is in them.
ARGUMENTS = {
    "statistics": 12,
    "apply_sum_relu_bits": 6,
    "sum_gradients_of_sum_two": 18,
    "apply_gradients_of_sum_two": 8,
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What is launched: the kernel's name and all it is given behind the stream; with workspace at 0x10000."""
    found: list[tuple[str, tuple[int, ...]]] = []

    def prepare(function: str, grid: Any, varying: str, constants: str = "", values: Any = ()) -> Any:
        assert _arguments(varying) == ARGUMENTS[function]
        return lambda stream, *given: found.append((function, given))

    monkeypatch.setattr(launch, "prepare", prepare)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "stream", lambda device: 7)
    monkeypatch.setattr(launch, "workspace", lambda device, on, nbytes: 0x10000)
    monkeypatch.setattr(normalization_plans.compiler, "function", lambda device, file, name, **_: name)
    monkeypatch.setattr(normalization_plans, "_SMALL_ROWS", 0)
    caches = (normalization_sum._train, normalization_sum._backward)
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def _arguments(varying: str) -> int:
    """How many values a format of the struct module takes."""
    return sum(int(count or 1) for count in re.findall(r"(\d*)[Qqd]", varying))


def _at(address: int, layout: Layout = IMAGES) -> Any:
    return SimpleNamespace(ptr=address, layout=layout, storage=SimpleNamespace(device=DEVICE))


def test_each_operand_goes_to_its_place(launched: list[Any]) -> None:
    layouts = (IMAGES, *[VECTOR] * 4, BITS, *[VECTOR] * 4, IMAGES, VECTOR, VECTOR, IMAGES, VECTOR, VECTOR)
    numbers = {"eps": 1.0, "momentum": 2.0, "shortcut_eps": 3.0, "shortcut_momentum": 4.0}
    run = normalization_sum._prepare_train(DEVICE, *layouts, **numbers)
    run(*[_at(16 * (k + 1), layout) for k, layout in enumerate(layouts)])
    (first, given), (second, others), (third, last) = launched
    parts = 0x10000 + launch.COUNTER_BYTES
    own, added = others[7], given[7]
    assert (first, second, third) == ("statistics", "statistics", "apply_sum_relu_bits")
    assert given == (224, 240, 256, 144, 160, 64, 80, added, parts, 0x10000, 3.0, 4.0)
    assert others == (176, 192, 208, 112, 128, 32, 48, own, parts, 0x10000, 1.0, 2.0)
    assert last == (16, 96, 176, 224, own, added)
    assert parts < own <= added - 3 * 8 * 4
    launched.clear()
    layouts = (
        IMAGES,
        VECTOR,
        VECTOR,
        IMAGES,
        VECTOR,
        VECTOR,
        IMAGES,
        IMAGES,
        *[VECTOR] * 3,
        IMAGES,
        *[VECTOR] * 3,
        BITS,
        IMAGES,
    )
    run = normalization_sum._prepare_backward(DEVICE, *layouts)
    run(*[_at(16 * (k + 1), layout) for k, layout in enumerate(layouts)])
    (first, given), (second, last) = launched
    coefficients = given[12]
    assert (first, second) == ("sum_gradients_of_sum_two", "apply_gradients_of_sum_two")
    assert given[:12] == (128, 144, 160, 176, 32, 48, 192, 208, 224, 240, 80, 96)
    assert given[13:] == (112, 272, 256, parts, 0x10000)
    assert last == (16, 64, 112, 272, 128, 192, 256, coefficients)
    assert coefficients > parts


def test_what_lies_otherwise_or_is_of_two_types_goes_through_one_normalisation_each(launched: list[Any]) -> None:
    sliced = Layout.of(IMAGES.shape, (256, 1, 64, 16), float32)
    wide = Layout.of((8,), (1,), float64)
    gradients = (IMAGES, VECTOR, VECTOR, IMAGES, VECTOR, VECTOR, IMAGES)
    for x, weight in ((sliced, VECTOR), (IMAGES, wide)):
        run = normalization_sum._prepare_backward(
            DEVICE, *gradients, x, weight, VECTOR, VECTOR, IMAGES, VECTOR, VECTOR, VECTOR, BITS
        )
        assert run.__name__ == "batch_norm_sum_backward"
    assert launched == []


def test_so_many_channels_that_odd_addresses_have_no_counters_for_go_through_one_normalisation_each(
    launched: list[Any],
) -> None:
    for channels, is_one_pass in ((2**16, True), (2**16 + 64, False)):
        shape = (1, channels, 2, 1)
        images, vector = Layout.of(shape, channels_last_stride(shape), float32), Layout.of((channels,), (1,), float32)
        bits = Layout.of((images.size // 8,), (1,), uint8)
        layouts = (images, vector, vector, images, vector, vector, images, images, *[vector] * 3, images, *[vector] * 3)
        run = normalization_sum._prepare_backward(DEVICE, *layouts, bits, images)
        assert (run.__name__ == "differentiate") == is_one_pass
        if is_one_pass:
            run(*[_at(16 * (k + 1) + 4, layout) for k, layout in enumerate((*layouts, bits, images))])
            assert len(launched) == 2


# ---- on a device


def _on_device(values: Any, dtype: Any) -> Any:
    return runtime(flow.device("cuda")).from_host(np.asarray(values), dtype)


def _both_ways(
    shape: tuple[int, ...], dtype: Any, parts: int, **left_out: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What the kernels of the sum write, and what those of two normalisations do."""
    kernels, c = runtime(flow.device("cuda")), shape[1]
    random = np.random.default_rng(9)
    wide = float32 if dtype is bfloat16 else dtype

    def laid(values: np.ndarray) -> Any:
        array = kernels.empty(shape, dtype, channels_last_stride(shape))  # type: ignore[arg-type]
        kernels.copy(array, _on_device(values, dtype))
        return array

    x, shortcut, *grads = (laid(random.standard_normal(shape) * 2 + 0.3) for _ in range(2 + parts))
    weight, bias, shortcut_weight, shortcut_bias = (_on_device(random.uniform(0.5, 1.5, c), wide) for _ in range(4))
    second = grads[1] if parts == 2 else None

    def vectors(count: int) -> list[Any]:
        return [_on_device(np.full(c, 0.5), wide) for _ in range(count)]

    def bits() -> Any:
        return kernels.empty((normalization.batch_norm_mask_bytes(x, has_residual=True),), uint8)

    y, mask, figures, running = kernels.empty_like(x), bits(), vectors(4), vectors(4)
    kernels.batch_norm_sum_train(
        y, *figures, mask, *running, x, weight, bias, shortcut, shortcut_weight, shortcut_bias,
        eps=1e-5, momentum=0.1, shortcut_eps=1e-3, shortcut_momentum=0.3,
    )  # fmt: skip
    made = [None if left_out.get(name) else kernels.empty_like(x) for name in ("x", "shortcut")]
    of = vectors(4)
    kernels.batch_norm_sum_backward(
        made[0], *of[:2], made[1], *of[2:], grads[0], x, weight, *figures[:2], shortcut, shortcut_weight, *figures[2:],
        mask, second,
    )  # fmt: skip
    one = [y, mask, *figures, *running, *made, *of]

    y, mask, figures, running = kernels.empty_like(x), bits(), vectors(4), vectors(4)
    added = kernels.empty_like(x)
    kernels.batch_norm_train(
        added, *figures[2:], None, *running[2:], shortcut, shortcut_weight, shortcut_bias, None,
        eps=1e-3, momentum=0.3, relu=False,
    )  # fmt: skip
    kernels.batch_norm_train(
        y, *figures[:2], mask, *running[:2], x, weight, bias, added, eps=1e-5, momentum=0.1, relu=True
    )
    made = [None if left_out.get(name) else kernels.empty_like(x) for name in ("x", "shortcut")]
    of, masked = vectors(4), kernels.empty_like(x)
    kernels.batch_norm_backward(made[0], *of[:2], masked, grads[0], x, weight, *figures[:2], mask, second, relu=True)
    kernels.batch_norm_backward(
        made[1], *of[2:], None, masked, shortcut, shortcut_weight, *figures[2:], None, relu=False
    )
    two = [y, mask, *figures, *running, *made, *of]
    return tuple([np.array(kernels.to_host(array)) for array in some if array is not None] for some in (one, two))  # type: ignore[return-value]


@gpu
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_has_the_bits_of_two_normalisations(shape: tuple[int, ...], dtype: Any, parts: int) -> None:
    for place, (one, two) in enumerate(zip(*_both_ways(shape, dtype, parts), strict=True)):
        assert np.isfinite(one).all()
        assert np.array_equal(one, two), f"operand {place}"


@gpu
@pytest.mark.parametrize("left_out", ["x", "shortcut"])
@pytest.mark.parametrize("shape", [(8, 64, 56, 56), (3, 21, 30, 31)], ids=str)
def test_a_gradient_that_is_not_wanted_changes_no_other(shape: tuple[int, ...], left_out: str) -> None:
    for one, two in zip(*_both_ways(shape, float32, 2, **{left_out: True}), strict=True):
        assert np.array_equal(one, two)


@gpu
@pytest.mark.parametrize("where", ["x over the first", "x over the second"])
@pytest.mark.parametrize("shape", [(2, 64, 7, 7), (8, 64, 56, 56)], ids=str)
def test_gradients_may_be_written_over_what_they_come_from(shape: tuple[int, ...], where: str) -> None:
    kernels, c = runtime(flow.device("cuda")), shape[1]
    random = np.random.default_rng(3)
    found = []
    values = [random.standard_normal(shape) for _ in range(4)]
    for over in (False, True):
        first, second, x, shortcut = (kernels.empty(shape, float32, channels_last_stride(shape)) for _ in range(4))  # type: ignore[arg-type]
        for array, drawn in zip((first, second, x, shortcut), values, strict=True):
            kernels.copy(array, _on_device(drawn, float32))
        mask = _on_device(np.random.default_rng(5).integers(0, 256, x.size // 8), uint8)
        figures = [_on_device(np.full(c, value), float32) for value in (0.1, 0.9, -0.1, 1.1)]
        out = [kernels.empty_like(x), kernels.empty_like(x)]
        if over:
            out = [first, second] if where == "x over the first" else [second, first]
        kernels.batch_norm_sum_backward(
            out[0],
            None,
            None,
            out[1],
            None,
            None,
            first,
            x,
            None,
            *figures[:2],
            shortcut,
            None,
            *figures[2:],
            mask,
            second,
        )
        found.append([np.array(kernels.to_host(array)) for array in out])
    for apart, over in zip(*found, strict=True):
        assert np.array_equal(apart, over)


FROZEN = (
    (),
    ("x", "residual"),
    ("conv", "norm", "x"),
    ("downsample", "residual"),
    ("conv", "downsample.0", "x", "residual"),
    ("norm", "downsample.1"),
)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("size", [6, 80])
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: " ".join(names) or "nothing")
def test_blocks_have_the_bits_of_their_parts(settings: Any, frozen: tuple[str, ...], size: int, dtype: Any) -> None:
    settings.deterministic = True
    for uses in (1, 2):
        how: dict[str, Any] = {
            "frozen": frozen, "size": size, "uses": uses, "dtype": dtype, "device": "cuda", "n": 4,
        }  # fmt: skip
        assert_same_bits(outcome(apart=False, **how), outcome(apart=True, **how))


@gpu
@pytest.mark.parametrize(("dtype", "n", "size"), [(float32, 2, 64), (float32, 16, 128), (float64, 2, 64)])
@pytest.mark.parametrize("block", [resnet.BasicBlock, resnet.Bottleneck])
def test_models_train_to_the_bits_of_their_parts(settings: Any, block: Any, dtype: Any, n: int, size: int) -> None:
    settings.deterministic = True
    found = []
    for apart in (False, True):
        flow.manual_seed(5)
        model = resnet.ResNet(block, (2, 2, 2, 2), num_classes=4)
        if apart:
            force_apart(model)
        found.append(trained(model, n=n, size=size, dtype=dtype, device="cuda"))
    assert_same_bits(*found)


@pytest.mark.usefixtures("no_garbage")
@gpu
def test_the_shortcuts_result_takes_no_memory(settings: Any) -> None:
    settings.cudnn.workspace_bytes = 1024 * 1024
    peaks = []
    for apart in (False, True):
        end = End(64).to("cuda")
        if apart:
            force_apart(end)
        x, residual = images(8, 8, 64, 64, device="cuda"), images(8, 4, 128, 128, seed=1, device="cuda")
        end(x, residual).sum().backward()
        flow.cuda.reset_peak_memory_stats()
        before = flow.cuda.memory_allocated()
        y = end(x, residual)
        peaks.append(flow.cuda.max_memory_allocated() - before)
        del y
    result = 8 * 64 * 64 * 64 * 4
    assert peaks[0] <= peaks[1] - 0.99 * result
