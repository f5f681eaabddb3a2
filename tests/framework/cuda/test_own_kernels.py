"""The kernels in CUDA C++: how they are compiled and launched, and what the check of all tables does not look at."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import framework as flow
from framework.dtype import bfloat16, float32, int64, uint8
from framework.kernels.cuda import compiler, disk, launch, loss, normalization, normalization_plans
from framework.kernels.cuda.geometry import broadcast, walk
from framework.vm import runtime
from framework.vm.array import channels_last_stride

gpu = pytest.mark.gpu
COPY = (("INPUT", "float"), ("OUTPUT", "double"))


# ---- without a device


def test_a_walk_joins_dimensions_that_all_arrays_allow():
    assert walk((2, 3, 4), (12, 4, 1), (12, 4, 1)).is_dense
    assert walk((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)).is_dense
    nhwc_and_channels = walk((2, 3, 4, 5), (60, 1, 15, 3), (0, 1, 0, 0))
    assert nhwc_and_channels.extents == (40, 3)
    assert nhwc_and_channels.strides == ((3, 1), (0, 1))
    assert walk((1, 1), (7, 9)).is_dense
    assert not walk((4,), (2,)).is_dense


def test_a_walk_over_too_many_dimensions_says_what_to_do():
    strides = tuple(3**i for i in range(9))
    with pytest.raises(ValueError, match="make one of them contiguous first"):
        walk((2,) * 9, strides).values()


def test_broadcast_strides():
    assert broadcast((2, 3, 4), (3, 1), (1, 1)) == (0, 1, 0)
    assert broadcast((2, 3), (), ()) == (0, 0)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and how often the compiler was called."""
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    compile_source = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda *given: calls.append(given) or compile_source(*given))
    return calls


def test_machine_code_is_kept_on_disk(cache):
    code = compiler.machine_code("copy.cu", COPY, 90)
    assert compiler.machine_code("copy.cu", COPY, 90) == code
    assert len(cache) == 1
    compiler.machine_code("copy.cu", (("INPUT", "float"), ("OUTPUT", "float")), 90)
    assert len(cache) == 2


def test_kept_machine_code_is_that_of_its_architecture_and_its_sources(cache, tmp_path, monkeypatch):
    compiler.machine_code("copy.cu", COPY, 90)
    compiler.machine_code("copy.cu", COPY, 80)
    assert len(cache) == 2
    sources = tmp_path / "sources"
    shutil.copytree(compiler._FOLDER, sources)
    monkeypatch.setattr(compiler, "_FOLDER", sources)
    compiler.machine_code("copy.cu", COPY, 90)
    assert len(cache) == 2  # the same, wherever it lies
    for number, name in enumerate(("copy.cu", "common.cuh"), 3):
        with (sources / name).open("a") as changed:
            changed.write("// another\n")
        compiler.machine_code("copy.cu", COPY, 90)
        assert len(cache) == number


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: b"", lambda content: content[::-1]])
def test_a_damaged_entry_is_made_anew(cache, damage):
    code = compiler.machine_code("copy.cu", COPY, 90)
    (entry,) = (disk.folder() / "kernels").iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert compiler.machine_code("copy.cu", COPY, 90) == code
    assert compiler.machine_code("copy.cu", COPY, 90) == code
    assert len(cache) == 2


def test_a_source_that_is_wrong_shows_the_compilers_log(cache):
    with pytest.raises(compiler.KernelCompileError, match=r"copy\.cu does not compile with .*\n.*nonsense"):
        compiler.machine_code("copy.cu", (("INPUT", "nonsense"), ("OUTPUT", "float")), 90)


def test_a_newer_device_gets_code_for_its_driver_to_translate(cache):
    assert b".target sm_" in compiler.machine_code("copy.cu", COPY, 999)


# How a kernel begins: its parameters, and its first statement.
KERNEL = re.compile(r"^ *(?:CLUSTER_)?KERNEL (\w+)\([^{]*?\) *\{[ \\]*\n *([^;]*;)", re.MULTILINE)


