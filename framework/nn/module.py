"""Module: parameters, buffers and other modules under names, and a forward function over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np

from framework.autograd import no_grad
from framework.creation import tensor
from framework.destination import destination
from framework.device import Device, DeviceLike, cuda_device
from framework.dtype import DType, float32, float64
from framework.nn.parameter import Parameter
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.scope import here
from framework.words import kind_of


class _Parts:
    """Stands in a class for what `Module.__init__` gives each module: to find it means that it was not called."""

    def __get__(self, module: Module | None, kind: type) -> Any:
        raise _forgotten(kind)


def _forgotten(kind: type) -> AttributeError:
    return AttributeError(f"{kind.__name__}.__init__() has to call super().__init__() before anything else")


class _Missing:
    """A base that classes with a `__getattr__` of their own get, so that it may end in `super().__getattr__(name)`.

    In `Module` itself a `__getattr__` would make every attribute of every module slow to read.
    """

    def __getattr__(self, name: str) -> Any:
        # Fails once more, with the words for it.
        return object.__getattribute__(self, name)


class Module:
    """The base of layers and models. A subclass sets its parts in `__init__` and defines `forward`."""

    _parameters: dict[str, Parameter | None] = _Parts()  # type: ignore[assignment]
    _buffers: dict[str, Tensor | None] = _Parts()  # type: ignore[assignment]
    _modules: dict[str, Module] = _Parts()  # type: ignore[assignment]
    # Read in every call, and so not as the parts are: what stands in for them makes them slower to read.
    _name: str
    # How often any module was given a part or lost one: who remembers parts need not walk through all modules to see changes.
    changes = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if hasattr(cls, "__getattr__") and not issubclass(cls, _Missing):
            cls.__bases__ = (*cls.__bases__, _Missing)

    def __init__(self, *settings: Any, **named: Any) -> None:
        if settings or named:
            given = ", ".join([*(repr(setting)[:60] for setting in settings), *named])
            raise TypeError(f"{type(self).__name__} takes no settings here; got {given}")
        # Past __setattr__, which files what it is given in these.
        object.__setattr__(self, "_parameters", {})
        object.__setattr__(self, "_buffers", {})
        object.__setattr__(self, "_modules", {})
        object.__setattr__(self, "_name", "")
        self.training = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        raise TypeError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            name = self._name
        except AttributeError:
            raise _forgotten(type(self)) from None
        outer = here.frame
        here.frame = scope.current = (outer, name)
        try:
            return self.forward(*args, **kwargs)
        finally:
            here.frame = scope.current = outer

    def after(
        self,
        convolution: Module,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        shortcut: Module | None = None,
        relu: bool = False,
    ) -> Tensor:
        """self(convolution(x)), to which a residual is added, past its shortcut, and a ReLU applied, one after the other.

        By this a block runs whatever stands in the place of its normalisation; that of `BatchNorm2d` does all at once.
        """
        if shortcut is not None:
            residual = shortcut(residual)
        y = self(convolution(x))
        y = y if residual is None else y + residual
        return y.relu() if relu else y

    # ---- its parts

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter):
            self._file(self._parameters, name, value)
        elif isinstance(value, Module):
            self._file(self._modules, name, value)
            object.__setattr__(value, "_name", name)
        elif name in self._buffers and (value is None or isinstance(value, Tensor)):
            self._file(self._buffers, name, value)
        elif name in self._parameters:
            if value is not None:
                raise TypeError(f"{name} is a parameter; it takes a Parameter or None, not {kind_of(value)}")
            self._file(self._parameters, name, None)
        elif name in self._modules:
            del self._modules[name]
            Module.changes += 1
        object.__setattr__(self, name, value)

    def _file(self, parts: dict[str, Any], name: str, value: Any) -> None:
        """Puts a part under its kind, and under no other that had it before."""
        for other in (self._parameters, self._buffers, self._modules):
            if other is not parts:
                other.pop(name, None)
        parts[name] = value
        Module.changes += 1

    def __delattr__(self, name: str) -> None:
        for parts in (self._parameters, self._buffers, self._modules):
            parts.pop(name, None)
        Module.changes += 1
        object.__delattr__(self, name)

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Adds a parameter; None keeps the name for a part that is left out, such as a bias. Raises as `add_module` does."""
        self._check_part("register_parameter", name, parameter, Parameter, self._parameters)
        self._file(self._parameters, name, parameter)
        object.__setattr__(self, name, parameter)

    def register_buffer(self, name: str, buffer: Tensor | None) -> None:
        """Adds a tensor that is saved with the module and moves with it, but is not learned; None keeps its name.

        Raises as `add_module` does.
        """
        self._check_part("register_buffer", name, buffer, Tensor, self._buffers)
        self._file(self._buffers, name, buffer)
        object.__setattr__(self, name, buffer)

    def add_module(self, name: str, module: Module) -> None:
        """Adds a module, as setting the attribute of that name does.

        Raises TypeError for what is no module, and ValueError for a name that the module has otherwise, or with a dot.
        """
        self._check_part("add_module", name, module, Module, self._modules)
        setattr(self, name, module)

    def _check_part(self, method: str, name: str, part: Any, kind: type, own: Mapping[str, Any]) -> None:
        """Raises where a part is not of its kind, or its name would hide something or be no name."""
        if not isinstance(part, kind) and not (part is None and own is not self._modules):
            raise TypeError(f"{method}() takes a {kind.__name__} as {name}; got {kind_of(part)}")
        if not name or "." in name or (hasattr(self, name) and name not in own):
            raise ValueError(
                f"{type(self).__name__} cannot have a {kind.__name__.lower()} called {name!r}:"
                " give a name that is free, without a dot"
            )

    def named_modules(self, prefix: str = "", *, remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """This module and all inside it, with dotted names; one that is there twice comes once, by its first name."""
        seen: set[int] = set()
        for name, module in self._places(prefix):
            if not remove_duplicate or id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def _places(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all inside it by every name they have."""
        yield prefix, self
        for name, module in self._modules.items():
            yield from module._places(f"{prefix}.{name}" if prefix else name)

    def modules(self) -> Iterator[Module]:
        """This module and all inside it."""
        for _, module in self.named_modules():
            yield module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules directly inside, with their names; one that is there twice comes once."""
        seen: set[int] = set()
        for name, module in self._modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module

    def children(self) -> Iterator[Module]:
        """The modules directly inside; one that is there twice comes once."""
        for _, module in self.named_children():
            yield module

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """All parameters with dotted names; one that is shared comes once."""
        yield from self._named("_parameters")

    def parameters(self) -> Iterator[Parameter]:
        """All parameters; one that is shared comes once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """All buffers with dotted names."""
        yield from self._named("_buffers")

    def buffers(self) -> Iterator[Tensor]:
        """All buffers."""
        for _, buffer in self.named_buffers():
            yield buffer

    def _named(self, kind: str) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for name, part in getattr(module, kind).items():
                if part is not None and id(part) not in seen:
                    seen.add(id(part))
                    yield f"{prefix}.{name}" if prefix else name, part

    # ---- what one does with all of it

    def apply(self, function: Callable[[Module], None]) -> Self:
        """Calls `function` on each module inside, then on this one."""
        for module in self.children():
            module.apply(function)
        function(self)
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets training mode here and inside; `eval()` is its opposite."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Sets inference mode here and inside."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops every parameter's gradient, or fills it with 0 in place."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def float(self) -> Self:
        """Converts floating-point parameters and buffers to float32."""
        return self.to(float32)

    def double(self) -> Self:
        """Converts floating-point parameters and buffers to float64."""
        return self.to(float64)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether the parameters want gradients."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def to(
        self,
        target: DType | Device | str | Tensor | None = None,
        dtype: DType | None = None,
        *,
        device: Device | str | None = None,
        non_blocking: bool = False,
    ) -> Self:
        """Moves parameters and buffers to a device, converts those of floats to an element type, or both, in place.

        What changes loses its gradient; what is so already keeps it. `non_blocking` and a tensor as target are as in
        `Tensor.to`. Raises TypeError for a type that is not of floats.
        """
        where, kind = destination(target, dtype, device)
        if kind is not None and not kind.is_floating:
            raise TypeError(f"a module's floating-point parts become those of another floating-point type, not {kind}")
        for _, held in (*self.named_parameters(), *self.named_buffers()):
            wanted = kind if held.dtype.is_floating else None
            if where is None and wanted is None:
                continue
            with no_grad():
                converted = held.detach().to(where, wanted, non_blocking=non_blocking).array
            if converted is held.array:
                continue
            if isinstance(held, Parameter):
                # Its gradients do not fit there any more.
                held.home = None
            held.array = converted
            held.grad = None
        return self

    def cuda(self, device: DeviceLike = None) -> Self:
        """Moves parameters and buffers to a CUDA device: the current one, or that of a name or number."""
        return self.to(cuda_device(device))

    def cpu(self) -> Self:
        """Moves parameters and buffers to the CPU."""
        return self.to("cpu")

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers by dotted name, sharing memory with the module."""
        state: dict[str, Tensor] = {}
        # What is shared has an entry for each of its names.
        for prefix, module in self._places():
            for name, held in (*module._parameters.items(), *module._buffers.items()):
                if held is not None:
                    state[f"{prefix}.{name}" if prefix else name] = held.detach()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor | np.ndarray], *, strict: bool = True) -> None:
        """Copies values by name, from tensors or NumPy arrays, into parameters and buffers.

        The state of a module fits a `DistributedDataParallel` that holds it, whose names begin with `module.`, and the other
        way round.

        Raises, before anything is copied, TypeError for what has no names, and ValueError for a shape that differs and, if
        `strict`, for names that are missing or unknown.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                "load_state_dict() takes tensors or arrays by their names, as state_dict() gives them;"
                f" got {kind_of(state)}"
            )
        own = self.state_dict()
        state = _with_names_of(own, state)
        faults = [
            f"{name} has shape {list(np.shape(state[name]))}, expected {list(held.shape)}"
            for name, held in own.items()
            if name in state and tuple(np.shape(state[name])) != held.shape
        ]
        if strict:
            # A counter that only newer files have is no loss.
            missing = [n for n in own if n not in state and not n.endswith("num_batches_tracked")]
            unknown = [n for n in state if n not in own]
            faults += [f"missing {_some(missing)}"] * bool(missing) + [f"unknown {_some(unknown)}"] * bool(unknown)
        if faults:
            raise ValueError(f"the state does not fit {type(self).__name__}: " + "; ".join(faults[:5]))
        for name, held in own.items():
            if name in state:
                value = state[name]
                given = value.detach() if isinstance(value, Tensor) else tensor(np.asarray(value))
                held.copy_(given.to(held.device))

    def __repr__(self) -> str:
        inside = "".join(f"\n  {name}: " + repr(m).replace("\n", "\n  ") for name, m in self._modules.items())
        return f"{type(self).__name__}({self.describe()}{inside}{chr(10) if inside else ''})"

    def describe(self) -> str:
        """The module's settings in words, for its repr."""
        return ""


_WRAPPED = "module."


def _with_names_of(own: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state, with `module.` before its names or without it, as the own names are."""
    if state and own and not any(name in own for name in state):
        if all(name.startswith(_WRAPPED) for name in state):
            return {name.removeprefix(_WRAPPED): value for name, value in state.items()}
        if all(name.startswith(_WRAPPED) for name in own):
            return {_WRAPPED + name: value for name, value in state.items()}
    return state


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
