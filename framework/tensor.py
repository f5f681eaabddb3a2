"""Tensor: an array with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload
from weakref import WeakValueDictionary, ref

import numpy as np

from framework.autograd.engine import backward, run_hooks
from framework.autograd.gradient import Home
from framework.autograd.hook import HookHandle
from framework.autograd.node import Hook, Node
from framework.device import Device
from framework.dtype import DType
from framework.vm.array import Array, Layout
from framework.vm.machine import machine
from framework.vm.runtime import runtime

PostHook = Callable[["Tensor"], None]


class Tensor:
    """A multi-dimensional array that can require a gradient.

    `grad` holds the gradient that `backward()` added up, for leaves that require one. The operators and methods
    that compute (`+`, `sum`, `reshape`, …) are installed from `framework.ops.methods`.
    """

    __slots__ = (
        "__weakref__",
        "_hooks",
        "_output",
        "_post_hooks",
        "array",
        "base",
        "grad",
        "node",
        "requires_grad",
        "views",
    )

    # Where the gradient is to lie: a parameter may have such a place.
    home: Home | None = None

    # NumPy's arrays and numbers leave operators with a tensor to the tensor, which keeps the gradient.
    __array_ufunc__ = None

    def __init__(self, array: Array, requires_grad: bool = False, node: Node | None = None, output: int = 0) -> None:
        self.array = array
        self.requires_grad = requires_grad
        self.node = node
        self._output = output
        self.grad: Tensor | None = None
        # The tensor whose memory this one was made to show, and the living ones that show this one's.
        self.base: Tensor | None = None
        self.views: WeakValueDictionary[int, Tensor] | None = None
        self._hooks: list[Hook] | None = None
        self._post_hooks: list[PostHook] | None = None

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def device(self) -> Device:
        return self.array.storage.device

    @property
    def ndim(self) -> int:
        return len(self.array.shape)

    @property
    def is_leaf(self) -> bool:
        """Whether it was made by no recorded operation, so that backward() ends here."""
        return self.node is None

    def stride(self) -> tuple[int, ...]:
        """Steps in memory between neighbours, in elements, one for each dimension."""
        return self.array.stride

    @overload
    def size(self) -> tuple[int, ...]: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> int | tuple[int, ...]:
        """Its shape, or the extent of one dimension. Raises IndexError where there is no such dimension."""
        if dim is None:
            return self.shape
        if not -self.ndim <= dim < self.ndim:
            raise IndexError(f"size({dim}) of a tensor of shape {list(self.shape)}: it has {self.ndim} dimensions")
        return self.shape[dim]

    def numel(self) -> int:
        """The number of elements."""
        return self.array.size

    def is_contiguous(self) -> bool:
        """Whether its elements lie densely in row-major order."""
        return self.array.is_contiguous

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        values = np.array2string(self._host(), separator=", ", prefix="tensor(", threshold=100)
        kind = "" if self.dtype.name == "float32" else f", dtype={self.dtype}"
        tail = f", grad of {self.node!r}" if self.node is not None else ""
        return f"tensor({values}{kind}{tail or (', requires_grad=True' if self.requires_grad else '')})"

    def __format__(self, spec: str) -> str:
        """As a number's, for one element: `f"{loss:.3f}"`. Without a format, one of more dimensions reads as its repr."""
        if self.shape and not spec:
            return str(self)
        return format(self.item(), spec)

    __hash__ = object.__hash__

    # ---- its values on the host

    def numpy(self) -> np.ndarray:
        """A NumPy array that shares this tensor's memory, on the CPU.

        Raises RuntimeError for a tensor that requires a gradient (`detach()` it first).
        """
        if self.requires_grad:
            raise RuntimeError("numpy() of a tensor that requires a gradient; call detach() first")
        machine.settle(self.array)
        return np.asarray(_KeepAlive(self.array))

    def item(self) -> Any:
        """The value of a tensor with one element, as a Python number."""
        if self.numel() != 1:
            raise ValueError(f"item() needs a tensor of one element; this one has shape {list(self.shape)}")
        return self._host().item()

    def tolist(self) -> Any:
        """The values as nested Python lists."""
        return self._host().tolist()

    def __bool__(self) -> bool:
        return bool(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.detach().numpy()
        if copy is False:
            if dtype is not None and values.dtype != dtype:
                raise ValueError(f"a tensor of {self.dtype} becomes an array of {np.dtype(dtype)} only by a copy")
            return values
        return np.array(values, dtype=dtype)

    def _host(self) -> np.ndarray:
        return runtime(self.device).to_host(self.array)

    # ---- its copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An independent leaf of the same class with the same values and gradient, but without hooks.

        Raises RuntimeError for a tensor with a history.
        """
        make, parts, attributes = self.__reduce_ex__(4)
        copied: Tensor = make(*parts)
        memo[id(self)] = copied
        copied.grad = deepcopy(self.grad, memo)
        if attributes:
            copied.__dict__.update(deepcopy(attributes, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles a leaf by its values; its gradient and hooks are left out, as in PyTorch."""
        if not self.is_leaf:
            raise RuntimeError(
                f"only a leaf can be deep-copied or pickled; this tensor is the result of {self.node!r}: detach() first"
            )
        # A copy, since whoever asked may keep it longer than this tensor's memory lives.
        values = np.array(self._host())
        parts = (type(self), values, self.dtype, self.device, self.requires_grad)
        # What a subclass without slots was given.
        return _from_values, parts, getattr(self, "__dict__", None)

    # ---- gradients

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Sets whether a leaf wants a gradient. Raises TypeError for types without one, such as integers."""
        if requires_grad and not self.dtype.is_floating:
            raise TypeError(f"only floating-point tensors can require a gradient, not {self.dtype}")
        if not self.is_leaf:
            raise RuntimeError("only a leaf's requires_grad can be set; detach() makes one")
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """The same memory without history: it requires no gradient."""
        return Tensor(self.array)

    def backward(self, gradient: Tensor | None = None, *, retain_graph: bool = False) -> None:
        """Adds to `grad` of every leaf it depends on. `gradient` weighs the elements; 1 for a single one.

        Raises RuntimeError where nothing requires a gradient, or where a graph is walked a second time without
        `retain_graph`.
        """
        if not self.requires_grad:
            raise RuntimeError("backward() of a tensor that depends on nothing that requires a gradient")
        if gradient is None:
            if self.numel() != 1:
                raise RuntimeError(
                    f"backward() of a tensor of shape {list(self.shape)} needs a gradient of that shape; "
                    "for one element it is 1"
                )
            start = runtime(self.device).full(self.shape, 1, self.dtype)
        elif not isinstance(gradient, Tensor) or gradient.dtype is not self.dtype:
            given = f"one of {gradient.dtype}" if isinstance(gradient, Tensor) else repr(gradient)
            raise TypeError(f"backward() takes a tensor of {self.dtype}; got {given}")
        elif gradient.shape != self.shape:
            raise ValueError(f"backward() of shape {list(self.shape)} got a gradient of {list(gradient.shape)}")
        elif gradient.device is not self.device:
            raise ValueError(f"backward() on {self.device} got a gradient on {gradient.device}; move it with .to()")
        else:
            start = gradient.array
        backward(self, start, retain_graph=retain_graph)

    def register_hook(self, hook: Hook) -> HookHandle:
        """Calls `hook(grad)` when this tensor's gradient is known; it may return another in its place.

        What it returns has `remove()`.
        """
        if not self.requires_grad:
            raise RuntimeError("register_hook() on a tensor that requires no gradient")
        if self.node is None:
            if self._hooks is None:
                self._hooks = []
            hooks = self._hooks
        else:
            if self.node.hooks is None:
                self.node.hooks = {}
            hooks = self.node.hooks.setdefault(self._output, [])
        return HookHandle(hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: PostHook) -> HookHandle:
        """Calls `hook(tensor)` after `grad` of this leaf was added to. What it returns has `remove()`."""
        if not (self.is_leaf and self.requires_grad):
            raise RuntimeError("register_post_accumulate_grad_hook() is for leaves that require a gradient")
        if self._post_hooks is None:
            self._post_hooks = []
        return HookHandle(self._post_hooks, hook)

    def retain_grad(self) -> None:
        """Lets backward() add to `grad` of this tensor, although it is no leaf."""
        if not self.requires_grad:
            raise RuntimeError("retain_grad() on a tensor that requires no gradient")
        if self.node is None:
            return
        hooks = (self.node.hooks or {}).get(self._output, [])
        if not any(isinstance(hook, _Retain) and hook.tensor() is self for hook in hooks):
            self.register_hook(_Retain(self))

    def edge(self) -> tuple[Any, int]:
        """Where a gradient of this tensor goes: (node, output), or (this leaf, 0)."""
        return (self, 0) if self.node is None else (self.node, self._output)

    def accumulate(self, gradient: Array, *, owned: bool) -> None:
        """Adds to `grad` of a leaf. `owned` says that the array is nobody else's, so that it can be kept."""
        if self._hooks:
            # A hook may have kept what it saw, and may keep what it returned.
            gradient, owned = run_hooks(self._hooks, gradient), False
        if self.grad is None:
            home = self.home
            if home is not None:
                home.is_lent = False
                if gradient is not home.array:
                    gradient = home.move_in(gradient)
            elif not owned:
                gradient = self._copy(gradient)
            self.grad = Tensor(gradient)
        else:
            self._check_held(self.grad, gradient)
            if 0 in self.grad.array.stride:
                # Given by the caller, with several elements in one place: each would be added to for all.
                self.grad = Tensor(self._copy(self.grad.array))
            runtime(self.device).add(self.grad.array, self.grad.array, gradient)
        hooks = self._post_hooks
        if hooks:
            # As they are now: a hook may add and remove hooks.
            for hook in tuple(hooks):
                hook(self)

    def _check_held(self, held: Tensor, gradient: Array) -> None:
        """Raises TypeError or ValueError where `grad`, which anybody may have set, is none that `gradient` can be added to."""
        if not isinstance(held, Tensor):
            raise TypeError(f"backward() adds to grad, which is a tensor or None; it was set to {type(held).__name__}")
        own = held.array
        device, own_device = gradient.storage.device, own.storage.device
        if own.shape != gradient.shape or own.dtype is not gradient.dtype or own_device is not device:
            raise ValueError(
                f"a gradient of shape {list(gradient.shape)}, {gradient.dtype}, on {device} cannot be added to a grad of shape"
                f" {list(own.shape)}, {own.dtype}, on {own_device}; set grad to None, or to a tensor of that kind"
            )

    def _copy(self, gradient: Array) -> Array:
        kernels = runtime(self.device)
        copied = kernels.empty_like(gradient)
        kernels.copy(copied, gradient)
        return copied

    def room(self, layout: Layout) -> Array | None:
        """Memory that a gradient of this leaf, of that layout, is to be written to; None where any will do."""
        return None

    def show(self, base: Tensor) -> None:
        """Notes that this tensor is a view of `base`."""
        self.base = base = base if base.base is None else base.base
        if base.views is None:
            base.views = WeakValueDictionary()
        base.views[id(self)] = self

    def become(self, other: Tensor) -> None:
        """Takes the place of `other`, the result of an operation that wrote this tensor's memory."""
        # Hooks stay with the value that was written over; what retain_grad() keeps is the gradient of what is there now.
        hooks = (self.node.hooks or {}).get(self._output, []) if self.node is not None else []
        retained = [hook for hook in hooks if isinstance(hook, _Retain) and hook.tensor() is self]
        self.array, self.node, self._output = other.array, other.node, other._output
        self.requires_grad = other.requires_grad
        for hook in retained:
            hooks.remove(hook)
            self.register_hook(hook)


def _from_values(kind: type[Tensor], values: np.ndarray, dtype: DType, device: Device, requires_grad: bool) -> Tensor:
    """The tensor that `__reduce_ex__` took apart, of its class whatever that one's `__init__` takes."""
    made = kind.__new__(kind)
    Tensor.__init__(made, runtime(device).from_host(values, dtype), requires_grad)
    return made


class _Retain:
    """The hook of `retain_grad`. It holds the tensor weakly: the graph holds the hook, and the tensor the graph."""

    comes_last = True

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = ref(tensor)

    def __call__(self, gradient: Tensor) -> None:
        tensor = self.tensor()
        if tensor is not None:
            tensor.accumulate(gradient.array, owned=False)


class _KeepAlive:
    """Lets NumPy view an array's memory and hold its storage for as long as the view lives."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.__array_interface__ = array.ndarray.__array_interface__
