"""The backward walk: from a result to the leaves it came from, each node once, newest first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

from framework.autograd.gradient import Gradient
from framework.autograd.mode import no_grad
from framework.autograd.node import Hook, Node
from framework.device import Device
from framework.vm import schedule, scope
from framework.vm.array import Array
from framework.vm.runtime import runtime
from framework.vm.scope import here
from framework.vm.storage import Storage

if TYPE_CHECKING:
    from framework.tensor import Tensor


def backward(root: Tensor, gradient: Array, *, retain_graph: bool = False) -> None:
    """Adds the gradient of `root`, weighted by `gradient`, to every leaf it was computed from.

    What nodes saved is freed as the walk passes them, unless `retain_graph` is set. Raises RuntimeError where it
    was freed before.
    """
    outer, outer_callbacks = here.frame, _running.callbacks
    callbacks: list[tuple[Callable[[], None], Callable[[], None] | None]] = []
    _running.callbacks = callbacks
    try:
        with no_grad():
            try:
                with schedule.backward() as move:
                    _walk(root.edge(), gradient, retain_graph, move)
            finally:
                runtime(gradient.storage.device).join()
            for callback, _ in callbacks:
                callback()
    except BaseException:
        for _, on_failure in callbacks:
            if on_failure is not None:
                on_failure()
        raise
    finally:
        here.frame = scope.current = outer
        _running.callbacks = outer_callbacks


def after_backward(callback: Callable[[], None], on_failure: Callable[[], None] | None = None) -> None:
    """Calls `callback` when the backward that is running in this thread has walked to its end.

    Where an exception ends it, in the walk or in a callback, `on_failure` is called instead.

    Raises RuntimeError where none is running. A callback that is added while they are called is called too.
    """
    if _running.callbacks is None:
        raise RuntimeError("after_backward() is for hooks: no backward is running in this thread")
    _running.callbacks.append((callback, on_failure))


class _Running(threading.local):
    callbacks: list[tuple[Callable[[], None], Callable[[], None] | None]] | None = None


_running = _Running()


class _Pending:
    """A node or leaf that the walk will come to: how many of its gradients are still missing, and what came so far.

    `first` is the gradient of output 0, `others` those of further outputs.
    """

    __slots__ = ("first", "missing", "others")

    def __init__(self, missing: int = 1) -> None:
        self.missing = missing
        self.first: Gradient | None = None
        self.others: dict[int, Gradient] | None = None

    def add(self, target: Any, index: int, array: Array, owned: bool) -> None:
        """One more gradient of output `index` of `target`."""
        if index:
            self.others = self.others or {}
            gathered = self.others.get(index)
            if gathered is None:
                self.others[index] = Gradient(array, owned)
        else:
            gathered = self.first
            if gathered is None:
                self.first = Gradient(array, owned)
        if gathered is not None:
            # Whether the backward to come adds up the parts itself.
            in_parts = type(target) is Node and target.operation.takes_parts and not target.hooks
            gathered.add(array, owned, in_parts=in_parts)

    def owned(self, node: Node) -> list[int]:
        """The serials of the memory that is handed to the backward of `node` alone; a hook may keep what it sees."""
        if node.hooks:
            return []
        if self.others is None:
            return [] if self.first is None else self.first.owned_serials()
        return [serial for grad in self.by_output().values() for serial in grad.owned_serials()]

    def by_output(self) -> dict[int, Gradient]:
        """The gradients that came, by output."""
        first = {} if self.first is None else {0: self.first}
        return first if self.others is None else first | self.others


_ONCE = _Pending()


def _walk(
    start: tuple[Any, int], gradient: Array, retain_graph: bool, move: Callable[[Device], None] | None = None
) -> None:
    root, index = start
    # By identity: a leaf is a tensor, and `==` between tensors compares their elements.
    pending = _uses(root)
    # A heap, newest first: numbers are negative.
    ready: list[tuple[int, Node]] = []
    pending[id(root)].add(root, index, gradient, owned=False)
    _release(root, pending[id(root)], ready)
    next_serial = Storage.next_serial
    while ready:
        node = heappop(ready)[1]
        if move is not None:
            move(node.runtime.device)
        # Behind hooks nothing counts as made here: it may be what a hook made, and kept.
        made = inf if node.hooks else next_serial()
        grads = pending.pop(id(node))
        lent = grads.owned(node)
        results = _run(node, grads, retain_graph)
        serials = [0 if result is None else result.storage.serial for result in results]
        for edge, result, serial in zip(node.edges, results, serials):  # noqa: B905 - `_run` has counted them
            if edge is None:
                continue
            target, index = edge
            waiting = pending[id(target)]
            if result is not None:
                # Made by the backward just run, or passed on by it, whole, and handed out once: nobody else holds it.
                owned = (
                    (serial > made or serial in lent)
                    and serials.count(serial) == 1
                    and result.storage.nbytes == result.layout.nbytes
                )
                if waiting is _ONCE:
                    target.accumulate(result, owned=owned)
                    continue
                waiting.add(target, index, result, owned)
            if waiting is not _ONCE:
                waiting.missing -= 1
                if not waiting.missing:
                    _release(target, waiting, ready)
        # Nothing here may keep a gradient alive while the next node runs.
        del results, lent, grads
        result = waiting = None  # type: ignore[assignment]


def _release(target: Any, waiting: _Pending, ready: list[tuple[int, Node]]) -> None:
    """All gradients of `target` are in: a node may run, a leaf takes the sum."""
    if type(target) is Node:
        heappush(ready, (-target.number, target))
    elif waiting.first is not None:
        total, waiting.first = waiting.first, None
        target.accumulate(total.array, owned=total.owned)


def _uses(root: Any) -> dict[int, _Pending]:
    """What the walk from `root` will come to, each with the number of edges that lead to it.

    A leaf with one edge, as most parameters are, takes its gradient at once: `_ONCE` stands for it.
    """
    found = {id(root): _Pending()}
    stack = [root] if type(root) is Node else []
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            known = found.get(id(target))
            if known is None:
                if type(target) is Node:
                    found[id(target)] = _Pending()
                    stack.append(target)
                else:
                    found[id(target)] = _ONCE
            elif known is _ONCE:
                found[id(target)] = _Pending(2)
            else:
                known.missing += 1
    return found


def _run(node: Node, grads: _Pending, retain_graph: bool) -> Sequence[Array | None]:
    """The gradients of the node's inputs, None for each where no gradient reached the node."""
    if grads.first is None and grads.others is None:
        return [None] * len(node.edges)
    if node.freed:
        node.check_not_freed()
    operation, node.is_retained = node.operation, retain_graph
    here.frame = scope.current = (node.scope, "backward")
    if node.hooks or grads.others is not None:
        results = _run_with_hooks(node, grads.by_output())
    else:
        first: Any = grads.first
        grads.first = None
        results = operation.backward(node, node.runtime, first if operation.takes_parts else first.total())
    if not retain_graph:
        node.free()
    if type(results) is not tuple:
        results = (results,)
    if len(results) != len(node.edges):
        raise RuntimeError(f"backward of {operation.name} gave {len(results)} gradients for {len(node.edges)} inputs")
    return results