@pytest.mark.parametrize("source", sorted(Path(compiler.__file__).parent.glob("*.cu")), ids=lambda path: path.name)
def test_every_kernel_waits_first_for_the_one_in_front_of_it(source):
    text = source.read_text()
    found = KERNEL.findall(text)
    assert len(found) == text.count("KERNEL ") > 0
    assert {first for _, first in found} == {"grid_dependency_synchronize();"}


def test_each_kernels_code_waits(cache):
    code = compiler.machine_code("copy.cu", COPY, 999)  # for the driver to translate, so that it can be read
    assert code.count(b".entry") == code.count(b"griddepcontrol.wait;") == 3


@pytest.mark.parametrize(("target", "starts_early"), [("sm_90", True), ("compute_100", True), ("compute_89", False)])
def test_kernels_start_early_where_their_code_is_of_a_kind_that_waits(monkeypatch, target, starts_early):
    driver = SimpleNamespace(moduleGetFunction=lambda module, name: 5)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(driver=driver))
    monkeypatch.setattr(compiler, "_module", lambda *given: 1)
    # An older compiler makes code of an older kind for a device that could do it.
    monkeypatch.setattr(compiler, "_target", lambda architecture: target)
    monkeypatch.setattr(compiler, "capability", lambda device: (9, 0))
    device = flow.device("cpu")  # only asked for, never used
    assert compiler.function(device, "copy.cu", "dense") == compiler.Function(5, starts_early)


def test_what_varies_between_launches_is_eight_bytes_wide():
    with pytest.raises(ValueError, match="eight bytes wide"):
        launch.prepare(compiler.Function(0, True), (1, 1), "Qi")


# ---- on a device


def _on_device(values, dtype=float32):
    return runtime(flow.device("cuda")).from_host(np.asarray(values), dtype)


def _normalised(x, residual=None, *, dtype=float32, relu=True):
    """batch_norm_train's y, mean, inv_std and mask, and its other operands."""
    kernels = runtime(flow.device("cuda"))
    channels = x.shape[1]
    given = _on_device(x, dtype)
    added = None if residual is None else _on_device(residual, dtype)
    weight, bias = _on_device(np.linspace(0.5, 1.5, channels)), _on_device(np.linspace(-1, 1, channels))
    y = kernels.empty_like(given)
    mean, inv_std = (kernels.empty((channels,), float32) for _ in range(2))
    nbytes = normalization.batch_norm_mask_bytes(given, has_residual=residual is not None)
    mask = kernels.empty((nbytes,), uint8)
    kernels.batch_norm_train(
        y, mean, inv_std, mask, None, None, given, weight, bias, added, eps=1e-5, momentum=0.1, relu=relu
    )
    return y, mean, inv_std, mask, given, weight


@gpu
@pytest.mark.parametrize("size", [5, 60, 200])
@pytest.mark.parametrize("first", [None, -1e6])
def test_variance_far_from_zero_keeps_its_digits(size, first):
    # A mean of 10⁴ standard deviations, and an outlier where kernels might look for a shift.
    x = (np.random.default_rng(3).standard_normal((3, 16, size, size)) + 1e4).astype(np.float32)
    if first is not None:
        x[0, :, 0, 0] = first
    _, mean, inv_std, *_ = _normalised(x)
    to_host = runtime(flow.device("cuda")).to_host
    wide = x.astype(np.float64)
    assert to_host(mean) == pytest.approx(wide.mean((0, 2, 3)), rel=1e-6)
    assert to_host(inv_std) == pytest.approx(1 / np.sqrt(wide.var((0, 2, 3)) + 1e-5), rel=2e-5)


