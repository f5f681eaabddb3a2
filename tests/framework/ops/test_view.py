"""Views: the same memory under another shape, whatever the strides it came with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import framework as flow
from tests.framework.kernels.cases import draw

VALUES = draw(2, 3, 4)
KEYS: list[Any] = [
    0, -1, slice(1, None), slice(None, None, 2), (slice(None), 1), (..., 0), (0, ..., -1), (slice(None), None, 2), None,
    (1, 2, 3), slice(5, 9), (slice(None), slice(-2, None), slice(1, 4, 2)), ..., (),
]  # fmt: skip


def same_elements_in_other_layouts(values: np.ndarray) -> list[flow.Tensor]:
    """Tensors with these values, lying in memory in different orders, with gaps, and repeated."""
    spaced = flow.zeros(*[2 * n for n in values.shape], dtype=flow.float64)[
        tuple(slice(1, None, 2) for _ in values.shape)
    ]
    return [
        flow.from_numpy(values),
        flow.from_numpy(values.transpose(2, 0, 1)).permute(1, 2, 0),
        spaced.copy_(flow.from_numpy(values)),
    ]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_is_numpys_and_shares_memory(key: Any) -> None:
    for x in same_elements_in_other_layouts(VALUES):
        part = x[key]
        np.testing.assert_array_equal(part.numpy(), VALUES[key])
        part.fill_(7.0)
        expected = VALUES.copy()
        expected[key] = 7
        np.testing.assert_array_equal(x.numpy(), expected)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_the_gradient_of_a_part_lies_where_the_part_was(key: Any) -> None:
    for x in same_elements_in_other_layouts(VALUES):
        x.requires_grad_()
        weight = draw(*VALUES[key].shape, seed=1)
        x[key].backward(flow.tensor(weight))
        expected = np.zeros(VALUES.shape)
        expected[key] = weight
        np.testing.assert_array_equal(x.grad.numpy(), expected)


def test_parts_that_are_none() -> None:
    x = flow.zeros(2, 3)
    for key, error, text in (
        (2, IndexError, "index 2 of dimension 0 with 2 elements"),
        ((0, -4), IndexError, "index -4 of dimension 1 with 3 elements"),
        ((0, 0, 0), IndexError, "3 indices for a tensor with 2 dimensions"),
        (slice(None, None, -1), IndexError, "a slice takes a positive step"),
        ("a", TypeError, "an index is an integer, a slice, None or ..., not str"),
        (1.0, TypeError, "not float"),
    ):
        with pytest.raises(error, match=text):
            x[key]


def test_iteration_goes_over_the_first_dimension() -> None:
    assert [row.tolist() for row in flow.tensor([[1, 2], [3, 4]])] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("shape", [(24,), (4, 6), (-1, 2), (2, 3, 4), (1, 24, 1), (2, -1, 2, 2)])
def test_reshaping_keeps_the_order_of_elements(shape: tuple[int, ...]) -> None:
    for x in same_elements_in_other_layouts(VALUES):
        np.testing.assert_array_equal(x.reshape(*shape).numpy(), VALUES.reshape(shape))
        np.testing.assert_array_equal(x.reshape(shape).numpy(), VALUES.reshape(shape))


@pytest.mark.usefixtures("no_garbage")
def test_reshaping_shares_memory_where_it_can() -> None:
    x = flow.zeros(2, 3)
    before = flow.cpu.memory_allocated()
    view = x.reshape(3, 2)
    assert flow.cpu.memory_allocated() == before
    view.fill_(1.0)
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]
    pooled = flow.nn.functional.global_avg_pool2d(flow.ones(2, 5, 3, 3))
    before = flow.cpu.memory_allocated()
    assert pooled.flatten(1).shape == (2, 5)
    assert flow.cpu.memory_allocated() == before


def test_images_in_nhwc_are_reshaped_in_the_order_of_their_shape() -> None:
    images = draw(2, 3, 2, 2)
    x = flow.from_numpy(images.transpose(0, 2, 3, 1)).permute(0, 3, 1, 2)
    assert x.stride() == (12, 1, 6, 3)
    np.testing.assert_array_equal(x.flatten(1).numpy(), images.reshape(2, -1))


def test_shapes_that_do_not_fit() -> None:
    x = flow.zeros(2, 3)
    for shape in ((4,), (-1, 4), (-1, -1), (-2, 3)):
        with pytest.raises(ValueError, match=r"shape \[2, 3\] cannot be reshaped to \["):
            x.reshape(*shape)
    with pytest.raises(ValueError, match=r"permute of 2 dimensions got \[0, 0\]"):
        x.permute(0, 0)
    with pytest.raises(IndexError, match="dimension 2 of a tensor with 2 dimensions"):
        x.transpose(0, 2)
    with pytest.raises(IndexError, match="dimension 3 of a tensor with 2 dimensions"):
        x.flatten(3)
    with pytest.raises(ValueError, match=r"\[2, 3\] .*\[4, 3\]"):
        x.expand(4, 3)


def test_what_is_no_shape_and_no_order_is_refused() -> None:
    x = flow.zeros(2, 3)
    for dims, wrong in (((2, 3), 2), ((0, 5), 5), ((-3, 1), -3)):
        with pytest.raises(IndexError, match=f"dimension {wrong} of a tensor with 2"):
            x.permute(*dims)
    for call in (lambda: x.reshape(2.0, 3), lambda: x.expand(2.0, 3), lambda: x.permute(1.0, 0)):
        with pytest.raises(TypeError, match=r"extents and dimensions are integers; got [12]\.0, [03]"):
            call()
    assert x.reshape(np.int64(6)).shape == (6,)
    assert type(x.reshape(np.int64(6)).shape[0]) is int


def test_a_view_is_no_copy_or_is_refused() -> None:
    x = flow.tensor(np.arange(24.0).reshape(2, 3, 4))
    for part, shape in ((x[:, :2], (2, 2, 2, 2)), (x[:, :, 0], (2, 1, 3)), (x[:, ::2], (2, -1, 1, 4)), (x[0], (12,))):
        expected = part.numpy().reshape(shape)
        for viewed in (part.view(*shape), part.reshape(shape)):
            assert viewed.array.storage is x.array.storage
            np.testing.assert_array_equal(viewed.numpy(), expected)
    assert x[0].expand(5, 3, 4).view(5, 12).stride() == (0, 1)
    assert x[:0].view(0, 7).shape == (0, 7)
    for part, shape in ((x[:, :2], (16,)), (x.transpose(0, 1), (6, 4)), (x[:, :, ::3], (2, 2, 3))):
        with pytest.raises(RuntimeError, match=r"strides \[.*cannot be viewed as \[.*; reshape\(\) copies it"):
            part.view(*shape)
        np.testing.assert_array_equal(part.reshape(*shape).numpy(), part.numpy().reshape(shape))


def test_a_part_without_elements_behind_the_last_one() -> None:
    x = flow.zeros(1024, 16384)  # as many bytes as its piece of memory
    assert x[1024:, 16384:].tolist() == []
    assert x[1024:].sum(1).shape == (0,)


def test_empty_tensors_can_be_reshaped() -> None:
    assert flow.zeros(0, 3).reshape(3, 0).shape == (3, 0)
    assert flow.zeros(0, 3).reshape(-1).shape == (0,)
    assert flow.zeros(0, 3, 2).flatten(1).shape == (0, 6)


@pytest.mark.usefixtures("no_garbage")
def test_expanding_takes_no_memory() -> None:
    x = flow.ones(3, 1)
    before = flow.cpu.memory_allocated()
    wide = x.expand(2, 3, 1000)
    assert flow.cpu.memory_allocated() == before
    assert wide.stride() == (0, 1, 0)
    assert wide.sum().item() == 6000


@pytest.mark.usefixtures("no_garbage")
def test_a_view_keeps_the_memory_alive() -> None:
    x = flow.ones(1 << 18)
    before = flow.cpu.memory_allocated()
    view = x[:1]
    del x
    assert flow.cpu.memory_allocated() == before
    assert view.item() == 1
    del view
    assert flow.cpu.memory_allocated() == before - (1 << 20)


def test_a_numpy_array_keeps_the_memory_alive() -> None:
    values = (flow.ones(1 << 18) * 3).numpy()
    flow.zeros(1 << 18)
    assert np.all(values == 3)
    x = flow.zeros(4)
    x.numpy()[1] = 5
    assert x.tolist() == [0, 5, 0, 0]


def test_going_through_a_tensor_gives_its_slices_in_order() -> None:
    x = flow.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    first, second = x
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])
    (first * 5 + second * 7).sum().backward()
    assert x.grad.tolist() == [[5, 5], [7, 7]]
    assert list(flow.ones(0, 2)) == []
    with pytest.raises(TypeError, match="a 0-d tensor has no rows"):
        iter(flow.tensor(5.0))


def test_what_is_an_index() -> None:
    x = flow.tensor([[1, 2], [3, 4]])
    assert x[np.int64(1)].tolist() == [3, 4]
    assert x[np.int32(-1), np.uint8(0)].item() == 3
    for key, name in ((True, "bool"), ((0, False), "bool"), (np.True_, "bool"), (1.0, "float"), ([0], "list")):
        with pytest.raises(TypeError, match=rf"an index is an integer, a slice, None or ..., not {name}"):
            x[key]
    for key in (flow.tensor(1), (0, flow.tensor([1, 1]))):
        with pytest.raises(TypeError, match=r"not Tensor; int\(\) of a tensor with one element is such an integer"):
            x[key]
    assert x[int(flow.tensor(1))].tolist() == [3, 4]


def test_a_part_takes_values_by_its_index() -> None:
    a = flow.zeros(2, 3)
    a[0] = 1
    a[:, 1:] = flow.tensor([5.0, 6.0])
    a[-1, 0] += 2
    assert a.tolist() == [[1, 5, 6], [2, 5, 6]]
    with flow.no_grad():
        parameter = flow.ones(2, requires_grad=True)
        parameter[1] = 0
    assert parameter.tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"a tensor of shape \[3\] does not fit in place of one of \[\]"):
        a[0, 0] = flow.ones(3)
    with pytest.raises(TypeError, match="fill_ takes a number; got ndarray"):
        a[0] = np.ones(3)
    with pytest.raises(RuntimeError, match=r"writing in place to a view.* is not recorded for backward"):
        a[0] = flow.ones(3, requires_grad=True)
