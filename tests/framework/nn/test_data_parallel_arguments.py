"""DistributedDataParallel as scripts for PyTorch call it: what is taken because it is so, and what is refused with the way out."""

from __future__ import annotations

import re
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

import framework as flow
from framework.nn.parallel import DistributedDataParallel
from framework.nn.parallel.arguments import check_devices
from tests.framework.nn.test_data_parallel import on_two_ranks

# PyTorch's argument, and the way out.
REFUSED = {
    "init_sync": "leave it out: parameters and buffers always become those of the first rank",
    "forward_sync_buffers": "here it is called broadcast_buffers",
    "mixed_precision": "convert the module, on a GPU, by .to(flow.bfloat16) before it is wrapped",
    "batched_grad_copy": "leave it out: it changes no result",
    "find_unused_parameter": "help(flow.nn.parallel.DistributedDataParallel) says what it takes",
}


def lying_on(*names: str) -> Any:
    """Stands for a module with a parameter on each device."""
    return SimpleNamespace(parameters=lambda: [SimpleNamespace(device=flow.device(name)) for name in names])


def test_what_a_script_says_of_unused_parameters_and_graphs_changes_nothing() -> None:
    on_two_ranks("""
import copy

class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, name):
        return getattr(self, name)(x)

for options in ({}, {"find_unused_parameters": True}, {"find_unused_parameters": False, "static_graph": True}):
    model = DDP(Choice(), None, **options)
    # Each rank another one, and then each the other's.
    for names in ("a", "b"), ("b", "a"), ("a", "a"):
        model.zero_grad()
        model(flow.ones(1, 3), names[rank]).sum().backward()
        for name in ("a", "b", "never"):
            used = names.count(name)
            found = getattr(model.module, name).weight.grad
            assert (found is None) == (not used), (options, names, name)
            assert not used or set(found.numpy().ravel()) == {used / 2}, (options, names, name)
copied = copy.deepcopy(DDP(net(), broadcast_buffers=False, bucket_cap_mb=3, gradient_as_bucket_view=False))
assert (copied.broadcast_buffers, copied.bucket_cap_mb, copied.gradient_as_bucket_view) == (False, 3, False)
for given in ({"device_ids": [rank]}, {"output_device": rank}):
    try:
        DDP(net(), **given)
    except ValueError as refused:
        assert f"says cuda:{rank}, the module lies on cpu: move it first" in str(refused), refused
    else:
        raise AssertionError("went through")
DDP(net(), device_ids=[], output_device="cpu")
""")


@pytest.mark.parametrize(
    ("device_ids", "output_device"),
    [([1], None), ([1], 1), (None, "cuda:1"), (("cuda:1",), flow.device("cuda:1")), ([], None), (None, None)],
)
def test_the_modules_own_device_may_be_named(device_ids: Any, output_device: Any) -> None:
    check_devices(lying_on("cuda:1", "cuda:1"), device_ids, output_device)


@pytest.mark.parametrize(
    ("devices", "device_ids", "output_device", "words"),
    [
        (
            ["cuda:1"],
            [0],
            None,
            "device_ids says cuda:0, the module lies on cuda:1: move it first, by .to('cuda:0'), or leave",
        ),
        (["cuda:1"], [1], 0, "output_device says cuda:0, the module lies on cuda:1"),
        (["cpu"], [0], 0, "device_ids says cuda:0, the module lies on cpu"),
        (["cuda:1", "cpu"], [1], None, "device_ids says cuda:1, the module lies on cpu, cuda:1"),
        (
            ["cuda:0"],
            [0, 1],
            None,
            "device_ids is a list with the rank's one device, got [0, 1]: start a rank for each GPU",
        ),
        (["cuda:0"], 0, None, "device_ids is a list with the rank's one device, got 0"),
    ],
)
def test_another_device_is_refused(devices: list[str], device_ids: Any, output_device: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        check_devices(lying_on(*devices), device_ids, output_device)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(
        TypeError, match=f"^DistributedDataParallel has no argument {name}: {re.escape(REFUSED[name])}$"
    ):
        DistributedDataParallel(flow.nn.Linear(1, 1), **{name: True})


def test_what_stands_in_front_is_pytorchs_and_all_else_is_called_by_name() -> None:
    torch = pytest.importorskip("torch", reason="asks PyTorch for its arguments")
    ours, theirs = (
        list(signature(kind).parameters)
        for kind in (DistributedDataParallel, torch.nn.parallel.DistributedDataParallel)
    )
    assert ours[:3] == theirs[:3]
    with pytest.raises(TypeError, match="positional arguments"):
        DistributedDataParallel(flow.nn.Linear(1, 1), None, None, True)  # type: ignore[misc]
    for name in set(theirs) - set(ours):
        with pytest.raises(TypeError, match=f"has no argument {name}: "):
            DistributedDataParallel(flow.nn.Linear(1, 1), **{name: None})
