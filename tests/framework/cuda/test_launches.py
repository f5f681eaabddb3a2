"""What a cuDNN plan launches: where addresses stand in it is found, and launched elsewhere it gives cuDNN's own bits."""

from __future__ import annotations

import ctypes
import struct
from itertools import cycle

import numpy as np
import pytest

import framework as flow
from framework import ops
from framework.kernels.cuda import convolution, launches, linear, recording
from framework.kernels.cuda.launches import Place
from framework.kernels.cuda.recording import Node
from framework.vm import runtime

HERE, THERE = (1 << 40, 2 << 40, 3 << 40, 0), ((1 << 40) + 640, (2 << 40) + 1280, (3 << 40) + 64, 0)


def _kernel(at: launches.Addresses, *, size: int = 7, function: int = 5) -> Node:
    """A kernel of two parameters: a structure with x, a number and y behind an offset; and weight."""
    return Node(0, function, (1, 2, 3), (struct.pack("@QQQ", at[0], size, at[2] + 4096), struct.pack("@Q", at[1])))


def test_addresses_are_found_and_others_foretold():
    first, moved = [_kernel(HERE)], [_kernel(THERE)]
    found = launches.places(first, HERE, moved, THERE)
    assert found == [Place(0, 0, 0, 0, 0), Place(0, 0, 16, 2, 4096), Place(0, 1, 0, 1, 0)]
    elsewhere = (1 << 45, 1 << 44, 1 << 43, 0)
    assert launches.foretold(first, found, elsewhere) == [_kernel(elsewhere)]


@pytest.mark.parametrize(
    "moved",
    [
        pytest.param(_kernel(THERE, size=8), id="a number that changes is no address"),
        pytest.param(_kernel(THERE, function=6), id="another kernel"),
        pytest.param(
            _kernel((THERE[0], THERE[0], THERE[2], 0)), id="an address that moves as none of the operands does"
        ),
        pytest.param(Node(0, 5, (1, 2, 3), (b"12345678", b"1234")), id="a parameter of another size"),
    ],
)
def test_what_is_not_plain_is_left_to_cudnn(moved):
    assert launches.places([_kernel(HERE)], HERE, [moved], THERE) is None


@pytest.fixture
def driver_knows(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of memory that the driver knows, for one test."""
    known: set[int] = set()
    monkeypatch.setattr(recording, "is_memory", lambda address: address in known)
    monkeypatch.setattr(recording, "is_readable", lambda: True)
    return known


def test_what_the_library_left_of_the_host_does_not_matter(driver_knows):
    held = [ctypes.create_string_buffer(64) for _ in range(2)]
    one, other = map(ctypes.addressof, held)
    first, moved = [_kernel(HERE, size=one)], [_kernel(THERE, size=other)]
    assert launches.places(first, HERE, moved, THERE) == launches.places([_kernel(HERE)], HERE, [_kernel(THERE)], THERE)
    driver_knows.add(other)
    assert launches.places(first, HERE, moved, THERE) is None


def _recordings(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> launches.Launches | None:
    """What comes of recordings of a kernel in which a number is one of these after the other, again and again."""
    left = cycle(sizes)
    issued: list[launches.Addresses] = []

    def recorded(issue, stream):
        issue()
        return [_kernel(issued.pop(), size=next(left))]

    monkeypatch.setattr(recording, "recorded", recorded)
    return launches.record(issued.append, 0, HERE)


def test_a_recording_must_be_as_foretold_but_for_what_is_of_the_host(driver_knows, monkeypatch):
    held = [ctypes.create_string_buffer(64) for _ in range(3)]
    somewhere = list(map(ctypes.addressof, held))
    assert _recordings(monkeypatch, 7, 7, 7) is not None
    assert _recordings(monkeypatch, *somewhere) is not None
    assert _recordings(monkeypatch, 7, 7, 7, 7, 7, 8) is None
    assert _recordings(monkeypatch, 7, 7, 7, 8) is None
    driver_knows.add(somewhere[2])
    assert _recordings(monkeypatch, *somewhere) is None


def test_every_operand_is_moved_by_a_distance_of_its_own():
    for moves in launches._MOVES:
        assert len(set(moves)) == 5
        assert not any(move % launches.ALIGNMENT for move in moves)


def test_of_two_recordings_at_the_same_addresses_the_second_counts(driver_knows, monkeypatch):
    assert _recordings(monkeypatch, 9, 7, 8, 7, 6, 7) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(2, 64, 14, 14), (16, 64, 56, 56)])
@pytest.mark.parametrize(("window", "stride"), [(1, 1), (3, 1), (3, 2), (1, 2)])
def test_the_same_bits_as_by_cudnn(size, window, stride, settings):
    settings.deterministic = True
    random = np.random.default_rng(1)
    images, weights = random.standard_normal(size), random.standard_normal((128, 64, window, window))

    def gradients() -> list[np.ndarray]:
        x, w = (flow.tensor(a.astype(np.float32), device="cuda", requires_grad=True) for a in (images, weights))
        y = ops.conv2d(x, w, stride=stride, padding=window // 2)
        (y * y).sum().backward()
        return [np.array(runtime(t.device).to_host(t.array)) for t in (y, x.grad, w.grad)]

    convolution.forget()
    by_cudnn = gradients()  # each plan is looked at behind its first run
    held = [flow.zeros(n, device="cuda") for n in (1000, 1 << 22, 1 << 23)]  # other addresses from now on
    for found, expected in zip(gradients(), by_cudnn, strict=True):
        assert np.array_equal(found, expected)
    assert len(held) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [flow.float32, flow.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 512, 256), (256, 2048, 1024), (8, 4096, 4096)])
def test_products_give_the_same_bits_as_by_cublas(sizes, dtype):
    rows, ins, outs = sizes
    random = np.random.default_rng(2)

    def values(*shape: int) -> flow.Tensor:
        numbers = random.standard_normal(shape).astype(np.float32)
        return flow.tensor(numbers, device="cuda").to(dtype).requires_grad_()

    x, layers = values(rows, ins), [(values(outs, ins), values(outs)) for _ in range(3)]

    def results() -> list[np.ndarray]:
        found = []
        for weight, bias in layers:
            x.grad = weight.grad = None
            y = ops.linear(x, weight, bias)
            (y * y).sum().backward()
            found += [t.detach().to(flow.float32).to("cpu").numpy() for t in (y, x.grad, weight.grad)]
        return found

    linear._direct.clear()
    linear._plan.cache_clear()
    by_cublas = results()[:3]  # each product is looked at behind its first run
    # Of other types a kernel may be given more than addresses: tables that tell a part of the device how operands lie.
    assert all(plan._launches is not None for plan in linear._direct.values()) or dtype is flow.bfloat16
    again = results()
    for found, expected in zip(again, by_cublas, strict=False):
        assert np.array_equal(found, expected)
    # Each layer's own weight and bias.
    for (weight, bias), y in zip(layers, again[::3], strict=True):
        w, b, into = (t.detach().to(flow.float64).to("cpu").numpy() for t in (weight, bias, x))
        assert np.allclose(y, into @ w.T + b, atol=0.02 * np.sqrt(ins), rtol=0.02)


@pytest.mark.gpu
def test_the_plans_of_a_step_are_plain():
    convolution.forget()
    model = flow.models.resnet50().to("cuda")
    images = flow.zeros(4, 3, 96, 96, device="cuda")
    model(images).sum().backward()
    plans = [plan for known in convolution._direct.values() for plan in known.values()]
    assert len(plans) > 50
    assert all(plan._launches is not None for plan in plans)
