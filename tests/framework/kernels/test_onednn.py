"""oneDNN's kernels pass the check that every table passes, and take compiled code where it matters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import framework as flow
from framework.device import cpu
from framework.dtype import float32, float64, uint8
from framework.kernels import onednn, reference
from framework.kernels.onednn import (
    batch_norm,
    channelwise,
    convolution,
    descriptors,
    elementwise,
    library,
    matmul,
    optimizer,
    patches,
    pooling,
    primitive,
)
from framework.vm import Array, channels_last_stride, runtime
from tests.framework.kernels import check

pytestmark = pytest.mark.skipif(not onednn.available(), reason=onednn.why())

GEOMETRY = ((1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(dtypes=(float32, float64)))
def test_values(name, case, dtype):
    check.kernel(cpu, onednn.table(reference.TABLE), name, case, dtype)


CONVOLUTIONS = ("conv2d", "conv2d_backward_input", "conv2d_backward_weight")


@pytest.mark.parametrize(("name", "case", "dtype"), check.all_cases(names=CONVOLUTIONS))
def test_values_by_patches_wherever_they_could_be_taken(name, case, dtype, monkeypatch):
    monkeypatch.setattr(patches, "are_faster", lambda direction, weight, y, geometry: geometry[3] == 1)
    monkeypatch.setattr(patches, "serves", lambda x, weight, y, geometry: geometry[3] == 1)
    check.kernel(cpu, onednn.table(reference.TABLE), name, case, dtype)


def test_no_product_of_a_small_resnet_is_left_to_numpy(monkeypatch):
    def refuse(*arrays, **attributes):
        raise AssertionError(f"left to NumPy: {arrays}")

    for name in CONVOLUTIONS:
        monkeypatch.setattr(convolution.reference, name, refuse)
    for name in ("matmul", "linear", "linear_backward"):
        monkeypatch.setattr(matmul.reference, name, refuse)
    model = flow.models.resnet18(num_classes=1000)
    images, labels = flow.randn(1, 3, 64, 64), flow.tensor([3])
    flow.nn.CrossEntropyLoss()(model(images), labels).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_layouts_are_those_of_the_instruction_set(monkeypatch):
    def chosen(channels: int, size: int, kernel: int = 3, groups: int = 1) -> list[str]:
        """Of the result and of both operands of the weight gradient, of a convolution that keeps its images' shape."""
        images, weight = (2, channels, size, size), (channels, channels // groups, kernel, kernel)
        geometry = ((1, 1), (kernel // 2,) * 2, (1, 1), groups)
        names = {
            "NHWC": descriptors.channels_last(images),
            "8": descriptors.blocked_channels(images, 8),
            "16": descriptors.blocked_channels(images, 16),
        }
        own = convolution._layouts(images, images, geometry)
        for_weight = convolution._layouts_for_weight_gradient(images, images, weight, geometry)
        return [next(name for name in names if names[name] == layout) for layout in (*own, *for_weight)]

    monkeypatch.setattr(library.library(), "has_avx512", True)
    assert chosen(64, 14) == chosen(64, 14, kernel=1) == ["16", "16", "NHWC", "NHWC"]
    assert chosen(64, 15) == chosen(72, 14) == chosen(64, 14, groups=2) == ["NHWC"] * 4
    monkeypatch.setattr(library.library(), "has_avx512", False)
    assert chosen(64, 14) == chosen(64, 28) == ["NHWC", "NHWC", "8", "8"]
    assert chosen(64, 28, kernel=1) == chosen(64, 14, groups=2) == ["NHWC"] * 4


def test_what_code_is_generated_for_is_oneDNNs_word():
    def read(isa: str) -> str:
        script = "from framework.kernels.onednn.library import library; print(library().has_avx512)"
        return subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    assert read("AVX2") == "False"
    has = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(Path("/proc/cpuinfo").read_text().split())
    assert read("AVX512_CORE") == read("DEFAULT") == str(has)


@pytest.mark.skipif(
    not library.available() or not library.library().has_avx512, reason="all other tests run the code for AVX2"
)
def test_the_code_for_avx2_passes_too():
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "conv2d"]
    ran = subprocess.run(
        [sys.executable, *arguments], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout


def test_patches_are_taken_where_weights_outweigh_them():
    def taken(images: int, size: int, channels: int, groups: int = 1, kernel: int = 3) -> list[bool]:
        y, weight = (images, channels, size, size), (channels, channels // groups, kernel, kernel)
        geometry = ((1, 1), (kernel // 2,) * 2, (1, 1), groups)
        return [
            patches.are_faster(direction, weight, y, geometry)
            for direction in ("forward", "backward_input", "backward_weight")
        ]

    assert taken(1, 2, 512) == [True, True, True]
    assert taken(1, 7, 512) == [True, False, True]
    assert taken(8, 7, 512) == [False, False, False]
    assert taken(1, 2, 64) == [False, False, False]
    assert taken(1, 2, 512, groups=2) == [False, False, False]
    assert taken(1, 2, 1024, kernel=1) == [True, False, True]


def test_patches_are_bounded_by_the_operands():
    many = (64, 1, 32, 32)
    assert patches.serves(many, (1, 1, 3, 3), many, GEOMETRY)
    assert not patches.serves(many, (1, 1, 7, 7), many, ((1, 1), (3, 3), (1, 1), 1))


@pytest.mark.usefixtures("no_garbage")
def test_patches_are_counted():
    x, grad_y = _random(2, 64, 2, 2), _random(2, 64, 2, 2, seed=1)
    grad_weight = runtime(cpu).empty((64, 64, 3, 3), float32)
    flow.cpu.reset_peak_memory_stats()
    before = flow.cpu.memory_allocated()
    patches.conv2d_backward_weight(grad_weight, None, grad_y, x, GEOMETRY)
    assert flow.cpu.max_memory_allocated() - before >= 2 * 2 * 2 * 64 * 3 * 3 * float32.itemsize


def _layout(*shape: int) -> tuple:
    return shape, channels_last_stride(shape)


def _row_major(*shape: int) -> tuple:
    return shape, tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


def _random(*shape: int, seed: int = 0) -> Array:
    stride = channels_last_stride(shape) if len(shape) == 4 else None
    array = runtime(cpu).empty(shape, float32, stride)
    array.ndarray[...] = np.random.default_rng(seed).standard_normal(shape)
    return array


def test_no_convolution_of_a_resnet_is_left_to_plain_loops():
    for channels, size, out, kernel, stride in [
        (3, 32, 64, 7, 2),
        (64, 14, 64, 3, 1),
        (64, 14, 256, 1, 1),
        (256, 14, 512, 1, 2),
    ]:
        padding = (kernel // 2,) * 2
        geometry = ((stride, stride), padding, (1, 1), 1)
        x, y = _layout(2, channels, size, size), _layout(2, out, size // stride, size // stride)
        weight = _row_major(out, channels, kernel, kernel)
        assert convolution._forward(y, x, weight, False, geometry) is not None
        assert convolution._backward_weight(weight, False, y, x, geometry) is not None
        assert convolution._backward_input(x, y, weight, geometry) is not None


def test_no_elementwise_primitive_is_left_to_plain_loops():
    size = 4096
    made = [
        elementwise._binary(size, elementwise.ADD),
        channelwise._scaled((2, 64, 8, 8), True, True),
        channelwise._squared_distance((2, 64, 8, 8)),
        elementwise._relu_backward(size),
        optimizer._scaled_sum(size, 0.9),
        optimizer._blended_sum(size, 0.5, 0.9),
        batch_norm.forward((2, 64, 8, 8), 14, 1e-5),
        batch_norm.backward((2, 64, 8, 8), 14, 0.0),
        pooling._max_pool(
            _layout(2, 64, 4, 4), _layout(2, 64, 4, 4), _layout(2, 64, 8, 8), (3, 3), (2, 2), (1, 1)
        )._primitive,
        matmul._product(_row_major(4, 1000), _row_major(4, 2048), _row_major(2048, 1000), has_bias=True),
    ]
    assert [primitive.description.implementation for primitive in made if primitive.description.is_reference] == []


def test_a_convolution_nobody_compiled_is_numpys():
    # Three groups of one channel each over row-major memory, with a kernel larger than oneDNN's own code takes.
    kernels, attributes = runtime(cpu), {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 3}
    x, weight = _random(1, 3, 40, 40), _random(6, 1, 33, 33, seed=1)
    y, expected = _random(1, 6, 8, 8), _random(1, 6, 8, 8)
    kernels.conv2d(y, x, weight, None, **attributes)
    reference.TABLE.kernels["conv2d"](expected, x, weight, None, **attributes)
    np.testing.assert_allclose(y.ndarray, expected.ndarray, rtol=1e-4, atol=1e-3)


class _Guarded:
    """Scratch memory between two strips that nobody may write to."""

    STRIP = 4096

    def __init__(self, nbytes: int) -> None:
        self.bytes = np.full(nbytes + 2 * self.STRIP + 64, 0xAB, np.uint8)
        self.start = self.STRIP + -(self.bytes.ctypes.data + self.STRIP) % 64
        self.nbytes, self.ptr = nbytes, self.bytes.ctypes.data + self.start

    def is_overrun(self) -> bool:
        strips = self.bytes[: self.start], self.bytes[self.start + self.nbytes :]
        return any((strip != 0xAB).any() for strip in strips)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("channels", [1, 4, 5, 7, 8])
def test_no_convolution_writes_beyond_its_scratch_memory(channels, stride, window, monkeypatch):
    given = []

    def scratch(_, nbytes):
        given.append(_Guarded(nbytes))
        return given[-1]

    monkeypatch.setattr(primitive, "scratch", scratch)
    padding, size = (window // 2,) * 2, (8, 16)
    attributes = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1}
    kernels = runtime(cpu)
    for outputs in (1, 2, 6, 17):
        x, weight = _random(3, channels, *size), _random(outputs, channels, window, window, seed=1)
        y = _random(3, outputs, size[0] // stride[0], size[1] // stride[1], seed=2)
        kernels.conv2d(_random(*y.shape), x, weight, None, **attributes)
        kernels.conv2d_backward_input(_random(*x.shape), y, weight, **attributes)
        kernels.conv2d_backward_weight(_random(*weight.shape), _random(outputs), y, x, **attributes)
    assert not [room.nbytes for room in given if room.is_overrun()]


def test_the_same_inputs_give_the_same_bits():
    kernels, attributes = runtime(cpu), {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, grad_y = _random(4, 64, 28, 28), _random(4, 64, 28, 28, seed=1)
    seen = set()
    for _ in range(20):
        grad_weight = runtime(cpu).empty((64, 64, 3, 3), float32)
        kernels.conv2d_backward_weight(grad_weight, None, grad_y, x, **attributes)
        seen.add(grad_weight.ndarray.tobytes())
    assert len(seen) == 1


def test_one_primitive_called_from_many_threads():
    kernels, failures = runtime(cpu), []

    def work(seed: int) -> None:
        a, b = _random(2, 64, 32, 32, seed=seed), _random(2, 64, 32, 32, seed=seed + 100)
        out = kernels.empty_like(a)
        for _ in range(50):
            kernels.add(out, a, b)
            if not np.array_equal(out.ndarray, a.ndarray + b.ndarray):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_mask_has_the_size_that_was_promised():
    kernels = runtime(cpu)
    x = _random(2, 16, 5, 5)
    table = onednn.table(reference.TABLE)
    nbytes = table.batch_norm_mask_bytes(x, has_residual=False)
    assert nbytes == x.size // 8
    assert table.batch_norm_mask_bytes(x, has_residual=True) is None
    guarded = kernels.full((nbytes + 64,), 7, uint8)
    mask = guarded.view((nbytes,), (1,))
    y, mean, inv_std = kernels.empty_like(x), _random(16), _random(16)
    kernels.batch_norm_train(y, mean, inv_std, mask, None, None, x, None, None, None, eps=1e-5, momentum=0.1, relu=True)
    assert (guarded.ndarray[nbytes:] == 7).all()


def test_number_of_threads():
    before = onednn.get_num_threads()
    try:
        onednn.set_num_threads(1)
        assert onednn.get_num_threads() == 1
        with pytest.raises(ValueError, match="at least 1, not 0"):
            onednn.set_num_threads(0)
    finally:
        onednn.set_num_threads(before)


def test_a_refusal_says_what_refused_and_why():
    with pytest.raises(library.OneDnnError, match=r"dnnl_engine_create failed: invalid arguments \(2\)"):
        library.library().make("engine_create", 1, 99)


def test_a_missing_package_is_said_with_the_way_out(monkeypatch):
    monkeypatch.setattr(library, "_PACKAGE", "onednn-of-nobody")
    with pytest.raises(OSError, match="onednn-of-nobody is not installed; `pip install onednn-of-nobody`"):
        library.find()


def test_importing_the_framework_does_not_load_the_library():
    code = "import sys, framework; print('framework.kernels.onednn.primitive' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", ["image", "residual"])
def test_a_relu_lets_no_nan_disappear(bad, training, place):
    arrays = {
        name: np.random.default_rng(0).standard_normal((4, 16, 12, 12), np.float32) for name in ("image", "residual")
    }
    arrays[place][1, 3, 5, 7] = bad
    results = []
    for dtype in (flow.float32, flow.float64):
        norm = flow.nn.BatchNorm2d(16).to(dtype).train(training)
        image, residual = (flow.tensor(arrays[name], dtype=dtype) for name in ("image", "residual"))
        for beside in (None, residual):
            results.append(norm(image, residual=beside, relu=True).detach().numpy())
            with flow.no_grad():
                results.append(norm(image, residual=beside, relu=True).numpy())
    half = len(results) // 2
    for got, expected in zip(results[:half], results[half:], strict=True):  # float64 runs on the reference
        assert np.array_equal(np.isnan(got), np.isnan(expected))
        assert np.array_equal(np.isinf(got), np.isinf(expected))


@pytest.mark.parametrize("place", ["image", "residual", "weight", "bias"])
@pytest.mark.parametrize("training", [True, False])
def test_a_relu_lets_the_gradient_of_what_is_no_number_through(training, place):
    draw = np.random.default_rng(0).standard_normal
    arrays = {name: draw((2, 16, 4, 5)) for name in ("image", "residual")} | {n: draw(16) for n in ("weight", "bias")}
    arrays[place][(1, 3, 2, 4) if arrays[place].ndim == 4 else 3] = np.nan
    factor = draw((2, 16, 4, 5))
    found = []
    for dtype in (flow.float32, flow.float64):  # float64 runs on the reference
        given = {name: flow.tensor(array, dtype=dtype) for name, array in arrays.items()}
        for name in ("image", "residual"):
            # Images lie NHWC, as convolutions give them.
            nhwc = np.ascontiguousarray(arrays[name].transpose(0, 2, 3, 1))
            given[name] = flow.tensor(nhwc, dtype=dtype).permute(0, 3, 1, 2)
        given = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
        for beside in (given["residual"], None):
            y = flow.nn.functional.batch_norm(
                given["image"], flow.zeros(16, dtype=dtype), flow.ones(16, dtype=dtype), given["weight"], given["bias"],
                training=training, residual=beside, relu=True,
            )  # fmt: skip
            (y * flow.tensor(factor, dtype=dtype)).sum().backward()
            found += [tensor.grad.numpy().copy() for tensor in given.values()]
            for tensor in given.values():
                tensor.grad = flow.zeros(*tensor.shape, dtype=dtype)
    half = len(found) // 2
    for got, expected in zip(found[:half], found[half:], strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_large_relu_keeps_nan():
    x = np.zeros((4, 64, 32, 32), np.float32)
    x[0, 1, 2, 3] = np.nan
    assert np.isnan(flow.relu(flow.tensor(x)).numpy()).sum() == 1


def test_a_window_without_a_finite_element_has_an_infinite_maximum():
    x = flow.full((1, 8, 3, 3), -np.inf).requires_grad_()
    y = flow.nn.functional.max_pool2d(x, 2, padding=1)
    y.sum().backward()
    assert np.all(y.detach().numpy() == -np.inf)
    assert x.grad.sum().item() == 8 * 4  # none of it is lost in the padding


@pytest.mark.parametrize("wide", [4, 4000])
def test_a_row_is_taken_whatever_its_stride_says(wide):
    row, x, grad = _random(wide).ndarray.copy(), _random(3, wide).ndarray.copy(), _random(3, 1).ndarray.copy()
    one = flow.tensor(row)
    for weight in (one[None], one.reshape(1, wide).expand(1, wide), one.reshape(wide, 1).transpose(0, 1)):
        assert weight.shape == (1, wide)
        images = flow.tensor(x, requires_grad=True)
        y = flow.nn.functional.linear(images, weight)
        y.backward(flow.tensor(grad))
        np.testing.assert_allclose(y.detach().numpy(), x.astype(np.float64) @ row[:, None], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(images.grad.numpy(), grad * row)
        np.testing.assert_array_equal((flow.tensor(grad) @ weight).numpy(), grad * row)


@pytest.mark.parametrize("key", [np.s_[:, :, ::2, :], np.s_[:, :, :, ::2], np.s_[:, ::2]])
def test_slices_with_a_step_are_taken_whatever_hangs_over(key):
    whole = _random(2, 5, 9, 7).ndarray.copy()
    part = np.ascontiguousarray(whole[key])
    layer = flow.nn.Conv2d(part.shape[1], 8, 3, padding=1)
    sliced = flow.tensor(whole)[key]
    np.testing.assert_allclose(layer(sliced).detach().numpy(), layer(flow.tensor(part)).detach().numpy(), atol=1e-6)
    np.testing.assert_array_equal(
        flow.nn.functional.max_pool2d(sliced, 2).numpy(), flow.nn.functional.max_pool2d(flow.tensor(part), 2).numpy()
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_is_told_rather_than_left_waiting():
    layer, x = flow.nn.Conv2d(3, 8, 3), flow.randn(1, 3, 8, 8)
    layer(x)
    child = os.fork()
    if child == 0:
        try:
            layer(x)
        except RuntimeError as refused:
            os._exit(7 if "spawn" in str(refused) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
