"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from framework.creation import zeros_like
from framework.tensor import Tensor
from framework.vm import scope
from framework.vm.runtime import runtime


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
        self.params = [params] if isinstance(params, Tensor) else list(params)
        if isinstance(params, Tensor) or not all(isinstance(p, Tensor) for p in self.params):
            kinds = ", ".join(sorted({type(p).__name__ for p in self.params}))
            raise TypeError(f"SGD takes an iterable of tensors, such as model.parameters(); got {kinds}")
        if not self.params:
            raise ValueError("SGD got no parameters")
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"{name} must not be negative; got {value}")
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError("nesterov needs a momentum and no dampening")
        self.lr = lr
        self.momentum = momentum
        self.dampening = dampening
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self._buffers: dict[int, Tensor] = {}

    def step(self) -> None:
        """Moves every parameter that has a gradient."""
        outer = scope.current
        scope.current = (outer, "SGD.step")
        try:
            for index, parameter in enumerate(self.params):
                if parameter.grad is not None:
                    self._update(index, parameter, parameter.grad)
        finally:
            scope.current = outer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, or fills them with 0 in place."""
        for parameter in self.params:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                runtime(parameter.device).fill(parameter.grad.array, value=0)

    def state_dict(self) -> dict[str, Any]:
        """The momentum buffers by the parameter's place, and the settings."""
        return {
            "buffers": {index: buffer.clone() for index, buffer in self._buffers.items()},
            "settings": {name: getattr(self, name) for name in _SETTINGS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` gave. Raises ValueError where a buffer does not fit its parameter."""
        for index, buffer in state["buffers"].items():
            if index >= len(self.params) or buffer.shape != self.params[index].shape:
                raise ValueError(f"the momentum buffer of parameter {index} does not fit this optimizer's parameters")
        for name in _SETTINGS:
            setattr(self, name, state["settings"][name])
        self._buffers = {index: buffer.clone() for index, buffer in state["buffers"].items()}

    def _update(self, index: int, parameter: Tensor, gradient: Tensor) -> None:
        first = self.momentum != 0 and index not in self._buffers
        if first:
            self._buffers[index] = zeros_like(parameter)
        buffer = self._buffers.get(index) if self.momentum else None
        runtime(parameter.device).sgd_step(
            parameter.array,
            None if buffer is None else buffer.array,
            gradient.array,
            lr=self.lr,
            momentum=self.momentum,
            dampening=self.dampening,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            first=first,
        )


_SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
