"""Random programs on several streams: whatever shares elements is in a certain order, and each rule is needed for that."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from framework.vm import Array, dependence
from framework.vm.machine import Machine
from framework.vm.stream import Mark, Stream
from framework.vm.uses import Uses
from tests.framework.vm.model import OrderError, Program

_PROGRAMS, _LENGTH = 40, 60


@pytest.mark.parametrize("seed", range(_PROGRAMS))
def test_what_shares_elements_is_in_order(seed: int) -> None:
    Program(seed).run(_LENGTH)


def _cover_the_first_alone(uses: Uses, part: Array) -> None:
    if not uses.end:
        uses.start, uses.end = part.ptr, part.ptr + part.layout.reach_bytes


def _cover_without_gaps(uses: Uses, part: Array) -> None:
    uses.start, uses.end = min(uses.start, part.ptr), max(uses.end, part.ptr + part.nbytes)


def _note_no_reads(reads: list[Array], writes: list[Array], mark: Mark) -> None:
    for written in writes:
        dependence.note_write(written, mark)


def _forget_the_write(part: Array, stream: Stream) -> None:
    """In place of waiting for it before reading."""


def _hold_as_at_home(part: Array, stream: Stream) -> None:
    stream.sequence += 1
    dependence._uses(part).reads[stream] = stream.mark()


_RULES: dict[str, tuple[Any, str, Any]] = {
    "parts that overlap touch": (Uses, "touch", lambda uses, part: False),
    "what is covered grows": (Uses, "cover", _cover_the_first_alone),
    "gaps count": (Uses, "cover", _cover_without_gaps),
    "what was not joined is waited for": (Uses, "is_joined", lambda uses: True),
    "memory goes back when its users are done": (Uses, "is_over", lambda uses: True),
    "writes wait": (dependence, "wait", lambda reads, writes, stream: None),
    "reads wait": (dependence, "wait_to_read", _forget_the_write),
    "reads are noted": (dependence, "note", _note_no_reads),
    "all follow the first stream": (sys.modules[Machine.__module__], "_NEWEST", -1),
    "working memory is noted": (Machine, "lend", lambda self, part: part),
    "memory of the host is read elsewhere": (dependence, "hold", _hold_as_at_home),
    "the host looks for that": (Machine, "hold", lambda self, part, stream: dependence.hold(part, stream)),
    "what fails may have begun": (Stream, "runs_at_once", False),
    "the host waits before it looks": (Machine, "settle", lambda self, part: None),
}


@pytest.mark.parametrize("rule", _RULES)
def test_without_a_rule_some_program_is_out_of_order(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, without = _RULES[rule]
    monkeypatch.setattr(owner, name, without)
    with pytest.raises(OrderError):
        _run_all(200)


def _run_all(seeds: int) -> None:
    for seed in range(seeds):
        Program(seed).run(_LENGTH)
