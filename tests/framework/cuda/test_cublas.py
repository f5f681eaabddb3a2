"""What is asked of cuBLASLt, and what is made of its answers: functions that stand for the library's note both."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from framework.device import cpu
from framework.kernels.cuda import cublas
from framework.kernels.cuda.cublas import CublasError, Matrix, Request

MIB = 1 << 20
REQUEST = Request(
    Matrix(4, 6, 4, False, 0), Matrix(8, 6, 8, True, 0), Matrix(4, 8, 4, False, 0), 1, "float32", True, False, 16
)


class FakeLibrary:
    """Its heuristics name algorithms of one number, eight times over, and the workspaces and states that they are given."""

    def __init__(self, *known: tuple[int, int]) -> None:
        self.known = known
        self.preferences: dict[int, int] = {}
        self.descriptions: list[tuple[int, int]] = []
        self.alive: set[int] = set()
        self.most = 0
        self.multiplied: list[tuple[Any, ...]] = []
        self.status = 0
        self._numbers = count(1)
        for what in ("MatmulPreference", "MatmulDesc", "MatrixLayout"):
            setattr(self, f"cublasLt{what}Create", self._create)
            setattr(self, f"cublasLt{what}Destroy", self._destroy)
        self.cublasLtMatrixLayoutSetAttribute = lambda *given: 0
        self.biases: dict[int, int] = {}

    def cublasLtCreate(self, handle: Any) -> int:
        handle._obj.value = 99
        return 0

    def cublasLtMatmulDescSetAttribute(self, description: Any, name: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        if name == 8:
            self.biases[description.value] = value._obj.value
        return 0

    def _create(self, made: Any, *given: Any) -> int:
        made._obj.value = number = next(self._numbers)
        self.alive.add(number)
        if len(given) == 2:
            self.descriptions.append(given)
        return 0

    def _destroy(self, held: Any) -> int:
        self.alive.remove(held.value)
        return 0

    def cublasLtMatmulPreferenceSetAttribute(self, preference: Any, name: int, value: Any, size: Any) -> int:
        assert ctypes.sizeof(value._obj) == size.value
        self.preferences[name] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> int:
        *_, most, found, number = given
        self.most = most.value
        for algorithm, (workspace_bytes, state) in zip(found, self.known, strict=False):
            algorithm.algorithm[:] = [workspace_bytes] * 8
            algorithm.workspace_bytes, algorithm.state = workspace_bytes, state
        number._obj.value = min(most.value, len(self.known))
        return self.status

    def cublasLtMatmulAlgoCheck(self, *given: Any) -> int:
        kept, result = given[-2]._obj, given[-1]._obj
        if (kept[7], 0) not in self.known:
            return 7
        result.workspace_bytes = kept[7]
        return 0

    def cublasLtMatmul(self, *given: Any) -> int:
        a, b, c, d, workspace = (given[place].value for place in (3, 5, 8, 10, 13))
        assert c == d
        self.multiplied.append((given[12]._obj.algorithm[7], a, b, d, workspace, given[14].value, given[15].value))
        return self.status


@pytest.fixture
def loaded(monkeypatch: Any) -> Callable[..., FakeLibrary]:
    """Loads a library that knows algorithms of these (workspace, state)."""

    def load(*known: tuple[int, int]) -> FakeLibrary:
        fake = FakeLibrary(*known)
        monkeypatch.setattr(cublas, "library", SimpleNamespace(load=lambda name: fake))
        monkeypatch.setattr(cublas, "_handle", lambda device: ctypes.c_void_p(99))
        return fake

    return load


def test_as_many_as_asked_for_without_those_it_has_doubts_about(loaded: Callable[..., FakeLibrary]) -> None:
    fake = loaded((64, 0), (0, 15), (128, 0))
    found = cublas.suggestions(cpu, REQUEST, 8, 5 * MIB)
    assert [product.workspace_bytes for product in found] == [64, 128]
    assert fake.most == 8
    alignments = dict.fromkeys((5, 6, 7, 8), 16)
    assert fake.preferences == {1: 5 * MIB, **alignments}
    assert len(cublas.suggestions(cpu, REQUEST, 1, MIB)) == 1


@pytest.mark.parametrize(
    ("dtype", "allow_tf32", "compute"),
    [("float32", True, 77), ("float32", False, 68), ("bfloat16", True, 68), ("float64", True, 70)],
)
def test_the_precision_that_is_asked_for(dtype: str, allow_tf32: bool, compute: int, loaded: Any) -> None:
    fake = loaded((0, 0))
    cublas.suggestions(cpu, REQUEST._replace(dtype=dtype, allow_tf32=allow_tf32), 1, MIB)
    assert fake.descriptions == [(compute, 1 if dtype == "float64" else 0)]
    # Parts of a sum stay float32 until they are added up.
    assert fake.preferences.get(3) == (2 if dtype == "bfloat16" else None)


def test_operands_scratch_memory_and_stream_are_in_their_places(loaded: Callable[..., FakeLibrary]) -> None:
    fake = loaded((64, 0))
    (product,) = cublas.suggestions(cpu, REQUEST, 8, MIB)
    product.launch(3, 512, 1024, 2048, 4096)
    assert fake.multiplied == [(64, 512, 1024, 2048, 4096, 64, 3)]
    assert not fake.biases
    product.launch(3, 512, 1024, 2048, 4096, 8192)
    assert list(fake.biases.values()) == [8192]
    fake.status = 15
    with pytest.raises(CublasError, match=r"cublasLtMatmul failed: not supported \(15\)"):
        product.launch(3, 512, 1024, 2048, 4096)


def test_a_launch_in_the_middle_of_another_leaves_its_bias_as_it_is(loaded: Callable[..., FakeLibrary]) -> None:
    fake = loaded((64, 0))
    (product,) = cublas.suggestions(cpu, REQUEST, 8, MIB)
    multiply, within = fake.cublasLtMatmul, [16384]
    biases: list[tuple[int, int]] = []

    def cublasLtMatmul(*given: Any) -> int:
        # As a finalizer, a signal handler or another thread may, behind where the first has set its bias.
        while within:
            product.launch(3, 512, 1024, 2048, 4096, within.pop())
        biases.append((given[1].value, fake.biases[given[1].value]))
        return multiply(*given)

    product._matmul = cublasLtMatmul
    product.launch(3, 512, 1024, 2048, 4096, 8192)
    product._matmul = multiply  # nothing here refers to itself any more
    (inner, inner_bias), (outer, outer_bias) = biases
    assert (inner_bias, outer_bias) == (16384, 8192)
    assert inner != outer


def test_a_product_is_made_again_from_its_text(loaded: Callable[..., FakeLibrary]) -> None:
    fake = loaded((64, 0), (1 << 40, 0))
    product = cublas.suggestions(cpu, REQUEST, 8, MIB)[1]
    again = cublas.restored(cpu, REQUEST, product.text())
    assert (again.workspace_bytes, again.text()) == (1 << 40, product.text())
    again.launch(3, 512, 1024, 2048, 4096)
    assert fake.multiplied == [(1 << 40, 512, 1024, 2048, 4096, 1 << 40, 3)]


@pytest.mark.parametrize("text", [b"", b"no number", b"00" * 63, "é".encode("latin-1")])
def test_what_is_no_text_of_an_algorithm_is_refused(text: bytes, loaded: Callable[..., FakeLibrary]) -> None:
    loaded((0, 0))
    with pytest.raises(ValueError, match=r".+"):
        cublas.restored(cpu, REQUEST, text)


def test_an_algorithm_that_does_not_serve_the_request_is_refused(loaded: Callable[..., FakeLibrary]) -> None:
    loaded((64, 0))
    with pytest.raises(CublasError, match=r"cublasLtMatmulAlgoCheck failed: invalid value"):
        cublas.restored(cpu, REQUEST, b"07" * 64)


def test_without_an_algorithm_the_request_is_named(loaded: Callable[..., FakeLibrary]) -> None:
    loaded()
    with pytest.raises(RuntimeError, match="no algorithm for Request"):
        cublas.product(cpu, REQUEST)


def test_what_is_not_used_any_more_leaves_nothing(loaded: Callable[..., FakeLibrary]) -> None:
    fake = loaded((64, 0), (128, 0))
    first, second = cublas.suggestions(cpu, REQUEST, 8, MIB)
    assert len(fake.alive) == 4  # three layouts and a description, for both
    del first
    gc.collect()
    assert len(fake.alive) == 4
    second.launch(3, 512, 1024, 2048, 0)
    del second
    gc.collect()
    assert not fake.alive