@gpu
@pytest.mark.parametrize("dtype", [float32, bfloat16])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("shape", [(2, 64, 7, 7), (4, 64, 28, 28), (2, 48, 60, 60), (2, 24, 9, 9)])
def test_one_launch_and_two_passes_agree(monkeypatch, shape, has_residual, dtype):
    kernels = runtime(flow.device("cuda"))
    random = np.random.default_rng(4)
    x, residual, gradient = (random.standard_normal(shape).astype(np.float32) for _ in range(3))

    def both_ways():
        y, mean, inv_std, mask, given, weight = _normalised(x, residual if has_residual else None, dtype=dtype)
        grads = [kernels.empty_like(given), *[kernels.empty((shape[1],), float32) for _ in range(2)]]
        masked = kernels.empty_like(given) if has_residual else None
        kernels.batch_norm_backward(
            *grads, masked, _on_device(gradient, dtype), given, weight, mean, inv_std, mask, relu=True
        )
        written = [y, mean, inv_std, *grads] + ([masked] if has_residual else [])
        return [np.array(kernels.to_host(array)) for array in written]

    small, again = both_ways(), both_ways()
    for first, second in zip(small, again, strict=True):
        assert np.array_equal(first, second)
    monkeypatch.setattr(normalization_plans, "_SMALL_ROWS", 0)
    for plan in (normalization_plans.train, normalization_plans.backward):
        plan.cache_clear()
    large = both_ways()
    for plan in (normalization_plans.train, normalization_plans.backward):
        plan.cache_clear()
    for first, second in zip(small, large, strict=True):
        assert np.allclose(first, second, rtol=2e-2 if dtype is bfloat16 else 1e-4, atol=2e-5)


@gpu
@pytest.mark.parametrize("shape", [(2, 64, 7, 7), (4, 64, 60, 60)])
def test_the_gradient_of_what_is_no_number_passes_the_relu(shape):
    """One launch and two passes; the mask as bits, and had again from what is kept."""
    kernels = runtime(flow.device("cuda"))
    random = np.random.default_rng(4)
    x, residual, gradient = (random.standard_normal(shape).astype(np.float32) for _ in range(3))
    residual[1, 3, 2, 1] = np.nan
    y, mean, inv_std, mask, given, weight = _normalised(x, residual)
    assert np.argwhere(np.isnan(kernels.to_host(y))).tolist() == [[1, 3, 2, 1]]
    masked, grad_x = kernels.empty_like(given), kernels.empty_like(given)
    kernels.batch_norm_backward(
        grad_x, None, None, masked, _on_device(gradient), given, weight, mean, inv_std, mask, relu=True
    )
    assert kernels.to_host(masked)[1, 3, 2, 1] == gradient[1, 3, 2, 1]
    # Outside training it touches nothing but its own place.
    x[1, 3, 2, 1] = np.nan
    given, zeros, ones = _on_device(x), _on_device(np.zeros(shape[1])), _on_device(np.ones(shape[1]))
    mask = kernels.empty((normalization.batch_norm_mask_bytes(given, has_residual=False),), uint8)
    grad_bias = kernels.empty_like(zeros)
    kernels.batch_norm_eval(y, mask, given, ones, zeros, zeros, ones, None, eps=0.0, relu=True)
    kernels.batch_norm_eval_backward(
        grad_x, None, grad_bias, None, _on_device(gradient), given, ones, zeros, ones, mask, eps=0.0, relu=True
    )
    expected = np.where(x <= 0, 0, gradient)
    assert kernels.to_host(grad_bias) == pytest.approx(expected.sum((0, 2, 3), dtype=np.float64), rel=1e-4, abs=1e-4)
    assert np.array_equal(kernels.to_host(grad_x)[~np.isnan(x)], expected[~np.isnan(x)])


@gpu
def test_a_target_that_is_no_class_is_told_when_asked():
    device = flow.device("cuda")
    kernels = runtime(device)
    logits = _on_device(np.random.default_rng(5).standard_normal((4, 10)))
    value, probabilities, grad = (
        kernels.empty((), float32),
        kernels.empty((4, 10), float32),
        kernels.empty((4, 10), float32),
    )
    for bad in (10, -3):
        target = _on_device([1, 2, bad, 3], int64)
        kernels.cross_entropy(value, probabilities, logits, target)
        kernels.cross_entropy_backward(grad, _on_device(1.0), probabilities, target)
        assert np.isnan(kernels.to_host(value))
        assert np.isnan(kernels.to_host(grad)).any(axis=1).tolist() == [False, False, True, False]
        with pytest.raises(ValueError, match=rf"number of classes; got {bad},"):
            loss.raise_for_bad_target(device)
        loss.raise_for_bad_target(device)


