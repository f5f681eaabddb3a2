"""Where in the program a thread is: its own modules and operation, whatever other threads do."""

from __future__ import annotations

import threading
from typing import Any

import framework as flow
from framework.vm import scope


class Meeting(flow.nn.Module):
    """Adds when the other thread is in its module too, and leaves when that one has added."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def forward(self, x: flow.Tensor) -> flow.Tensor:
        self.barrier.wait(30)
        y = x + x
        self.barrier.wait(30)
        return y + x


def test_threads_do_not_mix_their_modules() -> None:
    barrier = threading.Barrier(2)
    found: dict[str, str] = {}

    def work(name: str) -> None:
        model = flow.nn.Sequential()
        setattr(model, name, Meeting(barrier))
        for _ in range(20):
            y = model(flow.ones(2, requires_grad=True))
            found[name] = repr(y.node)
            y.sum().backward()
        found[f"{name}, outside"] = repr((flow.ones(2, requires_grad=True) * 2).node)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": "a: add", "b": "b: add", "a, outside": "multiply", "b, outside": "multiply"}
    assert scope.here.frame is None
    flow.ones(1) + 1
    assert scope.current is None


def test_what_a_hook_computes_stands_in_the_backward_that_called_it() -> None:
    seen: list[Any] = []
    x = flow.ones(2, requires_grad=True)
    y = x * 2

    def hook(gradient: flow.Tensor) -> None:
        with flow.enable_grad():
            seen.append(repr((gradient.requires_grad_() * 3).node))
        seen.append(scope.path(scope.current))

    y.register_hook(hook)
    y.sum().backward()
    assert seen == ["multiply.backward: multiply", "multiply: backward"]
    assert scope.here.frame is None