def _run_with_hooks(node: Node, sums: dict[int, Gradient]) -> Any:
    """As the backward of a node alone, for one with hooks or several outputs."""
    for index, hooks in (node.hooks or {}).items():
        if index in sums:
            sums[index] = Gradient(run_hooks(hooks, sums[index].total()), owned=False)
    grads: list[Any] = [sums.get(index) for index in range(max(sums) + 1)]
    if not node.operation.takes_parts:
        grads = [grad and grad.total() for grad in grads]
    return node.operation.backward(node, node.runtime, *grads)


def run_hooks(hooks: list[Hook], array: Array) -> Array:
    """Passes a gradient through hooks, each of which may replace it."""
    from framework.tensor import Tensor

    # What retain_grad() keeps is what the hooks leave. A copy of the list, since a hook may add and remove hooks.
    for hook in sorted(hooks, key=lambda hook: getattr(hook, "comes_last", False)):
        replaced = hook(Tensor(array))
        if replaced is not None:
            if not isinstance(replaced, Tensor):
                raise TypeError(
                    f"a tensor hook returned {type(replaced).__name__}, expected a tensor to take the gradient's place, or"
                    " None to leave it"
                )
            if replaced.shape != array.shape:
                raise RuntimeError(
                    f"a tensor hook returned shape {list(replaced.shape)} for a gradient of {list(array.shape)}"
                )
            if replaced.dtype is not array.dtype or replaced.device is not array.storage.device:
                raise RuntimeError(
                    f"a tensor hook returned {replaced.dtype} on {replaced.device} for a gradient of {array.dtype} on"
                    f" {array.storage.device}; convert it with .to()"
                )
            array = replaced.array
    return array
