"""Names that scripts for PyTorch use and Flow has not: what is said of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

import framework as flow
from framework import absent


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optim.Adam", "flow.optim has no 'Adam': flow.optim.SGD is the one optimizer"),
        ("optim.RMSprop", "flow.optim has no 'RMSprop'; it has SGD"),
        ("long", "flow has no 'long': flow.int64 is the element type"),
        ("nn.functional.softmax", "flow.nn.functional has no 'softmax'; it has batch_norm, conv2d, cross_entropy, "),
        ("nn.init.zeros_", "flow.nn.init has no 'zeros_': flow.nn.init.constant_(tensor, 0) does it"),
        ("cat", r"flow has no 'cat'; it has \d+ names that dir\(flow\) lists"),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_what_is(name: str, said: str) -> None:
    *rooms, last = name.split(".")
    room = flow
    for one in rooms:
        room = getattr(room, one)
    with pytest.raises(AttributeError, match=said if "\\" in said else re.escape(said)):
        getattr(room, last)
    assert not hasattr(room, last)


def test_ways_out_are_of_names_that_are_not_there_and_lead_to_such_as_are() -> None:
    cudnn = {f"flow.backends.cudnn.{name}": way_out for name, way_out in absent.CUDNN.items()}
    assert absent._WAYS_OUT
    for name, way_out in (absent._WAYS_OUT | cudnn).items():
        assert not _is_there(name), f"{name} is there by now"
        for led_to in re.findall(r"flow(?:\.\w+)+", way_out):
            assert _is_there(led_to), f"the way out of {name} is {led_to}, which is not there"


def test_what_a_tensor_and_an_optimizer_have_not_leads_to_what_does_it() -> None:
    a = flow.tensor([[3.0, -4.0]], requires_grad=True)
    for name in ("data", "T", "norm"):
        for refused in (lambda name=name: getattr(a, name), lambda name=name: setattr(a, name, 1)):
            with pytest.raises(AttributeError, match=f"^Tensor has no '{name}': "):
                refused()
        assert not hasattr(a, name)
    with pytest.raises(AttributeError, match=r"^CudnnSettings has no 'benchmark': leave it out: .*cudnn\.timed_plans"):
        flow.backends.cudnn.benchmark = True
    optimizer = flow.optim.SGD([a], lr=0.1)
    with pytest.raises(AttributeError, match=r"SGD has no 'param_groups': there is one group: `optimizer\.lr`"):
        _ = optimizer.param_groups


@pytest.mark.parametrize("name", absent.TENSOR)
def test_the_way_out_of_what_a_tensor_has_not_is_code_that_runs(name: str) -> None:
    """What stands in front of its verb is evaluated, and compared with PyTorch's where that has one result of it."""
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    assert not hasattr(flow.Tensor, name), f"Tensor has {name} by now"
    way_out = absent.TENSOR[name]
    code = re.match(r"(.+?) (?:does|do|says|shares|is|finds)\b", way_out)
    assert code is not None, way_out
    pair = flow.tensor([[3.0, -4.0]]), flow.tensor([[1.0, 2.0]])
    theirs = tuple(torch.from_numpy(one.numpy().copy()) for one in pair)
    for part in code[1].split(" and "):
        found = eval(part, {"flow": flow, "a": pair[0], "b": pair[1]})
        if name in ("T", "add", "div", "int", "max", "min", "mul", "neg", "norm", "sigmoid", "sub", "t"):
            wanted = getattr(theirs[0], name)
            wanted = wanted if name == "T" else wanted(theirs[1]) if name in ("add", "div", "mul", "sub") else wanted()
            np.testing.assert_allclose(np.asarray(found), wanted.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    "use",
    [
        lambda a: a < 1, lambda a: a > 1, lambda a: a <= a, lambda a: a > np.float32(1), lambda a: np.ones(2) >= a,
        lambda a: max(a.sum(), a.mean()), lambda a: a**2, lambda a: 2**a, lambda a: a // 2, lambda a: a % 2, abs,
    ],
)  # fmt: skip
def test_an_operator_that_is_not_there_leads_to_what_does_it(use: Callable[[flow.Tensor], object]) -> None:
    with pytest.raises(TypeError, match=r"^Tensor has no (<|<=|>|>=|\*\*|//|%|abs\(\)): .*a\b"):
        use(flow.ones(2))


def _is_there(name: str) -> bool:
    found = flow
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
