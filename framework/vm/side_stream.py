"""A second compute stream, for what nothing else waits for soon, such as the gradients of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from framework.kernels.table import Kernel, Table
from framework.vm.instruction import Instruction
from framework.vm.machine import machine
from framework.vm.stream import Stream


class SideStream:
    """Issues kernels, each an attribute as in a runtime, to a stream beside the device's first.

    One instruction at a time is under way there: before the next one is issued, and at `join`, the first stream waits for
    it. Until then its operands are held, so that no more memory is kept than that of one instruction.
    """

    def __init__(self, table: Table, stream: Stream) -> None:
        self._stream = stream
        self._held: tuple = ()
        for name, kernel in table.kernels.items():
            setattr(self, name, self._issuing(kernel))

    def __getattr__(self, name: str) -> Any:
        # Only reached for what __init__ did not set.
        raise AttributeError(f"there is no kernel called {name!r}")

    def join(self) -> None:
        """Lets the first stream wait for what was issued here."""
        if self._held:
            held, self._held = self._held, ()
            machine.join(self._stream.mark())
            del held

    def _issuing(self, kernel: Kernel) -> Callable[..., None]:
        def issue_kernel(*operands: Any, **attributes: Any) -> None:
            self.join()
            self._held = operands
            machine.issue(Instruction(kernel, operands, attributes), self._stream)

        return issue_kernel
