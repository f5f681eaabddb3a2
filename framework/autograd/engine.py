"""The backward walk: from a result to the leaves it came from, each node once, newest first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from framework.autograd.mode import no_grad
from framework.autograd.node import Hook, Node
from framework.vm import scope
from framework.vm.array import Array
from framework.vm.runtime import runtime
from framework.vm.storage import Storage

if TYPE_CHECKING:
    from framework.tensor import Tensor


class _Sum:
    """A gradient as it adds up. `owned` says that nobody else holds its memory, so that it may be added into."""

    __slots__ = ("array", "owned")

    def __init__(self, array: Array, owned: bool) -> None:
        self.array = array
        self.owned = owned

    def add(self, array: Array, owned: bool) -> None:
        kernels = runtime(array.storage.device)
        if not self.owned:
            if not owned:
                total = kernels.empty_like(self.array)
                kernels.add(total, self.array, array)
                self.array, self.owned = total, True
                return
            self.array, array, self.owned = array, self.array, True
        kernels.add(self.array, self.array, array)


def backward(root: Tensor, gradient: Array, *, retain_graph: bool = False) -> None:
    """Adds the gradient of `root`, weighted by `gradient`, to every leaf it was computed from.

    What nodes saved is freed as the walk passes them, unless `retain_graph` is set. Raises RuntimeError where it
    was freed before.
    """
    with no_grad():
        outer = scope.current
        try:
            _walk(root.edge(), gradient, retain_graph)
        finally:
            scope.current = outer


def _walk(start: tuple[Any, int], gradient: Array, retain_graph: bool) -> None:
    root, index = start
    missing = _count_uses(root)
    # By identity: a leaf is a tensor, and `==` between tensors compares their elements.
    sums: dict[int, dict[int, _Sum]] = {id(root): {index: _Sum(gradient, owned=False)}}
    ready: list[tuple[int, Node]] = []
    _release(root, sums, ready)
    while ready:
        node = heappop(ready)[1]
        made = Storage.next_serial()
        results = _run(node, sums.pop(id(node), {}), retain_graph)
        fresh = _fresh(results, made)
        for position, edge in enumerate(node.edges):
            if edge is None:
                continue
            target, index = edge
            result, results[position] = results[position], None
            if result is not None:
                gathered = sums.setdefault(id(target), {})
                if index in gathered:
                    gathered[index].add(result, fresh[position])
                else:
                    gathered[index] = _Sum(result, fresh[position])
            missing[id(target)] -= 1
            if missing[id(target)] == 0:
                _release(target, sums, ready)
        # Nothing here may keep a gradient alive while the next node runs.
        del results, result


def _release(target: Any, sums: dict[int, dict[int, _Sum]], ready: list[tuple[int, Node]]) -> None:
    """All gradients of `target` are in: a node may run, a leaf takes the sum."""
    if isinstance(target, Node):
        heappush(ready, (-target.number, target))
    elif id(target) in sums:
        total = sums.pop(id(target))[0]
        target.accumulate(total.array, owned=total.owned)


def _fresh(results: list[Array | None], made: int) -> list[bool]:
    """Which results were made by the backward just run, whole, and are handed out once: nobody else holds those."""
    storages = [None if result is None else result.storage for result in results]
    return [
        result is not None
        and result.storage.serial > made
        and result.storage.nbytes == result.nbytes
        and storages.count(result.storage) == 1
        for result in results
    ]


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


def _run(node: Node, sums: dict[int, _Sum], retain_graph: bool) -> list[Array | None]:
    """The gradients of the node's inputs, None for each where no gradient reached the node."""
    if not sums:
        return [None] * len(node.edges)
    node.check_not_freed()
    scope.current = (node.scope, "backward")
    for index, hooks in (node.hooks or {}).items():
        if index in sums:
            sums[index].array = run_hooks(hooks, sums[index].array)
    grads = [sums[i].array if i in sums else None for i in range(max(sums) + 1)]
    sums.clear()
    result = node.operation.backward(node, node.runtime, *grads)
    if not retain_graph:
        node.free()
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) != len(node.edges):
        raise RuntimeError(
            f"backward of {node.operation.name} gave {len(results)} gradients for {len(node.edges)} inputs"
        )
    return results


def run_hooks(hooks: list[Hook], array: Array) -> Array:
    """Passes a gradient through hooks, each of which may replace it."""
    from framework.tensor import Tensor

    for hook in list(hooks):
        replaced = hook(Tensor(array))
        if replaced is not None:
            if replaced.shape != array.shape:
                raise RuntimeError(
                    f"a tensor hook returned shape {list(replaced.shape)} for a gradient of {list(array.shape)}"
                )
            array = replaced.array
    return array
