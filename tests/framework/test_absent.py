"""Names that scripts for PyTorch use and Flow has not: what is said of them."""

from __future__ import annotations

import re

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
    assert absent._WAYS_OUT
    for name, way_out in absent._WAYS_OUT.items():
        assert not _is_there(name), f"{name} is there by now"
        for led_to in re.findall(r"flow(?:\.\w+)+", way_out):
            assert _is_there(led_to), f"the way out of {name} is {led_to}, which is not there"


def _is_there(name: str) -> bool:
    found = flow
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
