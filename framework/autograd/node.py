"""Node: one recorded operation, with just what its backward needs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from framework.vm import scope
from framework.vm.array import Array, Layout

if TYPE_CHECKING:
    from framework.autograd.function import Operation
    from framework.tensor import Tensor
    from framework.vm.runtime import Runtime

_numbers = count()

Hook = Callable[["Tensor"], "Tensor | None"]


# A node and which of its outputs, or a leaf tensor and 0.
Edge = tuple[Any, int]


class Node:
    """An operation that was run, and where the gradients of its inputs go.

    `edges` has, for each input, (node, which of its outputs), or (leaf tensor, 0), or None where no gradient is
    wanted. `needs` is the same list, for those who only ask of an input whether its gradient is wanted. Forward keeps
    arrays with `save`, and whatever else backward needs as `note`. `is_retained` says in a backward that there may be another.
    """

    __slots__ = (
        "_keeps",
        "_remade",
        "_remade_version",
        "_saved",
        "_versions",
        "edges",
        "freed",
        "hooks",
        "is_retained",
        "needs",
        "note",
        "number",
        "operation",
        "recording",
        "runtime",
        "scope",
    )

    # A leaf may have one.
    home: Any = None

    def __init__(
        self,
        operation: type[Operation],
        runtime: Runtime,
        edges: list[Edge | None],
        recording: bool,
    ) -> None:
        self.operation = operation
        self.runtime = runtime
        self.edges = self.needs = edges
        self.recording = recording
        self.hooks: dict[int, list[Hook]] | None = None
        self.note: Any = None
        self.freed = self.is_retained = False
        self.scope = scope.current
        self.number = next(_numbers)
        self._keeps = self._remade = False
        self._remade_version: int | None = None
        self._saved: tuple[Any, ...] = ()
        self._versions: list[int] = []

    def save(self, *arrays: Array | Node | None) -> None:
        """Keeps arrays for backward, or what `input` gave for them; nothing is kept where nothing is recorded."""
        if not self.recording:
            return
        self._saved = arrays
        self._versions = versions = []
        for array in arrays:
            if array is None:
                versions.append(-1)
                continue
            self._keeps = True
            if type(array) is Array:
                versions.append(array.storage.version)
            else:
                versions.append(-1)
                self._remade = True

    def room(self, position: int, layout: Layout) -> Array:
        """A new array for the gradient of an input: where the leaf wants it to lie, if it says so."""
        edge = self.edges[position]
        if edge is not None and edge[0].home is not None:
            home: Array | None = edge[0].room(layout)
            if home is not None:
                return home
        return self.runtime.new(layout)

    def remakes(self, output: Array) -> None:
        """Lets those who need the output for backward have it made again by the operation, rather than keep it."""
        self._remade_version = output.storage.version

    def input(self, position: int, array: Array) -> Array | Node:
        """What to save of an input that lies in `array`: the node that can make it again, if there is one, or itself."""
        edge = self.edges[position]
        if edge is not None and type(edge[0]) is Node and edge[0]._remade_version == array.storage.version:
            return edge[0]
        return array

    def leads_to_leaf(self, position: int) -> bool:
        """Whether the gradient of an input is wanted by a leaf, rather than for the walk to go on."""
        edge = self.edges[position]
        return edge is not None and type(edge[0]) is not Node

    @property
    def saved(self) -> tuple[Array | None, ...]:
        """The saved arrays. Raises RuntimeError if one was written to since."""
        kept = self.kept
        return tuple([a.remake() if type(a) is Node else a for a in kept]) if self._remade else kept

    @property
    def kept(self) -> tuple[Any, ...]:
        """As `saved`, but those that are to be made again are left to the caller: as nodes, which `remake`."""
        for array, version in zip(self._saved, self._versions):  # noqa: B905 - made together, and often walked
            if version >= 0 and array.storage.version != version:
                raise RuntimeError(
                    f"a tensor of shape {list(array.shape)} that {self!r} saved for backward was written in place "
                    f"since (it is at version {array.storage.version}, saved at {version}); write to a clone()"
                )
        return self._saved

    def remake(self) -> Array:
        """The output of the operation once more. Raises RuntimeError if what it was made from was freed."""
        self.check_not_freed()
        return self.operation.remake(self, self.runtime)

    def check_not_freed(self) -> None:
        """Raises RuntimeError if a backward has freed what was saved."""
        if self.freed:
            raise RuntimeError(
                f"backward through {self!r} a second time: what it saved was freed by the first; "
                "pass retain_graph=True to the first backward()"
            )

    def release(self, *places: int) -> None:
        """Lets go of some of the saved arrays in the middle of a backward, unless another may follow."""
        if not self.is_retained:
            self.freed = True
            self._saved = tuple([None if place in places else array for place, array in enumerate(self._saved)])

    def free(self) -> None:
        """Drops what was saved. A node that saved nothing has nothing to miss: it may be walked again."""
        if self._keeps:
            self.freed = True
            self._saved, self._versions, self.note = (), [], None

    def __repr__(self) -> str:
        return scope.path(self.scope) or self.operation.name
