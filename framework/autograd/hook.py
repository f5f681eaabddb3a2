"""What registering a hook gives back."""

from __future__ import annotations

from typing import Any


class HookHandle:
    """A hook's place among those of a tensor: `remove()`, or calling it, takes the hook out; once more does nothing."""

    __slots__ = ("_hook", "_hooks")

    def __init__(self, hooks: list[Any], hook: Any) -> None:
        if not callable(hook):
            raise TypeError(f"a hook is a function; got {hook!r}")
        hooks.append(hook)
        self._hooks: list[Any] | None = hooks
        self._hook = hook

    def remove(self) -> None:
        """Takes the hook out."""
        if self._hooks is not None:
            self._hooks.remove(self._hook)
            self._hooks = self._hook = None

    __call__ = remove
