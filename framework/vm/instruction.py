"""Instruction: one kernel with its operands, the unit the vm issues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework.kernels.table import Kernel
from framework.vm import scope
from framework.vm.array import Array, Layout


class Instruction:
    """A kernel, its operands (outputs first) and its attributes, ready to run.

    An operand that the kernel documents as optional may be None; a scalar may stand in for a read array; a tuple
    of arrays is one operand of kernels that work on many arrays at once.
    """

    __slots__ = ("attributes", "kernel", "operands", "scope")

    def __init__(self, kernel: Kernel, operands: tuple, attributes: dict[str, Any]) -> None:
        self.kernel = kernel
        self.operands = operands
        self.attributes = attributes
        self.scope = scope.current

    @property
    def writes(self) -> list[Array]:
        """The arrays it writes."""
        return _arrays(self.operands[: self.kernel.outputs])

    @property
    def reads(self) -> list[Array]:
        """The arrays it reads; one that is written in place stands among the writes as well."""
        return _arrays(self.operands[self.kernel.outputs :])

    def run(self) -> None:
        """Calls the kernel."""
        self.kernel(*self.operands, **self.attributes)

    def __repr__(self) -> str:
        return self.words()()

    def words(self) -> Callable[[], str]:
        """What tells its kernel, its operands and where it was made, without holding the operands' memory."""
        name, operands, frame = self.kernel.__name__, _layouts(self.operands), self.scope

        def tell() -> str:
            where = scope.path(frame)
            return f"{name}({_words(operands)})" + (f" in {where}" if where else "")

        return tell


def _arrays(operands: tuple) -> list[Array]:
    found: list[Array] = []
    for operand in operands:
        if type(operand) is Array:
            found.append(operand)
        elif type(operand) is tuple:
            found += _arrays(operand)
    return found


def _layouts(operands: tuple) -> tuple:
    return tuple([a.layout if isinstance(a, Array) else _layouts(a) if isinstance(a, tuple) else a for a in operands])


def _words(operands: tuple) -> str:
    return ", ".join(
        f"{a.dtype.name}{list(a.shape)}"
        if isinstance(a, Layout)
        else f"({_words(a)})"
        if isinstance(a, tuple)
        else repr(a)
        for a in operands
    )
