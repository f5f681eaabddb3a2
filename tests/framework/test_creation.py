"""Making tensors, and reading them back."""

from __future__ import annotations

import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import framework as flow
from framework.destination import destination
from framework.dtype import ALL, by_name


def test_the_version_is_the_projects() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert flow.__version__ == project["version"]


def test_types_of_values() -> None:
    assert flow.tensor([1.0, 2.0]).dtype is flow.float32
    assert flow.tensor([1, 2]).dtype is flow.int64
    assert flow.tensor([True]).dtype is flow.bool_
    assert flow.tensor(1.5).shape == ()
    assert flow.tensor(np.ones(2)).dtype is flow.float64
    assert flow.tensor(np.float64(1)).dtype is flow.float64
    assert flow.tensor([1, 2], dtype=flow.float64).tolist() == [1.0, 2.0]
    assert flow.tensor([[1, 2], [3, 4]]).shape == (2, 2)
    assert flow.tensor([]).shape == (0,)


def test_values_are_copied() -> None:
    values = np.ones(3, np.float32)
    x, y = flow.tensor(values), flow.from_numpy(values)
    z = flow.tensor(x)
    values[0] = 9
    x.fill_(7.0)
    assert y.tolist() == [1, 1, 1]
    assert z.tolist() == [1, 1, 1]


def test_strided_values_are_read_as_they_are_shown() -> None:
    values = np.arange(12.0).reshape(3, 4)
    for view in (
        values.T,
        values[::2, ::-1],
        np.broadcast_to(values[0], (2, 4)),
        np.asfortranarray(values),
        values.astype(">f8"),
    ):
        np.testing.assert_array_equal(flow.tensor(view.astype(view.dtype.newbyteorder("="), copy=False)).numpy(), view)


def test_filled() -> None:
    assert flow.zeros(2, 3).tolist() == [[0, 0, 0]] * 2
    assert flow.ones((2,)).tolist() == [1, 1]
    for given in ((0,), (2, 2), (5, 1)):
        assert (flow.arange(*given).dtype, flow.arange(*given).tolist()) == (flow.int64, [])
    with pytest.raises(ValueError, match=r"arange\(\) from 0 to 10 needs a step that is not 0"):
        flow.arange(0, 10, 0)
    assert flow.arange(0, 1, 0.5).dtype is flow.float32
    assert flow.full((2, 1), 3.5).tolist() == [[3.5], [3.5]]
    assert flow.full(2, 3, dtype=flow.float64).tolist() == [3, 3]
    kinds = {value: flow.full((2,), value).dtype for value in (3, True, 2.5, np.int32(7), np.float64(4.5))}
    assert list(kinds.values()) == [flow.int64, flow.bool_, flow.float32, flow.int64, flow.float32]
    assert {flow.zeros(2).dtype, flow.ones(2, dtype=None).dtype} == {flow.float32}
    assert flow.zeros().shape == ()
    assert flow.empty(0, 5).shape == (0, 5)
    assert flow.zeros(np.int64(2), np.int32(1)).shape == (2, 1)
    assert flow.ones(2, requires_grad=True).requires_grad
    like = flow.zeros_like(flow.ones(2, 3, 4, 5).permute(0, 3, 1, 2))
    assert (like.shape, like.stride()) == ((2, 5, 3, 4), (60, 1, 20, 5))
    assert like.sum().item() == 0


def test_ranges() -> None:
    assert flow.arange(4).tolist() == [0, 1, 2, 3]
    assert flow.arange(4).dtype is flow.int64
    assert flow.arange(1, 7, 2).tolist() == [1, 3, 5]
    assert flow.arange(0, 1, 0.25).tolist() == [0, 0.25, 0.5, 0.75]
    assert flow.arange(0).shape == (0,)


def test_random_numbers_come_from_the_seed() -> None:
    flow.manual_seed(3)
    first, second = flow.rand(5), flow.randn(2, 2)
    flow.manual_seed(3)
    assert flow.rand(5).tolist() == first.tolist()
    assert flow.randn(2, 2).tolist() == second.tolist()
    assert flow.rand(5).tolist() != first.tolist()
    flow.manual_seed(4)
    assert flow.rand(5).tolist() != first.tolist()
    generator = flow.Generator(3)
    out = flow.empty(5)
    generator.uniform(out.array, 0.0, 1.0)
    assert out.tolist() == first.tolist()