@gpu
@pytest.mark.parametrize(
    "settings_of_step", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}, {}]
)
def test_one_step_for_many_tensors_of_all_layouts(settings_of_step):
    kernels = runtime(flow.device("cuda"))
    random = np.random.default_rng(6)
    shapes = [(7,), (64, 3, 7, 7), (5000,), (0,), (128, 64, 1, 1), (300, 300), (1,)] * 40
    attributes = {
        "lr": 0.1,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.01,
        "nesterov": False,
    } | settings_of_step
    values = [[random.standard_normal(shape).astype(np.float32) for shape in shapes] for _ in range(3)]
    parameters, buffers, grads = (tuple(_on_device(value) for value in some) for some in values)
    # A gradient may lie otherwise than its parameter.
    turned = kernels.empty((300, 300), float32, (1, 300))
    kernels.copy(turned, grads[5])
    grads = (*grads[:5], turned, *grads[6:])
    has_buffers = attributes["momentum"] != 0
    kernels.table.kernels["sgd_step"](parameters, buffers if has_buffers else None, grads, **attributes, first=False)
    for i in range(len(shapes)):
        p, b, g = (some[i].astype(np.float64) for some in values)
        g = g + attributes["weight_decay"] * p
        if has_buffers:
            b = attributes["momentum"] * b + (1 - attributes["dampening"]) * g
            assert kernels.to_host(buffers[i]) == pytest.approx(b, rel=1e-5, abs=1e-6)
            g = g + attributes["momentum"] * b if attributes["nesterov"] else b
        assert kernels.to_host(parameters[i]) == pytest.approx(p - attributes["lr"] * g, rel=1e-5, abs=1e-6)


@gpu
def test_one_step_for_a_tensor_of_more_elements_than_32_bits_count():
    kernels = runtime(flow.device("cuda"))
    count = 2**31 + 5000
    if flow.cuda.mem_get_info()[0] < 5 * count:
        pytest.skip(f"needs {5 * count / 2**30:.0f} GiB of free GPU memory")
    parameter, grad = (kernels.full((count,), value, bfloat16) for value in (0, 1))
    kernels.table.kernels["sgd_step"](
        (parameter,), None, (grad,), lr=1.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=False
    )
    for start in (0, 2**31 - 100, count - 4999):
        part = kernels.empty((4999,), float32)
        kernels.copy(part, parameter.view((4999,), (1,), start))
        assert np.array_equal(kernels.to_host(part), np.full(4999, -1, np.float32)), start


@gpu
def test_a_large_view_at_an_odd_address():
    kernels = runtime(flow.device("cuda"))
    values = np.random.default_rng(7).standard_normal(100_001).astype(np.float32)
    whole = _on_device(values)
    view = whole.view((100_000,), (1,), 1)
    out = kernels.empty((100_000,), float32)
    kernels.add(out, view, 1.5)
    assert np.array_equal(kernels.to_host(out), values[1:] + np.float32(1.5))
    shape = (2, 8, 50, 50)
    images = whole.view(shape, channels_last_stride(shape), 3)
    total = kernels.empty((8,), float32)
    kernels.sum(total, images, axes=(0, 2, 3), keepdims=False)
    expected = values[3 : 3 + 40_000].astype(np.float64).reshape(-1, 8).sum(0)
    assert kernels.to_host(total) == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_the_sanitizers_run_meets_every_kernel_in_its_first_round():
    from framework.kernels import reference
    from tests.framework.cuda import sanitize

    assert {("loss.cu", "cross_entropy"), ("normalization.cu", "apply_add_relu_bits")} <= sanitize._all_kernels()
    wanted = set(reference.TABLE.kernels) - set(sanitize.LEFT_OUT)
    first_round = [name for name, _, _ in itertools.islice(sanitize._in_turn("", 0, 1), 3 * len(wanted))]
    assert set(first_round) == wanted
