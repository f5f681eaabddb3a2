"""Containers: modules that hold others by their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

from framework.nn.module import Module
from framework.words import kind_of


class _Container(Module):
    """What containers have in common: modules that are reached by their places, from 0 on."""

    def __getitem__(self, index: int) -> Module:
        return list(self._modules.values())[index]

    def __setitem__(self, index: int, module: Module) -> None:
        self._put(list(self._modules)[index], module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def _put(self, name: str, module: Module) -> None:
        # Anything else would be left out without a word.
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} takes modules; got {kind_of(module)} as {name}")
        setattr(self, name, module)


class Sequential(_Container):
    """Modules one after the other, named by their place from 0 on, or by the names in one dictionary."""

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        super().__init__()
        only = modules[0] if len(modules) == 1 else None
        named = only.items() if isinstance(only, Mapping) else ((str(place), m) for place, m in enumerate(modules))
        for name, module in named:
            self._put(name, module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)
        return x

    _own_forward = forward

    def __getitem__(self, index: int | slice) -> Module:
        """A module by its place, or a Sequential of several with their names."""
        if isinstance(index, slice):
            return Sequential(dict(list(self._modules.items())[index]))
        return super().__getitem__(index)


class ModuleList(_Container):
    """Modules in a list, named by their place from 0 on; whoever has it goes through them in a `forward` of its own."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def __getitem__(self, index: int | slice) -> Module:
        """A module by its place, or a ModuleList of several, which are named anew."""
        if isinstance(index, slice):
            part = ModuleList(list(self)[index])
            self._name_modules()
            return part
        return super().__getitem__(index)

    def append(self, module: Module) -> Self:
        """Puts one more module behind the others."""
        self._put(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> Self:
        """Puts more modules behind the others."""
        for module in modules:
            self.append(module)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._name_modules()

    # A list is not called itself: what its modules are called by, such as in a summary of memory, begins with its own name.
    @property
    def _name(self) -> str:
        return self._own_name

    @_name.setter
    def _name(self, name: str) -> None:
        object.__setattr__(self, "_own_name", name)
        self._name_modules()

    def _name_modules(self) -> None:
        for place, module in self._modules.items():
            object.__setattr__(module, "_name", f"{self._own_name}.{place}" if self._own_name else place)