def test_draws_do_not_overlap() -> None:
    flow.manual_seed(1)
    one = np.concatenate([flow.rand(n).numpy() for n in (1, 3, 4, 5, 8)])
    assert len(set(one.tolist())) == len(one)
    flow.manual_seed(1)
    assert flow.rand(4).tolist()[0] == one[0]


def test_the_layout_does_not_change_what_is_drawn() -> None:
    flow.manual_seed(1)
    dense = flow.nn.init.uniform_(flow.empty(2, 3)).tolist()
    flow.manual_seed(1)
    assert flow.nn.init.uniform_(flow.empty(3, 2).transpose(0, 1)).tolist() == dense


def test_requests_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"a shape has no negative extents: \[2, -1\]"):
        flow.zeros(2, -1)
    with pytest.raises(TypeError, match=r"a shape is made of integers; got 2\.5, 1"):
        flow.zeros(2.5, 1)
    with pytest.raises(TypeError, match="arange takes a number; got str"):
        flow.arange("a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rand\(\) got an unexpected keyword argument 'low'"):
        flow.rand(2, low=1)  # type: ignore[call-arg]
    for count in (0, "a", 1.5):
        with pytest.raises(ValueError, match=f"a number of threads is an integer of at least 1, not {count!r}"):
            flow.set_num_threads(count)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a memory limit is a number of bytes >= 0 or None, not '1GB'"):
        flow.cpu.set_memory_limit("1GB")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="full takes a number; got str"):
        flow.full((2,), "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype is one of flow.bool_, .*flow.float64; got 'float32'"):
        flow.zeros(2, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got <class 'numpy\.float32'>"):
        flow.tensor([1.0], dtype=np.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="arrays of float16 are not supported; convert to one of"):
        flow.tensor(np.ones(2, np.float16))
    with pytest.raises(TypeError, match="arrays of <U1 are not supported"):
        flow.tensor("a")
    with pytest.raises(TypeError, match=r"random numbers are floating-point, not flow\.int64"):
        flow.rand(2, dtype=flow.int64)
    integers = flow.ones(2, dtype=flow.int64)
    with pytest.raises(TypeError, match="random numbers are floating-point"):
        flow.nn.init.uniform_(integers)
    assert integers.tolist() == [1, 1]
    with pytest.raises(ValueError, match="no device is called 'tpu'"):
        flow.zeros(2, device="tpu")
    with pytest.raises(TypeError, match=r"only floating-point tensors can require a gradient, not flow\.int64"):
        flow.tensor([1], requires_grad=True)
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="a seed is an integer from 0"):
            flow.manual_seed(seed)
    with pytest.raises(TypeError, match=r"no element type is called 'float8'; there are bool, .*float64"):
        by_name("float8")


def test_types_and_devices_are_one_object_each_also_after_a_journey() -> None:
    for dtype in ALL:
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert by_name(dtype.name) is dtype
    assert pickle.loads(pickle.dumps(flow.device("cpu"))) is flow.device("cpu")
    assert str(flow.device("cpu")) == "cpu"
    assert flow.device("cpu:0") is flow.device("cpu")


def test_what_is_no_device_is_refused() -> None:
    for given in (0.0, True, np.float32, np.zeros(1)):
        with pytest.raises(TypeError, match="a device is given by its name, such as 'cpu' or 'cuda:1'; got"):
            flow.zeros(1).to(given)
    for name in ("gpu", "cuda:x", "cuda:-1", "cuda:²"):
        with pytest.raises(ValueError, match=f"no device is called '{name}'"):
            flow.device(name)
    with pytest.raises(ValueError, match="there is one device 'cpu', whatever its processors; got number 1"):
        flow.zeros(1, device="cpu:1")


def test_every_type_is_named_as_it_is_found() -> None:
    for dtype in ALL:
        assert getattr(flow, repr(dtype).removeprefix("flow.")) is dtype
    with pytest.raises(TypeError, match=r"pass flow\.bool_, not 'bool'"):
        flow.zeros(1).to("bool")


def test_a_seed_is_an_integer() -> None:
    generator = flow.Generator()
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        generator.manual_seed(1.5)
    assert generator.seed == 0
    assert type(generator.manual_seed(np.uint64(7)).seed) is int


# ---- reading back


