"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

from framework.device import Device
from framework.dtype import DType
from framework.tensor import Tensor
from framework.vm import Array, scope
from framework.vm.array import Layout, dense_stride_like, side_by_side
from framework.vm.runtime import runtime
from framework.vm.scope import here
from framework.words import kind_of


class SGD:
    """Stochastic gradient descent with momentum, weight decay and Nesterov's variant, as PyTorch defines them.

    Parameters without a gradient are left as they are.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        # A tensor is iterable too: over its rows, which are no parameters.
        are_several = isinstance(params, Iterable) and not isinstance(params, Tensor)
        self.params = list(params) if are_several else [params]
        if not are_several or not all(isinstance(p, Tensor) for p in self.params):
            kinds = ", ".join(sorted({kind_of(p) for p in self.params}))
            groups = ". An SGD has one group of parameters: make one for each" if "dict" in kinds else ""
            raise TypeError(f"SGD takes an iterable of tensors, such as model.parameters(); got {kinds}{groups}")
        if not self.params:
            raise ValueError("SGD got no parameters")
        places: dict[int, int] = {}
        for index, parameter in enumerate(self.params):
            first = places.setdefault(id(parameter), index)
            if first != index:
                raise ValueError(
                    f"SGD got a duplicate parameter: number {index} is number {first} again; give each once"
                )
        made = next((index for index, parameter in enumerate(self.params) if not parameter.is_leaf), None)
        if made is not None:
            raise ValueError(
                f"SGD moves leaves, and parameter {made} is the result of {self.params[made].node!r}: give what it was made of"
            )
        _check_settings(lr, momentum, dampening, weight_decay, nesterov)
        self.lr = lr
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self._buffers: dict[int, Tensor] = {}
        # The last step, where it moved all parameters at once.
        self._last: _Last | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        # A schedule's mistake is told where it is made, not by a kernel.
        if name in _NUMBERS:
            _check_number(name, value)
        object.__setattr__(self, name, value)

    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        outer = here.frame
        scope.current = (outer, "SGD.step")
        try:
            if not self._repeat():
                for (device, first), moved in self._groups().items():
                    self._update(device, first, moved)
        finally:
            scope.current = outer

    def _repeat(self) -> bool:
        """The step where all lies as it did in the last one, so that what was looked at then need not be again."""
        last = self._last
        if last is None or last.has_momentum != bool(self.momentum):
            return False
        try:
            grads = [parameter.grad.array for parameter in self.params]  # type: ignore[union-attr]
        except AttributeError:  # one has none
            return False
        parameters = [parameter.array for parameter in self.params]
        if (
            [array.layout for array in parameters] != last.layouts
            or [array.layout for array in grads] != last.grad_layouts
            or {array.storage.device for array in (*parameters, *grads)} != {last.device}
        ):
            return False
        self._move(last.device, range(len(parameters)), tuple(parameters), tuple(grads), first=False)
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or fills them with 0 in place."""
        for parameter in self.params:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                runtime(parameter.device).fill(parameter.grad.array, value=0)

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"SGD({len(self.params)} parameters, {settings})"

    def state_dict(self) -> dict[str, Any]:
        """The momentum buffers by the parameter's place, and the settings."""
        return {
            "buffers": {index: buffer.clone() for index, buffer in self._buffers.items()},
            "settings": {name: getattr(self, name) for name in _SETTINGS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave.

        Raises, before anything is taken over, TypeError for what is no such state, and ValueError where a buffer does not fit
        its parameter or a setting is none that SGD takes.
        """
        if not isinstance(state, dict) or not state.keys() >= {"buffers", "settings"}:
            given = (
                f"a dict of {', '.join(map(str, state)) or 'nothing'}" if isinstance(state, dict) else kind_of(state)
            )
            raise TypeError(f"SGD takes what its own state_dict() gave, a dict of buffers, settings; got {given}")
        for index, buffer in state["buffers"].items():
            if index not in range(len(self.params)) or buffer.shape != self.params[index].shape:
                raise ValueError(f"the momentum buffer of parameter {index} does not fit this optimizer's parameters")
        missing = [name for name in _SETTINGS if name not in state["settings"]]
        if missing:
            raise ValueError(f"the settings of this state lack {', '.join(missing)}")
        settings = {name: state["settings"][name] for name in _SETTINGS}
        _check_settings(**settings)
        for name, value in settings.items():
            setattr(self, name, value)
        self._last = None
        self._buffers = {
            index: buffer.to(self.params[index].device).to(self.params[index].dtype).clone()
            for index, buffer in state["buffers"].items()
        }

    def _groups(self) -> dict[tuple[Device, bool], list[int]]:
        """The parameters to move, by device and by whether it is their first time: each group is one instruction."""
        groups: dict[tuple[Device, bool], list[int]] = {}
        for index, parameter in enumerate(self.params):
            if parameter.grad is not None:
                own, grad, buffer = parameter.array, parameter.grad.array, self._buffers.get(index)
                device = own.storage.device
                if grad.shape != own.shape or grad.dtype is not own.dtype or grad.storage.device is not device:
                    raise _misfit(index, "a grad", own, grad)
                if buffer is not None and (
                    buffer.array.dtype is not own.dtype or buffer.array.storage.device is not device
                ):
                    raise _misfit(index, "a momentum buffer", own, buffer.array)
                first = self.momentum != 0 and buffer is None
                groups.setdefault((device, first), []).append(index)
        return groups

    def _update(self, device: Device, first: bool, moved: list[int]) -> None:
        if first:
            self._start_momentum(device, moved)
        parameters = tuple([self.params[index].array for index in moved])
        grads = tuple([self.params[index].grad.array for index in moved])  # type: ignore[union-attr] # _groups() has looked
        self._last = None
        if len(moved) == len(self.params):
            self._last = _Last(
                device, bool(self.momentum), [array.layout for array in parameters], [array.layout for array in grads]
            )
        self._move(device, moved, parameters, grads, first=first)

    def _start_momentum(self, device: Device, moved: list[int]) -> None:
        """Zeros for these parameters, side by side: one by one they would lie wherever a step had just let go of memory."""
        kernels = runtime(device)
        by_type: dict[DType, list[int]] = {}
        for index in moved:
            by_type.setdefault(self.params[index].dtype, []).append(index)
        for dtype, alike in by_type.items():
            arrays = [self.params[index].array for index in alike]
            places, size = side_by_side(arrays)
            flat = kernels.full((size,), 0.0, dtype)
            for index, array, place in zip(alike, arrays, places, strict=True):
                stride = dense_stride_like(array.shape, array.stride)
                self._buffers[index] = Tensor(flat.view(array.shape, stride, place))

    def _move(self, device: Device, moved: Sequence[int], parameters: Arrays, grads: Arrays, *, first: bool) -> None:
        runtime(device).sgd_step(
            parameters,
            tuple([self._buffers[index].array for index in moved]) if self.momentum else None,
            grads,
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            first=first,
        )


Arrays = tuple[Array, ...]


class _Last(NamedTuple):
    """A step that moved all parameters: how they and their gradients lay."""

    device: Device
    has_momentum: bool
    layouts: list[Layout]
    grad_layouts: list[Layout]


def _misfit(index: int, what: str, own: Array, held: Array) -> ValueError:
    """What to raise for a gradient or a buffer that is not of its parameter's kind: a kernel would take it for one."""
    if own.shape != held.shape:
        return ValueError(
            f"parameter {index} of shape {list(own.shape)} has {what} of shape {list(held.shape)}; they must be the same"
        )
    return ValueError(
        f"parameter {index} of {own.dtype} on {own.storage.device} has {what} of {held.dtype} on {held.storage.device};"
        " convert it with .to(), or make the optimizer after the model is where it trains"
    )


_NUMBERS = ("lr", "momentum", "weight_decay", "dampening")
_SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")


def _check_settings(lr: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool) -> None:
    for name, value in zip(_NUMBERS, (lr, momentum, weight_decay, dampening), strict=True):
        _check_number(name, value)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError("nesterov needs a momentum and no dampening")


def _check_number(name: str, value: Any) -> None:
    may_be_negative = name == "dampening"
    if not isinstance(value, Real) or not (may_be_negative or float(value) >= 0):
        kind = "number" if may_be_negative else "number that is not negative"
        raise ValueError(f"{name} must be a {kind}; got {value!r}")
