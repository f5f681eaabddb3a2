"""The backward walk: from a result to the leaves it came from, each node once, newest first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from framework.autograd.gradient import Gradient
from framework.autograd.mode import no_grad
from framework.autograd.node import Hook, Node
from framework.vm import scope
from framework.vm.array import Array
from framework.vm.storage import Storage

if TYPE_CHECKING:
    from framework.tensor import Tensor


def backward(root: Tensor, gradient: Array, *, retain_graph: bool = False) -> None:
    """Adds the gradient of `root`, weighted by `gradient`, to every leaf it was computed from.

    What nodes saved is freed as the walk passes them, unless `retain_graph` is set. Raises RuntimeError where it
    was freed before.
    """
    outer, outer_callbacks = scope.current, _running.callbacks
    callbacks: list[Callable[[], None]] = []
    _running.callbacks = callbacks
    try:
        with no_grad():
            _walk(root.edge(), gradient, retain_graph)
            for callback in callbacks:
                callback()
    finally:
        scope.current, _running.callbacks = outer, outer_callbacks


def after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` when the backward that is running in this thread has walked to its end.

    Raises RuntimeError where none is running. A callback that is added while they are called is called too.
    """
    if _running.callbacks is None:
        raise RuntimeError("after_backward() is for hooks: no backward is running in this thread")
    _running.callbacks.append(callback)


class _Running(threading.local):
    callbacks: list[Callable[[], None]] | None = None


_running = _Running()


def _walk(start: tuple[Any, int], gradient: Array, retain_graph: bool) -> None:
    root, index = start
    missing = _count_uses(root)
    # By identity: a leaf is a tensor, and `==` between tensors compares their elements.
    sums: dict[int, dict[int, Gradient]] = {id(root): {index: Gradient(gradient, owned=False)}}
    ready: list[tuple[int, Node]] = []
    _release(root, sums, ready)
    next_serial = Storage.next_serial
    while ready:
        node = heappop(ready)[1]
        made = next_serial()
        grads = sums.pop(id(node), None)
        # What is handed to the backward alone; a hook may keep what it sees.
        lent = [s for grad in grads.values() for s in grad.owned_storages()] if grads and not node.hooks else []
        results = _run(node, grads, retain_graph)
        storages = [None if result is None else result.storage for result in results]
        for edge, result, storage in zip(node.edges, results, storages):  # noqa: B905 - `_run` has counted them
            if edge is None:
                continue
            target, index = edge
            key = id(target)
            uses = missing[key] = missing[key] - 1
            if result is not None:
                # Made by the backward just run, or passed on by it, whole, and handed out once: nobody else holds it.
                owned = (
                    (storage.serial > made or storage in lent)
                    and storages.count(storage) == 1
                    and storage.nbytes == result.layout.nbytes
                )
                gathered = sums.get(key)
                if gathered is None:
                    if not uses and type(target) is not Node:
                        # A leaf with one gradient, as most parameters are, takes it at once.
                        target.accumulate(result, owned=owned)
                        continue
                    sums[key] = {index: Gradient(result, owned)}
                elif index not in gathered:
                    gathered[index] = Gradient(result, owned)
                else:
                    gathered[index].add(result, owned, in_parts=_takes_parts(target))
            if not uses:
                _release(target, sums, ready)
        # Nothing here may keep a gradient alive while the next node runs.
        del results, storages, lent
        result = storage = gathered = None


def _takes_parts(target: Any) -> bool:
    """Whether a backward adds up the parts of its gradient itself."""
    return isinstance(target, Node) and target.operation.takes_parts and not target.hooks


def _release(target: Any, sums: dict[int, dict[int, Gradient]], ready: list[tuple[int, Node]]) -> None:
    """All gradients of `target` are in: a node may run, a leaf takes the sum."""
    if isinstance(target, Node):
        heappush(ready, (-target.number, target))
    elif id(target) in sums:
        total = sums.pop(id(target))[0]
        target.accumulate(total.array, owned=total.owned)


def _count_uses(root: Any) -> dict[int, int]:
    """How many edges of the graph under `root` lead to each node and leaf."""
    uses = {id(root): 0}
    stack = [root] if isinstance(root, Node) else []
    while stack:
        for edge in stack.pop().edges:
            if edge is None:
                continue
            target = edge[0]
            if id(target) in uses:
                uses[id(target)] += 1
            else:
                uses[id(target)] = 1
                if isinstance(target, Node):
                    stack.append(target)
    return uses


def _run(node: Node, sums: dict[int, Gradient] | None, retain_graph: bool) -> Sequence[Array | None]:
    """The gradients of the node's inputs, None for each where no gradient reached the node."""
    if sums is None:
        return [None] * len(node.edges)
    if node.freed:
        node.check_not_freed()
    operation = node.operation
    scope.current = (node.scope, "backward")
    if node.hooks:
        for index, hooks in node.hooks.items():
            if index in sums:
                sums[index] = Gradient(run_hooks(hooks, sums[index].total()), owned=False)
    grads: list[Any] = [sums.get(index) for index in range(max(sums) + 1)]
    if not operation.takes_parts:
        grads = [grad and grad.total() for grad in grads]
    sums.clear()
    results = operation.backward(node, node.runtime, *grads)
    if not retain_graph:
        node.free()
    if not isinstance(results, tuple):
        results = (results,)
    if len(results) != len(node.edges):
        raise RuntimeError(f"backward of {operation.name} gave {len(results)} gradients for {len(node.edges)} inputs")
    return results


def run_hooks(hooks: list[Hook], array: Array) -> Array:
    """Passes a gradient through hooks, each of which may replace it."""
    from framework.tensor import Tensor

    for hook in list(hooks):
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