def test_reading() -> None:
    x = flow.tensor([[1.5, 2.5]])
    assert x.tolist() == [[1.5, 2.5]]
    assert flow.tensor(3).item() == 3
    assert float(flow.tensor([2.0])) == 2
    assert int(flow.tensor([2.7])) == 2
    assert len(flow.zeros(3, 2)) == 3
    assert (x.ndim, x.numel(), x.shape, x.size(), x.size(1), x.size(-2)) == (2, 2, (1, 2), (1, 2), 2, 1)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=rf"size\({dim}\) of a tensor of shape \[1, 2\]: it has 2 dimensions"):
            x.size(dim)
    assert np.asarray(x).tolist() == [[1.5, 2.5]]
    assert np.shares_memory(x.__array__(copy=False), x.numpy())
    assert not np.shares_memory(np.array(x), x.numpy())
    with pytest.raises(ValueError, match=r"flow\.float32 becomes an array of float64 only by a copy"):
        x.__array__(np.float64, copy=False)
    with pytest.raises(ValueError, match=r"item\(\) needs a tensor of one element; this one has shape \[1, 2\]"):
        x.item()
    with pytest.raises(ValueError, match="one element"):
        bool(x)
    with pytest.raises(TypeError, match="a 0-d tensor has no length"):
        len(flow.tensor(1))
    with pytest.raises(RuntimeError, match=r"requires a gradient; call detach\(\)"):
        flow.ones(1, requires_grad=True).numpy()


def test_repr() -> None:
    assert repr(flow.tensor([1.0, 2.5])) == "tensor([1. , 2.5])"
    assert repr(flow.tensor([1, 2])) == "tensor([1, 2], dtype=flow.int64)"
    x = flow.tensor([1.0], requires_grad=True)
    assert repr(x) == "tensor([1.], requires_grad=True)"
    assert repr(x * 2) == "tensor([2.], grad of multiply)"
    assert len(repr(flow.zeros(1000, 1000))) < 500


def test_conversion() -> None:
    x = flow.tensor([1.7, -2.7])
    assert x.to(flow.float32) is x
    assert x.to("cpu") is x
    assert x.to(flow.int64).tolist() == [1, -2]
    assert x.to(flow.float64).dtype is flow.float64
    assert flow.tensor([0, 3]).to(flow.bool_).tolist() == [False, True]


def test_tensors_are_hashable_and_compare_elements() -> None:
    x, y = flow.tensor([1.0, 2.0]), flow.tensor([1.0, 3.0])
    assert len({x, y, x}) == 2
    assert (x == y).tolist() == [True, False]


def test_formats() -> None:
    assert f"{flow.tensor(1.5, requires_grad=True):.3f}" == "1.500"
    assert f"{flow.tensor([[7]]):03d}" == "007"
    assert f"{flow.tensor(2.5)}" == "2.5"
    assert f"{flow.tensor([2.5])}" == "tensor([2.5])"
    with pytest.raises(ValueError, match=r"one element; this one has shape \[2\]"):
        f"{flow.ones(2):.3f}"


def test_to_takes_a_device_a_type_or_both_as_pytorch_spells_them() -> None:
    a = flow.ones(2, requires_grad=True)
    double = flow.zeros(1, dtype=flow.float64)
    for converted in (
        a.to(flow.float64),
        a.to("cpu", flow.float64),
        a.to(flow.device("cpu"), flow.float64, non_blocking=True),
        a.to(device="cpu", dtype=flow.float64),
        a.to(flow.float64, device="cpu"),
        a.to(double),
        a.double(),
    ):
        assert converted.dtype is flow.float64
        converted.sum().backward()
    assert a.grad.tolist() == [7, 7]
    assert all(b is a for b in (a.to("cpu"), a.to(device="cpu"), a.to(flow.float32), a.to(a), a.float()))
    assert a.detach().long().dtype is flow.int64


def test_a_number_is_that_of_a_cuda_device() -> None:
    assert destination(1, None, None) == (flow.device("cuda:1"), None)
    assert destination(None, flow.float64, 0) == (flow.device("cuda:0"), flow.float64)


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        ((), {}, "or both; got neither"),
        ((None,), {}, "or both; got neither"),
        ((flow.float32, flow.float64), {}, "got two types, flow.float32 and flow.float64"),
        (("cpu",), {"device": "cpu"}, "to() takes one device; got 'cpu' and 'cpu'"),
        (("cpu", "float64"), {}, "such as flow.float32; got 'float64'"),
        (("cpu", True), {}, "such as flow.float32; got True"),
        (([1],), {}, "a device is given by its name, such as 'cpu' or 'cuda:1'; got [1]"),
    ],
)
def test_to_says_what_it_takes(given: tuple[Any, ...], named: dict[str, Any], said: str) -> None:
    for one in (flow.ones(1), flow.nn.Linear(1, 1)):
        with pytest.raises(TypeError, match=re.escape(said)):
            one.to(*given, **named)
